"""Step 7: drafts verified on the device: the tokens of plain decoding, and how long they take."""

from __future__ import annotations

import torch

from expertcast.data.models import REFERENCE, load_model, load_tokenizer
from expertcast.data.text import bundled_ids
from expertcast.runtime import OffloadConfig
from expertcast.runtime.benchmarking.bench import BenchSettings
from expertcast.runtime.benchmarking.drafts import bench_drafts
from gpu_steps.day import Day

DRAFTS = ("int4", "int8", "resident", "drop:fetched=1", "prompt_lookup", "auto")
SMALL_DRAFTS = ("int4", "auto")
PROMPT, NEW_TOKENS, REPETITIONS = 200, 96, 3
SMALL_PROMPT, SMALL_NEW_TOKENS = 16, 4
CAPACITY = 0.25
SPEEDS = (None, 1e9, 1e8)
"""Bytes per second that copies are padded to; None: the link as it is."""


def run(day: Day) -> bool:
    """In fp32, where every token must be plain decoding's, and in bf16, where a tie may fall otherwise."""
    new_tokens, repetitions = (SMALL_NEW_TOKENS, 1) if day.small else (NEW_TOKENS, REPETITIONS)
    ids = bundled_ids(load_tokenizer(REFERENCE), SMALL_PROMPT if day.small else PROMPT)
    prompt_ids = torch.tensor([ids], device=day.device)
    day.save(capacity=CAPACITY, runs={})

    def measured(dtype: str, bandwidth: float | None) -> bool:
        model = load_model(REFERENCE, dtype=dtype).to(day.device)
        shape = model.config
        slots = int(shape.num_hidden_layers * shape.num_experts * CAPACITY)
        config = OffloadConfig(slots=slots, bandwidth=bandwidth, link="emulated" if day.small else "cuda")
        found = bench_drafts(
            model, prompt_ids, config, SMALL_DRAFTS if day.small else DRAFTS,
            BenchSettings(new_tokens=max(2, new_tokens), repetitions=repetitions),
        )  # fmt: skip
        day.save(runs={**day.result["runs"], f"{dtype} {bandwidth or 'full'}": found})
        return dtype == "bf16" or all(draft["identical"] for draft in found.values())

    speeds = (1e9,) if day.small else SPEEDS
    cases = [("fp32", speeds[0]), *(("bf16", speed) for speed in speeds)]
    passed = [
        day.attempt(f"{dtype} {speed}", lambda dtype=dtype, speed=speed: measured(dtype, speed))
        for dtype, speed in cases
    ]
    return all(passed)
