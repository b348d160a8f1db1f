"""Step 6: experts in a file, decoded by every way from there to the device: the same tokens, and how long they take."""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.discovery import experts_implementation, find_moe_layers
from expertcast.runtime import OffloadConfig, offload
from expertcast.runtime.benchmarking.decoding import Decoding, decode_greedily, same_logits
from expertcast.runtime.benchmarking.shapes import build_shape
from expertcast.runtime.storage.file_store import FileStore
from gpu_steps.day import Day

SHAPE, LAYERS = "olmoe-1b-7b", 4
"""3.2 GB of experts, 12.6 MB each: written once for each way."""
SMALL_SHAPE, SMALL_LAYERS = "reference", 2
CAPACITY = 0.15
PROMPT, NEW_TOKENS, REPETITIONS = 16, 32, 3
SMALL_NEW_TOKENS = 3


def run(day: Day) -> bool:
    """One way after another, each kept as it is measured; one that fails does not hinder the others."""
    name, layers = (SMALL_SHAPE, SMALL_LAYERS) if day.small else (SHAPE, LAYERS)
    model = build_shape(name, layers=layers, device=day.device)
    generator = torch.Generator().manual_seed(0)
    prompt_ids = torch.randint(model.config.vocab_size, (1, PROMPT), generator=generator).to(day.device)
    new_tokens = SMALL_NEW_TOKENS if day.small else NEW_TOKENS
    with experts_implementation(model, "batched_mm"):
        resident = decode_greedily(model, prompt_ids, new_tokens)
        day.save(shape=name, layers=layers, resident_tpot_s=statistics.median(resident.steps_s), left_out=[], ways={})
        if importlib.util.find_spec("kvikio") is None:
            day.save(left_out=["gpudirect: kvikio is not installed"])

        def measured(way: str, options: Mapping[str, Any]) -> bool:
            found = decode(day, model, prompt_ids, resident, options)
            day.save(ways={**day.result["ways"], way: found})
            return bool(found["identical"])

        passed = [
            day.attempt(way, lambda way=way, options=options: measured(way, options))
            for way, options in ways(day.small).items()
        ]
    return all(passed)


def ways(small: bool) -> dict[str, dict[str, Any]]:
    """Options of each: mapped through the page cache, read directly raw and coded, with forecasts, and GPUDirect."""
    found: dict[str, dict[str, Any]] = {
        "mapped": {"link": "instant" if small else "cuda"},
        "direct": {"link": "disk"},
        "coded": {"link": "disk", "codec": "bitsplit"},
        "direct_forecasts": {"link": "disk", "predictor": "next_norm"},
        "coded_forecasts": {"link": "disk", "codec": "bitsplit", "predictor": "next_norm"},
    }
    if not small and importlib.util.find_spec("kvikio") is not None:
        found["gpudirect"] = {"link": "gpudirect"}
    return found


def decode(
    day: Day, model: PreTrainedModel, prompt_ids: Tensor, resident: Decoding, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Pack the experts into a new file beside the results, and decode a few times; the first time nothing is cached.

    Args:
        day: where the file lies, and how often.
        model: with its experts, which it has again afterwards.
        prompt_ids: [1, T] on its device.
        resident: what it decodes by itself.
        options: of the offload.
    """
    view, runs = find_moe_layers(model), list[Decoding]()
    slots = max(view.shape.top_k, round(CAPACITY * len(view) * view.shape.experts))
    with tempfile.TemporaryDirectory(dir=day.out) as folder:
        config = OffloadConfig(store="disk", store_folder=folder, slots=slots, **options)
        with offload(model, config) as offloaded:
            assert isinstance(offloaded.store, FileStore)
            forget(offloaded.store.path)
            for _ in range(1 if day.small else REPETITIONS):
                runs.append(decode_greedily(model, prompt_ids, len(resident.tokens), offloaded=offloaded))
            stats, link = offloaded.stats.as_dict(), offloaded.link
            if day.device == "cuda":
                torch.cuda.synchronize()
            link.progress()
            return {
                "link": link.name,
                "slots": slots,
                "identical": all(run.tokens == resident.tokens and same_logits(run, resident) for run in runs),
                "ttft_s": [run.ttft_s for run in runs],
                "tpot_s": [statistics.median(run.steps_s) for run in runs],
                "hit_rate": stats["hit_rate"],
                "stored_bytes": offloaded.store.stored_nbytes,
                "block_bytes_per_s": link.bytes_moved / link.busy_s if link.busy_s else None,
            }


def forget(path: Path) -> None:
    """Have the system drop what it keeps of a file that nothing has touched since it was written."""
    if hasattr(os, "posix_fadvise"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
