"""The last stage of `expertcast demo`: a model decodes with its experts behind a slow link, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.commands.output import say
from expertcast.commands.pace import Allowance, part, threads_that_help
from expertcast.data.discovery import find_moe_layers
from expertcast.predictors import Predictor
from expertcast.predictors.plain import Json, aligned
from expertcast.runtime.benchmarking.bench import COPY_OVER_COMPUTE, BenchSettings, benchmark, usual_runs
from expertcast.runtime.benchmarking.decoding import Decoding, balanced_bandwidth, decode_greedily
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.quality.forecasts import QualityRun, measure_quality, text_windows
from expertcast.runtime.storage.layout import BlockLayout

SLOTS = 96
"""An eighth of the reference model's 768 experts: two tokens' worth."""
PROMPT_TOKENS = 64
NEW_TOKENS, FEWEST_TOKENS = 48, 8
QUALITY_TOKENS = 6144
WINDOW = 256
_LEAST_S = 10.0
"""Seconds that copies may take, however late it is."""


def deploy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    predictor: Predictor,
    layers: list[int],
    allowance: Allowance,
) -> Json:
    """Time, bytes, hits and perplexity of a model on unseen texts, on demand and in each mode with a predictor.

    `tokenizer` is the model's own; at `layers` hybrid mode executes forecasts. Fewer tokens where the `allowance` for
    `deploy` is short.
    """
    share = allowance.share("deploy")
    windows_NW = text_windows(tokenizer, texts, length=WINDOW, count=part(QUALITY_TOKENS // WINDOW, share))
    executed = {"speculate": QualityRun(predictor=predictor), "hybrid": QualityRun(predictor=predictor, layers=layers)}
    quality = measure_quality(model, find_moe_layers(model), {"test": windows_NW}, executed)
    prompt_ids = tokenizer(texts[0], return_tensors="pt")["input_ids"][:, :PROMPT_TOKENS]
    prompt = tokenizer.decode(prompt_ids[0])
    with threads_that_help(layer_work(model, 1)):
        resident = decode_greedily(model, prompt_ids, NEW_TOKENS)
        share = allowance.share("deploy")
        new_tokens = max(FEWEST_TOKENS, part(NEW_TOKENS, share))
        settings = BenchSettings(new_tokens=new_tokens, repetitions=part(BenchSettings().repetitions, share))
        ways = usual_runs(OffloadConfig(slots=SLOTS), predictor, layers)
        steps = settings.new_tokens * settings.repetitions * len(ways)
        bandwidth = link_bandwidth(model, resident, steps, max(_LEAST_S, allowance.left_s))
        if new_tokens < NEW_TOKENS:
            say(f"    {new_tokens} new tokens, not {NEW_TOKENS}, and {settings.repetitions} times")
        timed = benchmark(model, tokenizer, prompt, ways, settings, bandwidth=bandwidth)
    for name, way in timed["runs"].items():
        way["perplexity"] = quality["runs"][name if name in quality["runs"] else "exact"]["perplexity"]
    return {**timed, "quality": quality}


def layer_work(model: PreTrainedModel, tokens: int) -> Callable[[], object]:
    """What computes the first MoE layer of a model for so many tokens at a time."""
    layer = find_moe_layers(model)[0]
    hidden_BTD = torch.randn(1, tokens, layer.hidden_size, generator=torch.Generator().manual_seed(0))
    given_BTD = hidden_BTD.to(model.dtype)

    @torch.no_grad()
    def run() -> None:
        layer.block(given_BTD)

    return run


def link_bandwidth(model: PreTrainedModel, resident: Decoding, steps: int, seconds: float) -> float:
    """Bytes per second of a link on which a layer's copies take `COPY_OVER_COMPUTE` layers' time, and no slower than
    one that copies every expert of so many decode steps within so many seconds.

    Computing is taken to be as fast as in the quickest tenth of the `resident` model's steps: what else the machine
    does would make a slow link of it.
    """
    quick = sorted(resident.steps_s)[: max(1, len(resident.steps_s) // 10)]
    view = find_moe_layers(model)
    least = steps * len(view) * view.shape.top_k * BlockLayout.of(view).block_bytes / seconds
    return max(balanced_bandwidth(model, replace(resident, steps_s=quick)) / COPY_OVER_COMPUTE, least)


def runs_table(runs: Json) -> str:
    """A row per run of :func:`deploy`."""
    rows = [("run", "ms per token", "kB per token", "hit rate", "perplexity", "identical")]
    for name, run_ in runs.items():
        rows.append(
            (
                name,
                f"{run_['tpot_s'] * 1e3:.2f}",
                f"{run_['bytes_per_token'] / 1e3:.0f}",
                f"{run_['hit_rate']:.3f}",
                f"{run_['perplexity']:.3f}",
                "yes" if run_["identical"] else "no",
            )
        )
    return aligned(rows)
