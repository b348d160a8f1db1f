"""`expertcast generate`: generate with experts offloaded and forecast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from expertcast.commands.deployment import DeploymentOptions
from expertcast.commands.generate_text import TimedStreamer, account, chat_inputs, held
from expertcast.commands.numbers import positive_number
from expertcast.commands.options import COUNT, Count, Model, Option
from expertcast.commands.output import Outcome
from expertcast.data.models import load_tokenizer
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json
from expertcast.runtime.drafts.names import NONE
from expertcast.runtime.loading import load_offloaded


@dataclass(frozen=True, kw_only=True)
class Options(DeploymentOptions):
    """What `expertcast generate` takes."""

    model: Model
    prompt: Annotated[str, Option(metavar="P")]
    """Text to continue; with --chat, what the model is asked."""
    chat: bool = False
    """Ask in the model's own chat template, and print the answer alone."""
    system: Annotated[str | None, Option(metavar="P")] = None
    """With --chat, what the model is told to be."""
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
    config = options.configuration()
    if options.draft_length is not None and config.draft == NONE:
        raise ExpertcastError(f"--draft-length {options.draft_length} needs a draft: give --draft too, or leave it out")
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
            tokenizer=tokenizer,
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
