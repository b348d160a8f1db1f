"""Judge ZipMoE's claims about experts on a disk; nothing here takes its time from a clock.

    python -m benchmarks.disk_claims --out benchmarks

Writes OUT/disk-claims.md and OUT/results/disk-claims.json. Run it where the repository is: orders and chances are
compared with the tests' own enumeration.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.disk_claims import caches, chances, coding, orders
from benchmarks.disk_claims.claims import claims
from benchmarks.study.found import VERDICTS
from benchmarks.study.tables import wrapped
from expertcast.checkpoints.provenance import provenance
from expertcast.data.trace_format import write_atomically

PAGE, JSON = "disk-claims.md", "results/disk-claims.json"
_ROWS = ("coding", "planned", "evicted", "dropped", "claims")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, judge, write."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.disk_claims", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the page, with results/ in it")
    parser.add_argument("--quick", action="store_true", help="a small part of everything, to see that it runs")
    args = parser.parse_args(argv)
    result = measured(quick=args.quick)
    (args.out / JSON).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(args.out / JSON, _lines(result).encode())
    write_atomically(args.out / PAGE, page(result).encode())
    print(f"wrote {args.out / PAGE}, {args.out / JSON}")
    return 0


def measured(*, quick: bool) -> dict[str, Any]:
    """Everything that the page says."""
    kept = caches.cached(caches.RECORDED[:1], layers=12) if quick else caches.cached()
    result = {
        "quick": quick,
        "coding": coding.coded(experts=12) if quick else coding.coded(),
        "orders": orders.orders(200) if quick else orders.orders(),
        "chances": chances.chances(3) if quick else chances.chances(),
        **kept,
        **provenance("benchmarks.disk_claims --out benchmarks" + " --quick" * quick),
    }
    return {**result, "claims": claims(result)}


def page(result: Mapping[str, Any]) -> str:
    """Markdown."""
    judged = result["claims"]
    parts = [
        "# What ZipMoE says of experts on a disk",
        f"    python -m {result['command']}",
        wrapped(
            """Made by the command above; every row lies in `results/disk-claims.json`, and no number on this page was
            typed in. No time is measured: waits are those of the scheduler and the pools in virtual time, over disks of
            1.3, .5 and .2 GB/s, with experts of 12.6 MB and one or two threads that decode 2.5 GB/s each."""
        ),
        wrapped(
            f"""Weights: experts of the bundled model, and one matrix from a normal distribution. Routing: what
            `benchmarks/routing` holds of two large models, every {result["layers"]}th layer, memory for 8%, 15% and 30%
            of the experts. Judged by fixed rules (`benchmarks/disk_claims/claims.py`): *held* in every setting
            measured, *did not hold* in none, *held in part* otherwise. Rows and traps are those of ZipMoE in the
            definitions that this package was built from."""
        ),
    ]
    for verdict in VERDICTS:
        if own := [each for each in judged if each["verdict"] == verdict]:
            lines = [f"**{each['claim']}** ({each['source']}). Here: {each['measured']}." for each in own]
            parts.append(f"## {verdict.capitalize()}: {len(own)} of {len(judged)}\n\n{_points(lines)}")
    return "\n\n".join(parts) + "\n"


def _points(sentences: Iterable[str]) -> str:
    return "\n".join(wrapped(f"- {sentence}", "  ") for sentence in sentences)


def _lines(result: Mapping[str, Any]) -> str:
    """JSON with a line per row."""
    lines = []
    for name, value in result.items():
        text = json.dumps(value, allow_nan=False)
        if name in _ROWS:
            text = "[\n" + ",\n".join(json.dumps(row, allow_nan=False) for row in value) + "\n]"
        lines.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
