"""Packed experts beside llama.cpp: one GGUF file, the same tokens, equal memory.

    python -m benchmarks packed --keep FOLDER --peer PYTHON --kind Q4_0 --layers 6 --page benchmarks/packed.md
    python -m benchmarks packed --keep FOLDER --peer PYTHON --kind Q4_0 --layers 48 --memory 8GB 0 --readahead 128 \
        --minutes 20 --out benchmarks/results/packed-48.json --page benchmarks/packed.md

The file has Qwen3-30B-A3B's shape with random weights, and with fewer layers as much less vocabulary. PYTHON is an
interpreter with `xllamacpp` (pip install xllamacpp in an environment of its own).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import gguf

from benchmarks.life_size_files import KINDS, make, qwen3
from benchmarks.results import ResultFile, result_parser
from benchmarks.side_by_side import SETTINGS, Side, SideBySide, add_options, page
from expertcast.predictors.messages import Json

PEER, _RUN = "llama.cpp", "benchmarks.packed_peer"
_LAZY = {"lazy_mode": "ON", "no_extra_bufts": True}
_REPACKED = {"lazy_mode": "OFF", "load_mode": "NONE"}
_PLAIN = {"flash_attn_type": "DISABLED"}
_IN_PLACE = {"experts": "packed", "in_place": True, "store_folder": None}
SIDES = (
    Side(f"{PEER}, lazy on", _LAZY, peer=_RUN),
    Side(f"{PEER}, lazy, plain attention", {**_LAZY, **_PLAIN}, peer=_RUN, where=("limited",)),
    Side(f"{PEER}, repacked", _REPACKED, peer=_RUN, where=("whole",)),
    Side(f"{PEER}, repacked, plain attention", {**_REPACKED, **_PLAIN}, peer=_RUN, where=("whole",)),
    Side("packed", _IN_PLACE),
    Side("packed, forecasts", _IN_PLACE, predictor="next_norm", where=("limited",)),
    Side("expanded", {"experts": "expanded"}),
)
"""`lazy on` reads experts when they are used, `repacked` keeps a copy in an order of its own.
Flash attention, its default, takes less time in prompts, plain attention in tokens."""


def described_file(path: Path, layers: int) -> Json:
    """Return what the comparison needs to know of a file."""
    reader = gguf.GGUFReader(path)
    experts = [each for each in reader.tensors if "_exps" in each.name]
    count, top_k = (int(reader.fields[f"qwen3moe.expert_{name}count"].parts[-1][0]) for name in ("", "used_"))
    return {"path": str(path), "layers": layers, "count": layers * count, "top_k": top_k,
            "experts_bytes": sum(int(each.n_bytes) for each in experts)}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the result lacks, and write the page."""
    parser = result_parser("packed", __doc__)
    add_options(parser, memory=["0", ".75", ".5", ".25"], layers=6)
    parser.add_argument("--peer", type=Path, default=Path(sys.executable), help="interpreter with xllamacpp")
    parser.add_argument("--kind", choices=KINDS, default="Q4_0", help="types of the file (default: %(default)s)")
    args = parser.parse_args(arguments)
    args.sides = args.sides or [side.name for side in SIDES[:-1]]
    args.keep.mkdir(parents=True, exist_ok=True)
    file = ResultFile(args, {name: getattr(args, name) for name in (*SETTINGS, "kind")}, args.keep)
    path = make(args.keep, args.kind, args.layers, qwen3(args.layers, small=args.small))
    bench = SideBySide(args, file, SIDES, described_file(path.resolve(), args.layers))
    bench.measure()
    file.publish(f"Qwen3-30B-A3B's shape, {args.kind}, {args.layers} layers", page(bench.result, PEER))
    return 0


if __name__ == "__main__":
    from benchmarks.__main__ import main as benchmark

    raise SystemExit(benchmark(["packed", *sys.argv[1:]]))
