"""What `expertcast simulate` prints and writes."""

from __future__ import annotations

import itertools
from pathlib import Path

from expertcast.commands.output import write_json
from expertcast.data.writer import write_atomically
from expertcast.predictors.plain import Json, aligned
from expertcast.runtime.simulation.figures import write_figures
from expertcast.runtime.simulation.summary import table
from expertcast.runtime.storage.precision import FULL

TABLE, RESULT = "table.txt", "results.json"


def describe(result: Json) -> str:
    """What was simulated, a table of the cases, and what was left out and why."""
    shape = ", ".join(f"{key}={value}" for key, value in result["shape"].items())
    rows = sorted(result["results"], key=lambda row: (row["slots"], row["bandwidth"]))  # bounds beside what they bound
    lines = [
        f"{result['model']} ({shape}), split {result['split']!r}: {result['documents']} documents, "
        f"{result['steps']} decode steps of {result['batch']}; an expert is {result['block_bytes'][FULL]} bytes",
        aligned(table(rows)),
    ]
    for reason, left in itertools.groupby(result["skipped"], key=lambda row: row["reason"]):
        lines.append(f"left out {len(list(left))}: {reason}")
    return "\n\n".join(lines[:2]) + "".join(f"\n{line}" for line in lines[2:])


def write_results(folder: Path, result: Json, text: str) -> list[Path]:
    """The result, the text and the figures, as files of a folder that is made; returns their paths."""
    folder.mkdir(exist_ok=True)
    write_json(folder / RESULT, result)
    write_atomically(folder / TABLE, (text + "\n").encode())
    return [folder / RESULT, folder / TABLE, *write_figures(result["results"], folder)]
