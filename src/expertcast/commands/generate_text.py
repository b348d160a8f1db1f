"""Text on standard output as it is generated, and what the generation took, for `expertcast generate`."""

from __future__ import annotations

import time

from jinja2 import TemplateError
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase
from transformers.generation.streamers import TextStreamer

from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json, size_text
from expertcast.runtime.offloading import OffloadedModel


class TimedStreamer(TextStreamer):  # type: ignore[misc]
    """Prints words as soon as they are whole, and keeps when each token came.

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
        """Tokens that are certain; the first call is the prompt's."""
        if not self._prompt:
            self._seconds += [time.perf_counter() - self._start] * value.numel()
        self._prompt = False
        super().put(value)

    def as_dict(self) -> Json:
        """`new_tokens`, `ttft_s` from the making of this to the first token, and `tokens_per_s` of those after it; None
        where there are too few."""
        seconds = self._seconds
        took = seconds[-1] - seconds[0] if seconds else 0.0
        return {
            "new_tokens": len(seconds),
            "ttft_s": seconds[0] if seconds else None,
            "tokens_per_s": (len(seconds) - 1) / took if took else None,
        }


def chat_inputs(tokenizer: PreTrainedTokenizerBase, prompt: str, system: str | None, model: str) -> BatchEncoding:
    """A question, and what the model is told to be, in its own chat template, ready to be answered.

    Raises:
        ExpertcastError: the tokenizer has no template, or one that refuses a system prompt.
    """
    if tokenizer.chat_template is None:
        raise ExpertcastError(f"the tokenizer of {model!r} has no chat template: leave --chat out")
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    try:
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except TemplateError as error:
        what = "leave --system out" if system is not None else "leave --chat out"
        raise ExpertcastError(f"the chat template of {model!r} refuses this: {error}; {what}") from error
    made: BatchEncoding = inputs
    return made


def held(offloaded: OffloadedModel) -> Json:
    """What the run's experts take: `slots` of `experts` with their bytes on the device, `store` with its bytes, and
    the link between them, with the bytes that it read from a disk."""
    store, pool, link = offloaded.store, offloaded.pool, offloaded.link
    drafts = 0 if offloaded.drafting is None else sum(offloaded.drafting.memory.values())
    return {
        "slots": pool.count,
        "experts": store.layers * store.experts,
        "device": str(next(offloaded.view[0].router.parameters()).device),
        "device_bytes": pool.count * store.layout.block_bytes,
        "draft_bytes": drafts,
        "store": store.name,
        "store_bytes": getattr(store, "stored_nbytes", store.nbytes),
        "link": link.name,
        "bytes_read": link.bytes_read,
        "bandwidth": getattr(link, "bandwidth", None),
    }


def account(timing: Json, stats: Json, where: Json) -> str:
    """Three lines: how fast it was, what became of the experts, and what they take.

    Args:
        timing: of the streamer.
        stats: of the run.
        where: as :func:`held` says.
    """
    count, moved = timing["new_tokens"], stats["bytes_moved"]
    speed = [f"{count} tokens"]
    if timing["ttft_s"] is not None:
        speed.append(f"{timing['ttft_s']:.2f} s to the first")
    if timing["tokens_per_s"] is not None:
        speed.append(f"{timing['tokens_per_s']:.1f} tokens/s after it")
    hits = f"experts: {stats['hits']:,} of {stats['requests']:,} requests hit ({stats['hit_rate']:.1%}), "
    hits += f"{size_text(moved)} moved ({size_text(moved / max(1, count))} a token), "
    if where["bytes_read"]:
        hits += f"{size_text(where['bytes_read'])} read from disk, "
    hits += f"{stats['waited_s']:.2f} s waited"
    draft = f", drafts {size_text(where['draft_bytes'])}" if where["draft_bytes"] else ""
    rate = "" if where["bandwidth"] is None else f" at {size_text(where['bandwidth'])}/s"
    device, kept = size_text(where["device_bytes"]), size_text(where["store_bytes"])
    slots = f"slots: {where['slots']} of {where['experts']} experts, {device} on {where['device']}{draft}; "
    slots += f"all of them {kept} in {where['store']}; link {where['link']}{rate}"
    return "\n".join([", ".join(speed), hits, slots])
