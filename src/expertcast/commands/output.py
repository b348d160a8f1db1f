"""Results of commands: files, tables and messages."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from expertcast.data.traces import TraceDataset
from expertcast.predictors.artefacts import write_user_file
from expertcast.predictors.messages import Json, aligned, format_bytes

if TYPE_CHECKING:
    from expertcast.runtime.config import OffloadConfig
    from expertcast.runtime.offloading import OffloadedModel

Outcome = tuple[Json, str]
"""Result of a command, for --json, and the text to print."""


def folder(text: str) -> Path:
    """Parse a folder to write, which need not exist.

    Raises:
        ArgumentTypeError: the path is a file, or a link to nothing.
    """
    path = Path(text)
    if os.path.lexists(path) and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is {'a file' if path.exists() else 'a broken link'}: give a folder")
    return path


def new_file(text: str) -> Path:
    """Parse a file to write.

    Raises:
        ArgumentTypeError: its folder is missing, or the path is a folder.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: give a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: there is no folder {path.parent}; create it first")
    return path


def write_json(path: Path, result: Json) -> None:
    """Write a result file atomically; its numbers are finite.

    Raises:
        ExpertcastError: its folder does not exist or cannot be written.
    """
    write_user_file(path, (json.dumps(result, indent=2, allow_nan=False) + "\n").encode())


def describe_traces(traces: TraceDataset) -> str:
    """Return a table of a traces folder's settings and sizes."""
    keys = ("model", "fingerprint", "shape", "tokens", "splits", "window", "columns", "collection_s", "command",
            "git_revision", "versions")  # fmt: skip
    values = {key: traces.info[key] for key in keys if key in traces.info}
    values["columns"] = {name: note.get("shape") for name, note in values["columns"].items() if isinstance(note, dict)}
    settings = traces.info["settings"]
    rank = settings["early_rank"]
    early = {"early_rank": "none" if rank is None else rank, "not_early": settings["not_early"]}
    return table({**values, **early, "documents": len(traces.info["documents"])})


def table(values: Json) -> str:
    """Return names and values in two columns, without values that are None: sizes of names with `bytes` with a unit,
    nested values as JSON, cut at 100 characters."""
    return aligned([(key, _shown(key, value)) for key, value in values.items() if value is not None], left=2)


def _shown(key: str, value: object) -> str:
    if "bytes" in key and isinstance(value, int):
        return format_bytes(value)
    text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
    return text[:97] + "..." if text is not value and len(text) > 100 else text


def show(text: str) -> None:
    """Print a result before the command ends; under torchrun only on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def say(text: str) -> None:
    """Print progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def runs_table(runs: Json) -> str:
    """Return a table with a row per run of a benchmark, and a legend."""
    rows: list[tuple[str, ...]] = [
        ("run", "TPOT ms", "quartiles", "mean", "compute", "copy", "idle", "TTFT s", "MB/token", "hits", "overlap",
         "link", "x bound", "identical")
    ]  # fmt: skip
    for name, run in runs.items():
        first, third = run["tpot_quartiles_s"]
        rows.append(
            (
                name,
                f"{run['tpot_s'] * 1e3:.2f}",
                f"{first * 1e3:.1f}-{third * 1e3:.1f}",
                *(f"{run[key] * 1e3:.2f}" for key in ("tpot_mean_s", "compute_s", "copy_s", "idle_s")),
                f"{run['ttft_s']:.3f}",
                f"{run['bytes_per_token'] / 1e6:.2f}",
                f"{run['hit_rate']:.3f}",
                *(
                    "~" if key in run["not_given"] else "" if run[key] is None else f"{run[key]:.3f}"
                    for key in ("overlap_efficiency", "link_utilisation", "tpot_over_bound")
                ),
                "yes" if run["identical"] else "no",
            )
        )
    legend = "TPOT ms: the median step; mean = compute + copy + idle in ms, which a few slow steps raise"
    if any(run["not_given"] for run in runs.values()):
        legend += "; ~: too noisy, give more --repetitions"
    return f"{aligned(rows)}\n{legend}"


def forecast_lines(runs: Json) -> list[str]:
    """Return a line for each run with a governor of forecasts: counts by rung, and counts left out by reason."""
    lines = []
    for name, run in runs.items():
        for governor in run["stats"].get("forecasts", {}).values():
            made = ", ".join(f"{own['made']} by {rung}" for rung, own in governor["rungs"].items())
            left_out = ", ".join(f"{count} as {reason}" for reason, count in governor["left_out"].items())
            lines.append(f"forecasts of {name}: {made}; left out: {left_out or 'none'}")
    return lines


def offload_lines(offloaded: OffloadedModel, config: OffloadConfig) -> list[str]:
    """Return a line if all experts fit the slots; otherwise one if the link prevents all forecasts of a predictor."""
    from expertcast.runtime.policies.settings import AUTO

    experts, link = offloaded.store.layers * offloaded.store.experts, offloaded.link
    if config.cache and offloaded.pool.count >= experts:
        return [f"all {experts} experts fit: nothing is offloaded"]
    policies = offloaded.policies
    read = offloaded.executed_layers or policies.eviction.cls.reads_forecasts or policies.pre_eviction.name != "none"
    if offloaded.predictor is None or link.overlaps or config.forecasts != AUTO or read:
        return []
    return [
        f"forecasts: none, link {link.name!r} copies in the model's thread and can hide nothing; --bandwidth emulates "
        "another"
    ]
