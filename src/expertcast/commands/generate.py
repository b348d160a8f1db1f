"""`expertcast generate`: generate with experts offloaded and forecast, printing words as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase, TextStreamer

from expertcast.commands.numbers import positive_number
from expertcast.commands.options import COUNT, SEED, Count, DeploymentOptions, Model, Option
from expertcast.commands.output import Outcome, forecast_lines, offload_lines
from expertcast.data.models import check_token_ids, load_config
from expertcast.data.packed_experts import weight_bits
from expertcast.data.packed_linear import other_bytes
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json, format_bytes

if TYPE_CHECKING:
    from expertcast.runtime.config import OffloadConfig
    from expertcast.runtime.offloading import OffloadedModel

    Generator = tuple[OffloadedModel, Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(DeploymentOptions):
    """Options of commands that generate text."""

    model: Model
    draft_length: Annotated[int | None, COUNT] = None
    """Tokens to draft in every cycle (default: the number that is fastest, 0 included)."""
    temperature: Annotated[float | None, Option(metavar="T", read=positive_number)] = None
    """Sample with this temperature (default: greedy decoding)."""
    top_p: Annotated[float | None, Option(metavar="P")] = None
    """Sample among the most likely tokens with this total probability (default: 1)."""
    seed: Annotated[int | None, SEED] = None
    """Random seed of sampling (default: none, samples vary)."""

    def __post_init__(self) -> None:
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ExpertcastError(f"--top-p {self.top_p}: give a probability above 0 and up to 1")
        if self.seed is not None and not self.sampling:
            raise ExpertcastError("--seed needs --temperature or --top-p: give one of them, or leave --seed out")

    @property
    def sampling(self) -> dict[str, float | bool]:
        """Sampling arguments of `generate` of transformers; empty for greedy decoding."""
        if self.temperature is None and self.top_p is None:
            return {}
        return {"do_sample": True, "temperature": self.temperature or 1.0, "top_p": self.top_p or 1.0, "top_k": 0}

    def configuration(self) -> OffloadConfig:
        """Return the configuration, as :meth:`DeploymentOptions.configuration`.

        Raises:
            ExpertcastError: --draft-length without a draft.
        """
        config = super().configuration()
        if self.draft_length is not None and config.draft == "none":
            raise ExpertcastError(
                f"--draft-length {self.draft_length} needs a draft: give --draft too, or leave it out"
            )
        return config

    @contextmanager
    def generator(self, config: OffloadConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Generator]:
        """Load the model offloaded; yield it with its `generate` under these options."""
        with self.offloaded(self.model, config) as offloaded:
            if self.seed is not None:
                torch.manual_seed(self.seed)
            sampling: Json = self.sampling or {"do_sample": False}
            yield (
                offloaded,
                partial(offloaded.generate, draft_length=self.draft_length, tokenizer=tokenizer, **sampling),
            )


@dataclass(frozen=True, kw_only=True)
class Options(GenerationOptions):
    """Options of `expertcast generate`."""

    prompt: Annotated[str, Option(metavar="P")]
    """Text to continue; with --chat, the question."""
    chat: bool = False
    """Use the model's chat template, and print only the answer."""
    system: Annotated[str | None, Option(metavar="P")] = None
    """System prompt, with --chat."""
    new_tokens: Count = 64
    """Number of tokens to generate."""

    def __post_init__(self) -> None:
        if self.system is not None and not self.chat:
            raise ExpertcastError("--system needs --chat: give --chat too, or leave --system out")
        super().__post_init__()


def run(options: Options) -> Outcome:
    """Load the model offloaded, print the continuation word by word, and return timing and statistics."""
    from expertcast.runtime.config import OffloadConfig

    config, tokenizer = options.configuration(), options.tokenizer(options.model)
    if options.chat:
        remedy = "leave --chat out" if options.system is None else "leave --system out"
        inputs = chat_inputs(tokenizer, conversation(options.system, options.prompt), options.model, remedy)
    else:
        inputs = tokenizer(options.prompt, return_tensors="pt")
    if not inputs["input_ids"].shape[1]:
        raise ExpertcastError("--prompt has no tokens: give some text")
    check_token_ids(inputs["input_ids"], load_config(options.source_of(options.model)), tokenizer)
    if config.context == OffloadConfig.context:
        config = replace(config, context=inputs["input_ids"].shape[1] + options.new_tokens)
    inputs = inputs.to(options.device_name)
    with options.generator(config, tokenizer) as (offloaded, generate):
        streamer = TimedStreamer(tokenizer, skip_prompt=options.chat)
        output = generate(**inputs, max_new_tokens=options.new_tokens, streamer=streamer)
        stats, timing, memory = offloaded.stats.as_dict(), streamer.as_dict(), held(offloaded)
        notes = offload_lines(offloaded, config)
    text = tokenizer.decode(output[0], skip_special_tokens=True)
    result = {"text": text, "tokens": output[0].tolist(), "timing": timing, "memory": memory, "stats": stats}
    governors = stats.get("drafts", {}).get("by_sequences", {}).values()
    drafts = [f"draft: {line['reason']}" for governor in governors for line in governor["reasons"][-1:]]
    lines = [*account(timing, stats, memory), *forecast_lines({config.mode: result}), *notes, *drafts]
    return result, "\n".join(["", *lines])


