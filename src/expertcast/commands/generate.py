"""`expertcast generate`: generate with experts offloaded and forecast."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from expertcast.commands.options import Count, Option, bandwidth, positive
from expertcast.commands.output import Outcome, table
from expertcast.commands.shared import BANDWIDTH_HELP, Model, ModelOptions
from expertcast.data.models import load_tokenizer
from expertcast.predictors import ExpertcastError
from expertcast.predictors.fields import field_docs
from expertcast.runtime.config import MODES, OffloadConfig
from expertcast.runtime.loading import load_offloaded
from expertcast.runtime.policies import Policies


def _field(name: str, metavar: str, read: Callable[[str], object] | None = None, more: str = "") -> Option:
    """An option for a field of the configuration, with that field's docstring as its help.

    Args:
        name: the field.
        metavar: what stands for the value in the help.
        read: makes a value of one word, where the type does not.
        more: what else the help says.
    """
    return Option(metavar=metavar, read=read, help=field_docs(OffloadConfig)[name].rstrip(".") + more)


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """What `expertcast generate` takes. What has the name of a field of :class:`OffloadConfig` is None unless given."""

    model: Model
    prompt: Annotated[str, Option(metavar="P")]
    """Text to continue."""
    config: Annotated[Path | None, Option(metavar="FILE")] = None
    """How to offload, as `expertcast advise --save` or OffloadConfig.save wrote it; other options win over it."""
    predictor: Annotated[str | None, _field("predictor", "NAME|CKPT")] = None
    mode: Annotated[str | None, Option(choices=MODES, help=field_docs(OffloadConfig)["mode"])] = None
    slots: Annotated[int | None, _field("slots", "S", positive)] = None
    memory: Annotated[str | None, _field("memory", "BYTES")] = None
    policies: Annotated[tuple[str, ...], Option(metavar="KIND=P")] = ()
    """eviction, prefetch, miss, routing, pre_eviction or scope, such as eviction=lfu; or a preset's name."""
    next_token: Annotated[str | None, _field("next_token", "CKPT")] = None
    store_folder: Annotated[str | None, Option(metavar="DIR")] = None
    """Keep the experts packed in this folder, for models larger than memory."""
    bandwidth: Annotated[float | None, _field("bandwidth", "BYTES/S", bandwidth, f"; {BANDWIDTH_HELP}")] = None
    new_tokens: Count = 64
    """Tokens to generate."""


def run(options: Options) -> Outcome:
    """Load the model offloaded, and continue the prompt greedily."""
    config = configuration(options)
    tokenizer = load_tokenizer(options.model)
    inputs = tokenizer(options.prompt, return_tensors="pt").to(options.device_name)
    if not inputs["input_ids"].shape[1]:
        raise ExpertcastError("--prompt holds no token: give some text")
    with load_offloaded(options.model, config, device=options.device_name, dtype=options.dtype) as offloaded:
        output = offloaded.generate(**inputs, max_new_tokens=options.new_tokens, do_sample=False)
        stats = offloaded.stats.as_dict()
    text = tokenizer.decode(output[0], skip_special_tokens=True)
    totals = {key: value for key, value in stats.items() if isinstance(value, (int, float))}
    return {"text": text, "tokens": output[0].tolist(), "stats": stats}, f"{text}\n\n{table(totals)}"


def configuration(options: Options) -> OffloadConfig:
    """The file's configuration, or the default one, with what was given in place of what it says.

    Raises:
        ExpertcastError: a bad file, or options that the file's others rule out; the line names the file.
    """
    config = OffloadConfig() if options.config is None else OffloadConfig.load(options.config)
    names = {field.name for field in dataclasses.fields(OffloadConfig)}
    changed = {name: value for name, value in vars(options).items() if name in names and value is not None}
    changed["policies"] = _policies(options.policies) if options.policies else config.policies
    if options.store_folder is not None:
        changed["store"] = "disk"
    if (options.slots is None) != (options.memory is None):  # two ways to say the same: the file's goes
        changed |= {"slots": options.slots, "memory": options.memory}
    try:
        return OffloadConfig.of(config, changed)
    except ExpertcastError as error:
        if options.config is None:
            raise
        raise ExpertcastError(f"{options.config} with what is given beside it: {error}") from error


def _policies(words: Sequence[str]) -> Policies | str:
    """`kind=policy` for each kind that is not the default, or a preset's name.

    Raises:
        ExpertcastError: an unknown kind or policy.
    """
    if len(words) == 1 and "=" not in words[0]:
        return words[0]
    kinds = list(Policies().as_dict())
    given = dict(word.partition("=")[::2] for word in words)
    for kind in given:
        if kind not in kinds:
            raise ExpertcastError(f"--policies {kind}: give a preset alone, or KIND=POLICY of {', '.join(kinds)}")
    return Policies(**given)
