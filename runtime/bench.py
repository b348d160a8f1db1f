"""Time per output token of a model whose experts are offloaded, in several ways on one link (row B16).

Greedy decoding is a loop of its own here, not `generate`: each decode step is one forward, timed alone, and its
logits are kept for the comparison with the resident model. L MoE layers, K experts per token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from expertcast.data.discovery import experts_implementation, find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.runtime.kernels import kernel_name
from expertcast.runtime.offloaded import OffloadedModel, offload
from expertcast.runtime.store import ExpertStore


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


def benchmark(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: str,
    *,
    runs: Mapping[str, Mapping[str, Any]],
    slots: int | None = None,
    bandwidth: float | None = None,
    latency: float = 0.0,
    new_tokens: int = 32,
    repetitions: int = 3,
) -> dict[str, Any]:
    """Decode the prompt greedily in each way, runs in alternation, and compare with the resident model.

    Args:
        runs: arguments of :func:`expertcast.offload` by name, such as
            `{"on_demand": {}, "exact": {"predictor": p}, "speculate": {"predictor": p, "mode": "speculate"}}`.
        slots: for the runs that name none.
        bandwidth: bytes per second of the emulated link. None: such that K copies take as long as one layer computes in
            the resident model, where prefetching can gain most (on a CUDA model the real link is used).

    Returns:
        `bandwidth`, `latency`, `prompt_tokens`, `new_tokens`, `resident.{tpot_s,ttft_s}`, and `runs.<name>` with
        `tpot_s` (median over all decode steps), `tpot_quartiles_s`, `ttft_s` (median), `bytes_per_token`, `hit_rate`,
        `waited_s_per_token`, `identical` (logits of every step bit-equal to the resident model's under the same
        kernel), `same_tokens` and `stats` of the last repetition's decode steps.

    Raises:
        ExpertcastError: as :func:`expertcast.offload`; fewer than 2 new tokens; no repetition.
    """
    if new_tokens < 2 or repetitions < 1:
        raise ExpertcastError(f"new_tokens={new_tokens}, repetitions={repetitions}: give 2 or more, and 1 or more")
    prompt_ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(next(model.parameters()).device)
    if not prompt_ids.shape[1]:
        raise ExpertcastError("the prompt has no token: give some text")
    with experts_implementation(model, kernel_name(model)):
        decode_greedily(model, prompt_ids, 2)  # warm-up
        resident = decode_greedily(model, prompt_ids, new_tokens)
    link: dict[str, Any] = {}
    if not next(model.parameters()).is_cuda:
        link = {"bandwidth": bandwidth or balanced_bandwidth(model, resident), "latency": latency}
    recorded: dict[str, list[tuple[Decoding, dict[str, Any]]]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, arguments in runs.items():
            with offload(model, **{"slots": slots, **link, **arguments}) as offloaded:
                decoding = decode_greedily(model, prompt_ids, new_tokens, offloaded=offloaded)
                recorded[name].append((decoding, offloaded.stats.as_dict()))
    return {
        **link,
        "prompt_tokens": prompt_ids.shape[1],
        "new_tokens": new_tokens,
        "repetitions": repetitions,
        "resident": {"tpot_s": statistics.median(resident.steps_s), "ttft_s": resident.ttft_s},
        "runs": {name: _report(entries, resident) for name, entries in recorded.items()},
    }


@torch.no_grad()
def decode_greedily(
    model: PreTrainedModel, prompt_ids: Tensor, new_tokens: int, *, offloaded: OffloadedModel | None = None
) -> Decoding:
    """Decode `new_tokens` tokens (an end-of-text token does not stop it); the statistics start after the prefill."""
    cache = DynamicCache(config=model.config)
    decoding = Decoding([], [], 0.0, [])
    inputs = prompt_ids
    for step in range(new_tokens):
        start = _now(model)
        logits_V = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        inputs = logits_V.argmax().view(1, 1)
        seconds = _now(model) - start
        decoding.logits.append(logits_V)
        decoding.tokens.append(int(inputs))
        if step:
            decoding.steps_s.append(seconds)
            continue
        decoding.ttft_s = seconds
        if offloaded is not None:
            offloaded.reset_stats()
    return decoding


def balanced_bandwidth(model: PreTrainedModel, resident: Decoding) -> float:
    """Bytes per second at which K copies take as long as one layer of the resident model."""
    view = find_moe_layers(model)
    layer_s = statistics.median(resident.steps_s) / len(view)
    return view.shape.top_k * ExpertStore.block_bytes_of(view) / layer_s


def _report(entries: list[tuple[Decoding, dict[str, Any]]], resident: Decoding) -> dict[str, Any]:
    steps = [seconds for decoding, _ in entries for seconds in decoding.steps_s]
    quartiles = statistics.quantiles(steps, n=4) if len(steps) > 1 else [steps[0]] * 3
    stats = entries[-1][1]
    tokens = len(entries[-1][0].steps_s)
    return {
        "tpot_s": statistics.median(steps),
        "tpot_quartiles_s": [quartiles[0], quartiles[2]],
        "ttft_s": statistics.median(decoding.ttft_s for decoding, _ in entries),
        "bytes_per_token": stats["bytes_moved"] / tokens,
        "hit_rate": stats["hit_rate"],
        "waited_s_per_token": stats["waited_s"] / tokens,
        "identical": all(_same_logits(decoding, resident) for decoding, _ in entries),
        "same_tokens": all(decoding.tokens == resident.tokens for decoding, _ in entries),
        "stats": stats,
    }


def _same_logits(decoding: Decoding, resident: Decoding) -> bool:
    return all(torch.equal(own, other) for own, other in zip(decoding.logits, resident.logits, strict=True))


def _now(model: PreTrainedModel) -> float:
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
