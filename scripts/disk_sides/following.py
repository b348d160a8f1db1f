"""Reading a given text token by token, each step timed. N tokens behind the prompt, V vocabulary.

All sides read the same prompt at once (time to first token) and then the same tokens, not their own. The keys and
values of the prompt are replaced by the resident model's: a prompt needs more experts than slots hold, and is summed
in another order then; from there on every bit can be compared.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from disk_sides.child import bytes_read, timed_part
from expertcast.predictors.messages import Json
from expertcast.runtime import OffloadedModel


@dataclass(slots=True)
class Followed:
    """One text, read."""

    ttft_s: float
    steps_s: list[float]
    """Of the timed steps."""
    logits_NV: Tensor
    """Of all tokens behind the prompt, the untimed ones first."""
    bytes_read: int
    """By the timed steps."""
    prompt_bytes: int
    cache: DynamicCache
    link: Json

    def as_dict(self) -> Json:
        """Plain values, per token where that can be."""
        timed = len(self.steps_s)
        return {
            "ttft_s": self.ttft_s, "steps_s": self.steps_s, "tpot_s": statistics.median(self.steps_s),
            "tpot_mean_s": statistics.fmean(self.steps_s), "bytes_read": self.bytes_read / timed,
            "prompt_bytes_read": self.prompt_bytes, **self.link,
        }  # fmt: skip


@torch.no_grad()
def follow(
    model: PreTrainedModel, spec: Json, truth: dict[str, Tensor] | None, offloaded: OffloadedModel | None = None
) -> Followed:
    """Read the text of a run.

    Args:
        model: offloaded or not.
        spec: of the run.
        truth: what :func:`remembered` gives; None keeps the prompt's own keys and values.
        offloaded: whose counters are read.
    """
    prompt, rest = timed_part(spec)
    cache, before = DynamicCache(config=model.config), bytes_read()
    start = time.perf_counter()
    model(input_ids=torch.tensor([prompt]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    ttft_s, prompt_bytes = time.perf_counter() - start, bytes_read() - before
    if truth is not None:
        cache = DynamicCache(config=model.config)
        for layer in range(model.config.num_hidden_layers):
            cache.update(truth[f"keys.{layer}"], truth[f"values.{layer}"], layer)
    logits, steps_s, read = [], [], 0
    for number, token in enumerate(rest):
        if number == spec["warm"]:
            read = bytes_read()
            if offloaded is not None:
                offloaded.reset_stats()
        start = time.perf_counter()
        found = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits.append(found.logits[0, -1])
        steps_s.append(time.perf_counter() - start)
    read = bytes_read() - read
    steps_s = steps_s[spec["warm"] :]
    link = {} if offloaded is None else _counted(offloaded, read, len(steps_s))
    return Followed(ttft_s, steps_s, torch.stack(logits), read, prompt_bytes, cache, link)


def remember(followed: Followed, spec: Json, path: Path) -> None:
    """Keep what a run computed, and the prompt's keys and values, for others to be compared with."""
    kept = {"logits": followed.logits_NV}
    for layer, each in enumerate(followed.cache.layers):
        kept[f"keys.{layer}"] = each.keys[:, :, : spec["prompt"]].contiguous()
        kept[f"values.{layer}"] = each.values[:, :, : spec["prompt"]].contiguous()
    save_file(kept, path)


def remembered(path: Path) -> dict[str, Tensor]:
    """What :func:`remember` kept."""
    return load_file(path)


def compared(logits_NV: Tensor, truth: dict[str, Tensor]) -> Json:
    """`identical`: whether all logits are the same bits; `same_tokens`: the share of the same largest one."""
    own_NV = truth["logits"][: len(logits_NV)]
    same = (own_NV.argmax(-1) == logits_NV.argmax(-1)).float().mean()
    return {"identical": bool(torch.equal(own_NV, logits_NV)), "same_tokens": float(same)}


def _counted(offloaded: OffloadedModel, read: int, tokens: int) -> Json:
    """What the offload counted in the timed steps."""
    stats: dict[str, Any] = offloaded.stats.as_dict()
    link, waited = offloaded.link, stats["waited_s"]
    reads = link.name == "disk"  # the instant link's copies come when nobody is said to wait
    alone = reads and offloaded.predictor is None  # with forecasts bytes also come while nobody waits
    return {
        "hit_rate": stats["hit_rate"],
        "waited_s": waited / tokens,
        "link_bytes": link.bytes_moved / tokens,
        "link_busy_s": link.busy_s / tokens,
        "rate_waiting": read / waited if alone and waited and read else None,
        "rate_busy": read / link.busy_s if reads and link.busy_s and read else None,
        "slots": offloaded.pool.count,
    }
