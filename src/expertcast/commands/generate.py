"""`expertcast generate`: generate with experts offloaded and forecast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from expertcast.commands.generate_text import TimedStreamer, account, chat_inputs, held
from expertcast.commands.options import (
    BANDWIDTH,
    COUNT,
    Count,
    Fields,
    Given,
    Model,
    ModelOptions,
    Option,
    positive_number,
)
from expertcast.commands.output import Outcome
from expertcast.commands.policies import POLICIES_HELP, policies_of
from expertcast.data.models import load_tokenizer
from expertcast.predictors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.runtime.config import FORECASTS, MODES, OffloadConfig
from expertcast.runtime.loading import load_offloaded
from expertcast.runtime.option_values import named_checkpoint

_OFFLOAD = Fields(
    predictor=Option(metavar="NAME|CKPT"),
    mode=Option(choices=MODES),
    slots=COUNT,
    memory=Option(metavar="BYTES"),
    next_token=Option(metavar="CKPT"),
    forecasts=Option(choices=FORECASTS),
    draft=Option(metavar="DRAFT"),
    bandwidth=BANDWIDTH,
)


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """What `expertcast generate` takes."""

    model: Model
    prompt: Annotated[str, Option(metavar="P")]
    """Text to continue; with --chat, what the model is asked."""
    chat: bool = False
    """Ask in the model's own chat template, and print the answer alone."""
    system: Annotated[str | None, Option(metavar="P")] = None
    """With --chat, what the model is told to be."""
    config: Annotated[Path | None, Option(metavar="FILE")] = None
    """How to offload, as `expertcast advise --save` or OffloadConfig.save wrote it; other options win over it."""
    policies: Annotated[tuple[str, ...], Option(metavar="KIND=P", help=POLICIES_HELP)] = ()
    """How experts are evicted, prefetched and missed."""
    store_folder: Annotated[str | None, Option(metavar="DIR")] = None
    """Keep the experts packed in this folder, for models larger than memory."""
    codec: Annotated[str | None, Option(metavar="CODEC")] = None
    """How `expertcast store` packed them there (default: raw)."""
    pools: Annotated[str | None, Option(metavar="C=BYTES,...")] = None
    """With a codec, memory for experts that are kept compressed beside the slots; see `expertcast advise`."""
    draft_length: Annotated[int | None, COUNT] = None
    """Tokens drafted in every cycle (default: as many as pay, none included)."""
    new_tokens: Count = 64
    """Tokens to generate."""
    temperature: Annotated[float | None, Option(metavar="T", read=positive_number)] = None
    """Sample, with logits divided by this (default: the likeliest token each time)."""
    top_p: Annotated[float | None, Option(metavar="P")] = None
    """Sample among the likeliest tokens that have this probability together (default: 1)."""
    seed: int | None = None
    """Of the samples (default: other ones each time)."""
    offload: Annotated[Given[OffloadConfig], _OFFLOAD]
    """How the experts are offloaded; defaults are those without --config."""

    def __post_init__(self) -> None:
        if self.system is not None and not self.chat:
            raise ExpertcastError("--system is a part of a chat: give --chat too, or leave it out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ExpertcastError(f"--top-p {self.top_p}: give a probability above 0 and up to 1")
        if self.seed is not None and not self.sampling:
            raise ExpertcastError("--seed is of samples: give --temperature or --top-p too, or leave it out")

    @property
    def sampling(self) -> dict[str, float | bool]:
        """What `generate` of transformers is told of sampling; empty for greedy decoding."""
        if self.temperature is None and self.top_p is None:
            return {}
        return {"do_sample": True, "temperature": self.temperature or 1.0, "top_p": self.top_p or 1.0, "top_k": 0}


def run(options: Options) -> Outcome:
    """Load the model offloaded and continue the prompt, printing words as they come; what is returned to be printed is
    what the generation took."""
    config = configuration(options)
    given = options.passed_on(options.model)
    tokenizer = load_tokenizer(options.model, **given)
    if options.chat:
        inputs = chat_inputs(tokenizer, options.prompt, options.system, options.model)
    else:
        inputs = tokenizer(options.prompt, return_tensors="pt")
    if not inputs["input_ids"].shape[1]:
        raise ExpertcastError("--prompt holds no token: give some text")
    inputs = inputs.to(options.device_name)
    device, dtype = options.device_name, options.dtype
    with load_offloaded(options.model, config, device=device, dtype=dtype, **given) as offloaded:
        if options.seed is not None:
            torch.manual_seed(options.seed)
        streamer = TimedStreamer(tokenizer, skip_prompt=options.chat)
        output = offloaded.generate(
            **inputs, max_new_tokens=options.new_tokens, draft_length=options.draft_length, streamer=streamer,
            **(options.sampling or {"do_sample": False}),
        )  # fmt: skip
        stats, timing, memory = offloaded.stats.as_dict(), streamer.as_dict(), held(offloaded)
    text = tokenizer.decode(output[0], skip_special_tokens=True)
    result = {"text": text, "tokens": output[0].tolist(), "timing": timing, "memory": memory, "stats": stats}
    return result, "\n".join(["", account(timing, stats, memory), *draft_lines(stats)])


def draft_lines(stats: Json) -> list[str]:
    """What was drafted, and why, in a line or two; nothing where nothing was."""
    governors = stats.get("drafts", {}).get("by_sequences", {}).values()
    return [f"draft: {line['reason']}" for governor in governors for line in governor["reasons"][-1:]]


def configuration(options: Options) -> OffloadConfig:
    """The file's configuration, or the default one, with what was given in place of what it says.

    Raises:
        ExpertcastError: a bad file, or options that the file's others rule out; the line names the file.
    """
    config = OffloadConfig() if options.config is None else OffloadConfig.load(options.config)
    changed = dict(options.offload)
    if options.policies:
        changed["policies"] = policies_of(options.policies)
    if options.store_folder is not None:
        changed |= {"store": "disk", "store_folder": options.store_folder}
    if options.codec is not None:
        changed["codec"] = options.codec
    if options.pools is not None:
        changed["pools"] = options.pools
    if ("slots" in changed) != ("memory" in changed):  # two ways to say the same: the file's goes
        changed = {"slots": None, "memory": None, **changed}
    try:
        made = OffloadConfig.of(config, changed)
        for given in (made.predictor, made.next_token):
            if isinstance(given, (str, Path)):
                named_checkpoint(given)
    except ExpertcastError as error:
        if options.config is None:
            raise
        raise ExpertcastError(f"{options.config} with what is given beside it: {error}") from error
    return made