class TimedStreamer(TextStreamer):  # type: ignore[misc]
    """Prints words as soon as they are complete, and records the time of each token.

    Args:
        tokenizer: the model's own.
        skip_prompt: whether the prompt is left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_prompt: bool) -> None:
        super().__init__(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)
        self._start = time.perf_counter()
        self._seconds: list[float] = []
        self._prompt = True

    def put(self, value: Tensor) -> None:
        """Receive tokens; the first call brings the prompt."""
        if not self._prompt:
            self._seconds += [time.perf_counter() - self._start] * value.numel()
        self._prompt = False
        super().put(value)

    def as_dict(self) -> Json:
        """Return `new_tokens`, `ttft_s` from construction to the first token, and `tokens_per_s` after it; None if
        there are too few tokens."""
        seconds = self._seconds
        took = seconds[-1] - seconds[0] if seconds else 0.0
        return {
            "new_tokens": len(seconds),
            "ttft_s": seconds[0] if seconds else None,
            "tokens_per_s": (len(seconds) - 1) / took if took else None,
        }


def conversation(system: str | None, *prompts: str) -> list[dict[str, str]]:
    """Return the messages of a system prompt, if there is one, and of a user."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return messages + [{"role": "user", "content": prompt} for prompt in prompts]


def chat_inputs(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], model: str, remedy: str
) -> BatchEncoding:
    """Apply the model's chat template to a conversation, up to the next answer.

    Raises:
        ExpertcastError: the tokenizer has no template, or one that refuses the messages; the message ends in `remedy`.
    """
    if tokenizer.chat_template is None:
        raise ExpertcastError(f"the tokenizer of {model!r} has no chat template: leave --chat out")
    try:
        inputs: BatchEncoding = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except TemplateError as error:
        raise ExpertcastError(f"the chat template of {model!r} refuses this: {error}; {remedy}") from error
    return inputs


def held(offloaded: OffloadedModel) -> Json:
    """Return the memory of a run: `slots` of `experts` with their bytes on the device, bytes of an expert, bits of a
    weight of the experts, bytes of the other weights, `store` with its bytes, and the link with the bytes that it read
    from a disk."""
    store, pool, link = offloaded.store, offloaded.pool, offloaded.link
    return {
        "slots": pool.count,
        "experts": store.layers * store.experts,
        "expert_bytes": store.layout.block_bytes,
        "weight_bits": weight_bits(offloaded.view),
        "device": str(next(offloaded.view[0].router.parameters()).device),
        "other_bytes": other_bytes(offloaded.model, offloaded.view),
        "device_bytes": pool.nbytes,
        "draft_bytes": sum(offloaded.drafting.memory.values()),
        "store": store.name,
        "store_bytes": store.stored_nbytes,
        "link": link.name,
        "bytes_read": link.bytes_read,
        "bandwidth": getattr(link, "bandwidth", None),
    }


def account(timing: Json, stats: Json, where: Json) -> list[str]:
    """Return three lines: speed, hits and transfers of experts, and memory.

    Args:
        timing: :meth:`TimedStreamer.as_dict`.
        stats: statistics of the run.
        where: result of :func:`held`.
    """
    count, moved = timing["new_tokens"], stats["bytes_moved"]
    speed = [f"{count} tokens"]
    if timing["ttft_s"] is not None:
        speed.append(f"{timing['ttft_s']:.2f} s to the first")
    if timing["tokens_per_s"] is not None:
        speed.append(f"{timing['tokens_per_s']:.1f} tokens/s after it")
    hits = f"experts: {stats['hits']:,} of {stats['requests']:,} requests hit ({stats['hit_rate']:.1%}), "
    hits += f"{format_bytes(moved)} moved ({format_bytes(moved / max(1, count))} a token), "
    if where["bytes_read"]:
        hits += f"{format_bytes(where['bytes_read'])} read from disk, "
    hits += f"{stats['waited_s']:.2f} s waited"
    draft = f", drafts {format_bytes(where['draft_bytes'])}" if where["draft_bytes"] else ""
    rate = "" if where["bandwidth"] is None else f" at {format_bytes(where['bandwidth'])}/s"
    place = "the checkpoint's own files" if where["store"] == "checkpoint" else where["store"]
    device, kept = format_bytes(where["device_bytes"]), format_bytes(where["store_bytes"])
    slots = f"slots: {where['slots']} of {where['experts']} experts, {device} on {where['device']}{draft}; "
    slots += f"all of them {kept} in {place}, {where['weight_bits']:.3g} bits a weight; link {where['link']}{rate}"
    return [", ".join(speed), hits, slots]
