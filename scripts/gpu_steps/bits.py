"""Step 3: whether the same bits come out over every link, with and without cache, and as a CUDA graph."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.discovery import experts_implementation, find_moe_layers
from expertcast.data.models import load_model, load_tokenizer
from expertcast.runtime import GraphDecoder, OffloadConfig, benchmark, offload
from expertcast.runtime.benchmarking.bench import BenchSettings
from expertcast.runtime.benchmarking.decoding import decode_greedily
from expertcast.runtime.engine.kernels import kernel_name
from expertcast.runtime.timed.costs import LAUNCHES
from gpu_steps.day import Day

MODEL = "reference"
PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune,"
SLOTS = 192
PACED = 5e9
"""Bytes per second of a slower machine's link, which the device's stands for."""


def run(day: Day) -> bool:
    """Decode in each way, and compare with the resident model and with steps one by one."""
    new_tokens, repetitions = (3, 1) if day.small else (32, 3)
    model, tokenizer = load_model(MODEL, device=day.device), load_tokenizer(MODEL)
    settings = BenchSettings(new_tokens=new_tokens, repetitions=repetitions)
    prompt_ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"].to(day.device)

    def decoded(link: str) -> bool:
        found = benchmark(model, tokenizer, PROMPT, ways(link), settings)
        checks = {name: run["identical"] for name, run in found["runs"].items() if not name.startswith("speculate")}
        day.save(**{link: {"checks": checks, **found}})
        return all(checks.values())

    def captured() -> bool:
        day.save(graph=graph_steps(model, prompt_ids, new_tokens, slots=SLOTS, predictor="next_norm"))
        return bool(day.result["graph"].get("same_tokens", True))

    def launches() -> bool:
        day.save(host=host_per_launch(model, prompt_ids, new_tokens))
        return True

    links = ("emulated",) if day.small else ("cuda", "kernel", "paced")
    passed = [day.attempt(link, lambda link=link: decoded(link)) for link in links]
    return all([*passed, day.attempt("graph", captured), day.attempt("host", launches)])


def ways(link: str) -> dict[str, OffloadConfig]:
    """On-demand loading, prefetching and speculation, with a predictor that needs no training."""
    moved = {"link": "cuda", "bandwidth": PACED} if link == "paced" else {"link": link}
    on_demand = OffloadConfig(slots=SLOTS, **moved)
    exact = replace(on_demand, predictor="next_norm")
    return {
        "on_demand_no_cache": replace(on_demand, slots=None, cache=False),
        "exact_no_cache": replace(exact, slots=None, cache=False),
        "on_demand": on_demand,
        "exact": exact,
        "speculate": replace(exact, mode="speculate"),
    }


def host_per_launch(model: PreTrainedModel, prompt_ids: Tensor, new_tokens: int) -> dict[str, float]:
    """Of the resident model's decode steps, which are so small that a GPU waits for the host: `HOSTS` of the timed
    device.

    Args:
        model: the bundled one.
        prompt_ids: [1, T] on its device.
        new_tokens: how many are decoded.
    """
    layers, counted = len(find_moe_layers(model)), LAUNCHES[model.config.model_type]
    launches = layers * (counted.attention + counted.experts) + counted.before + counted.after
    with experts_implementation(model, "batched_mm"):
        decode_greedily(model, prompt_ids, 3)
        step_s = statistics.median(decode_greedily(model, prompt_ids, new_tokens).steps_s)
    return {"step_us": step_s * 1e6, "launches": launches, "launch_us": step_s / launches * 1e6}


def graph_steps(model: PreTrainedModel, prompt_ids: Tensor, new_tokens: int, **options: Any) -> dict[str, Any]:
    """Decode steps over the device-side link: one by one, and with CUDA as a graph.

    Args:
        model: on the device that computes.
        prompt_ids: [1, T] there.
        new_tokens: how many are decoded.
        options: of the offload.
    """
    tokens: dict[str, list[int]] = {}
    found: dict[str, Any] = {}
    with experts_implementation(model, kernel_name(model)):
        for name in ("eager", "graph") if prompt_ids.is_cuda else ("eager",):
            captured = name == "graph"
            tokens[name], found[f"{name}_tpot_s"] = _steps(model, prompt_ids, new_tokens, captured, options)
    if "graph" in tokens:
        found["same_tokens"] = tokens["graph"] == tokens["eager"]
    return found


def _steps(
    model: PreTrainedModel, prompt_ids: Tensor, new_tokens: int, captured: bool, options: dict[str, Any]
) -> tuple[list[int], float]:
    """(tokens, median seconds per token), as :func:`graph_steps`; `captured`: as a graph."""
    seconds, tokens = [], []
    with offload(model, link="kernel", **options) as offloaded:
        decoder = GraphDecoder(offloaded, prompt_ids.shape[1] + new_tokens + 8, capture=captured)
        logits_V = decoder.start(prompt_ids)
        for _ in range(new_tokens):
            tokens.append(int(logits_V.argmax()))
            start = time.perf_counter()
            logits_V = decoder.step()
            int(logits_V.argmax())
            seconds.append(time.perf_counter() - start)
    return tokens, statistics.median(seconds)
