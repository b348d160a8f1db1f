"""Greedy decoding with every step timed alone, and its logits kept for comparison. V vocabulary."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from expertcast.data.discovery import find_moe_layers
from expertcast.predictors.progress import Progress
from expertcast.runtime.offloaded import OffloadedModel
from expertcast.runtime.recording.recorder import Recorder
from expertcast.runtime.storage.layout import BlockLayout


@dataclass(slots=True)
class Decoding:
    """One greedy decoding."""

    tokens: list[int]
    logits: list[Tensor]
    """Logits [V] from which each token was taken."""
    ttft_s: float
    """Prefill up to the first token."""
    steps_s: list[float]
    """Each further token."""


@torch.no_grad()
def decode_greedily(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    new_tokens: int,
    *,
    offloaded: OffloadedModel | None = None,
    recorder: Recorder | None = None,
) -> Decoding:
    """Decode `new_tokens` tokens (an end-of-text token does not stop it).

    Statistics and recording start after the prefill: both are about the tokens after the first.

    Args:
        model: the model, offloaded or not.
        prompt_ids: [1, T] on the model's device.
        new_tokens: how many are decoded.
        offloaded: the offload that the model runs under.
        recorder: the one that the offload was given.
    """
    cache = DynamicCache(config=model.config)
    decoding = Decoding([], [], 0.0, [])
    inputs = prompt_ids
    for step in Progress("decoding", unit="token", steps=range(new_tokens)):
        start = _now(prompt_ids.device)
        if recorder is not None:
            recorder.step_start()
        logits_V = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        inputs = logits_V.argmax().view(1, 1)
        if recorder is not None:
            recorder.step_end()
        seconds = _now(prompt_ids.device) - start
        decoding.logits.append(logits_V)
        if step:
            decoding.steps_s.append(seconds)
        else:
            decoding.ttft_s = seconds
            if offloaded is not None:
                offloaded.reset_stats()
            if recorder is not None:
                recorder.clear()
        decoding.tokens.append(int(inputs))
    return decoding


def balanced_bandwidth(model: PreTrainedModel, resident: Decoding) -> float:
    """Bytes per second at which K copies take as long as one layer of the resident model."""
    view = find_moe_layers(model)
    layer_s = statistics.median(resident.steps_s) / len(view)
    return view.shape.top_k * BlockLayout.of(view).block_bytes / layer_s


def same_logits(one: Decoding, other: Decoding) -> bool:
    """Whether the logits of every step that both have are the same bits."""
    return all(torch.equal(own, its) for own, its in zip(one.logits, other.logits, strict=False))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
