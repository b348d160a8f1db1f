"""A model in the shape of Qwen3-30B-A3B, larger than memory, decoding in three gigabytes."""

from __future__ import annotations

import argparse
import shutil
import time
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import Tensor

from disk_sides.model_files import normal_block, thirty, write_model
from disk_sides.prepared import Budget, Prepared
from disk_sides.runs import TORCH, run
from disk_sides.sides import DIRECT, PROCESS, Side
from expertcast.commands.output import say
from expertcast.data.models import meta_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.source import ModelSource
from expertcast.data.weights.files import SafetensorsFiles
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json
from expertcast.runtime.storage.disk_store import DiskStore

MEMORY = 3_000_000_000
_SLOTS = 64
"""Of the run that measures what a process takes beside them."""
_STRIDE = 10_007
"""Numbers between the beginnings of two weights in the block that all are cut from."""
_ROOM = 2 << 30
SIDES = (
    Side(name="mapped", workload=PROCESS, link="instant"),
    Side(name=DIRECT, workload=PROCESS),
    Side(name="forecasts", workload=PROCESS, forecasts=True),
)


def measure_thirty(args: argparse.Namespace, prepared: Prepared) -> Json:
    """Pack the store and decode from it; each side in `MEMORY` bytes, pages of files with them.

    Raises:
        ExpertcastError: no room on the disk, or a run that failed.
    """
    folder = prepared.folder / "thirty"
    config = thirty(args.gigabytes)
    config.num_hidden_layers = 2 if args.small else config.num_hidden_layers
    model = write_model(folder / "model", config, experts=False)
    seconds = pack(folder / "model", folder / "store", model["experts_bytes"])
    spec = {
        **prepared.base_spec, "model": str(folder / "model"), "store_folder": str(folder / "store"), "kind": "ours",
        "workload": PROCESS, "forecasts": False, "tokens": prepared.tokens,
    }  # fmt: skip
    least, truth = _SLOTS * model["expert_bytes"], folder / "truth.safetensors"

    def measured(side: Side, slots: int, limit: int | None, **more: object) -> Json:
        told = {**spec, "forecasts": side.forecasts, "options": side.options(slots), **more}
        found = run(TORCH, told, folder=folder, memory=limit, cold=[folder / "store", folder / "model"])
        if "failed" in found:
            raise ExpertcastError(f"--thirty, {side.name}: {found['failed']}")
        return found

    say("what it takes beside slots, and what it computes")
    first = measured(SIDES[1], least, None, remember=str(truth))
    budget = Budget({"raw": first["peak_bytes"] - least})
    slots = MEMORY - budget.base
    rows = []
    for side in SIDES:
        for repetition in range(args.repetitions):
            say(f"--thirty, {repetition + 1}: {side.name}")
            found = measured(side, slots, MEMORY, truth=str(truth))
            rows.append(
                {"side": side.name, "workload": PROCESS, "repetition": repetition, "limit_bytes": MEMORY, **found}
            )
    return {
        "model": model, "cut": "experts' inner size, vocabulary 32768, attention of 16 heads", "packing_s": seconds,
        "memory_share": slots / model["experts_bytes"], "base_bytes": budget.base, "runs": rows,
    }  # fmt: skip


def pack(model: Path, folder: Path, nbytes: int) -> float | None:
    """Fill a store with normal numbers, layer by layer; seconds, or None where it was there."""
    if folder.is_dir():
        return None
    folder.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder.parent).free < nbytes + _ROOM:
        raise ExpertcastError(f"the store takes {nbytes / 1e9:.0f} GB, the disk has no room: give fewer --gigabytes")
    say(f"packing {nbytes / 1e9:.1f} GB")
    start = time.perf_counter()
    skeleton = meta_model(str(model))
    view = find_moe_layers(skeleton)
    with SafetensorsFiles(ModelSource.of(model)) as files:  # as load_offloaded names what a store was made of
        fingerprint = f"{files.fingerprint()} {skeleton.dtype} transformers {transformers.__version__}"
    partial_folder = folder.with_suffix(".partial")
    store = DiskStore(view, partial_folder, device=torch.device("cpu"), fingerprint=fingerprint)
    block = normal_block()
    for layer in range(len(view)):
        store.fill(layer, partial(_cut, block, layer))
    store.finish()
    store.close()
    partial_folder.rename(folder)
    return time.perf_counter() - start


def _cut(block: Tensor, layer: int, views: dict[str, Tensor]) -> None:
    """Fill one layer's parameters [E, ...] from the block, each from another place on."""
    with torch.no_grad():
        for number, tensor in enumerate(views.values()):
            for expert, target in enumerate(tensor.unbind(0)):
                room = block.numel() - target.numel()
                start = ((layer * len(tensor) + expert) * len(views) + number) * _STRIDE % room
                target.copy_(block[start : start + target.numel()].view(target.shape))
