"""Step 3: whether the same bits come out over every link, with and without cache, and as a CUDA graph."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from expertcast.data.models import load_model, load_tokenizer
from expertcast.runtime import GraphDecoder, OffloadConfig, benchmark, offload
from expertcast.runtime.benchmarking.bench import BenchSettings
from expertcast.runtime.engine.kernels import kernel_name
from gpu_steps.day import Day

MODEL = "reference"
PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune,"
SLOTS = 192


def run(day: Day) -> bool:
    """Decode in each way, and compare with the resident model and with steps one by one."""
    new_tokens, repetitions = (3, 1) if day.small else (32, 3)
    model, tokenizer = load_model(MODEL, device=day.device), load_tokenizer(MODEL)
    settings = BenchSettings(new_tokens=new_tokens, repetitions=repetitions)
    decoded = benchmark(model, tokenizer, PROMPT, ways(day.device), settings)
    checks = {name: run["identical"] for name, run in decoded["runs"].items() if not name.startswith("speculate")}
    day.save(checks=checks, decoding=decoded)
    graph = graph_steps(day.device, new_tokens)
    if "same_tokens" in graph:
        checks["graph"] = graph["same_tokens"]
    day.save(checks=checks, graph=graph)
    return all(checks.values())


def ways(device: str) -> dict[str, OffloadConfig]:
    """On-demand loading, prefetching and speculation, with a predictor that needs no training."""
    on_demand = OffloadConfig(slots=SLOTS)
    exact = replace(on_demand, predictor="next_norm")
    runs = {
        "on_demand_no_cache": OffloadConfig(cache=False),
        "exact_no_cache": OffloadConfig(cache=False, predictor="next_norm"),
        "on_demand": on_demand,
        "exact": exact,
        "speculate": replace(exact, mode="speculate"),
    }
    if device != "cuda":
        return runs
    return {f"{name}_{link}": replace(runs[name], link=link) for name in runs for link in ("cuda", "kernel")}


def graph_steps(device: str, new_tokens: int) -> dict[str, Any]:
    """Decode steps over the device-side link: one by one, and with CUDA as a graph."""
    tokens: dict[str, list[int]] = {}
    found: dict[str, Any] = {}
    for name in ("eager", "graph") if device == "cuda" else ("eager",):
        tokens[name], found[f"{name}_tpot_s"] = _steps(device, new_tokens, captured=name == "graph")
    if "graph" in tokens:
        found["same_tokens"] = tokens["graph"] == tokens["eager"]
    return found


def _steps(device: str, new_tokens: int, *, captured: bool) -> tuple[list[int], float]:
    """(tokens, median seconds per token)."""
    model, tokenizer = load_model(MODEL, device=device), load_tokenizer(MODEL)
    model.set_experts_implementation(kernel_name(model))
    prompt_ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"].to(device)
    seconds, tokens = [], []
    with offload(model, link="kernel", slots=SLOTS, predictor="next_norm") as offloaded:
        decoder = GraphDecoder(offloaded, prompt_ids.shape[1] + new_tokens + 8, capture=captured)
        logits_V = decoder.start(prompt_ids)
        for _ in range(new_tokens):
            tokens.append(int(logits_V.argmax()))
            start = time.perf_counter()
            logits_V = decoder.step()
            int(logits_V.argmax())
            seconds.append(time.perf_counter() - start)
    torch.cuda.empty_cache()
    return tokens, statistics.median(seconds)
