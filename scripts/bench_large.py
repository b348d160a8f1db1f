"""Collecting from a model that is larger than the memory: peak, seconds and bytes read, beside plain forwards.

    python scripts/bench_large.py --json benchmarks/results/large.json

makes a model of OLMoE-1B-7B's shape with experts of real size, as many layers as make --gigabytes of experts, and runs,
each in a process of its own that begins with a cold page cache:

store     `expertcast store`, in a memory control group of --limit bytes
collect   `expertcast collect --store-folder ... --memory ...` in the same group
forward   the model loaded whole, and plain forwards of the same tokens in batches of 8 windows: no limit
plain     `expertcast collect` of the model loaded whole: no limit

`seconds` are of a process from when its libraries are loaded: reading the model is in them. `peak_bytes` has the pages
of files in it. The target is that `collect` takes at most three times as long as `forward`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from disk_sides.model_files import olmoe, sizes, write_model
from disk_sides.runs import run

from expertcast.checkpoints.provenance import provenance
from expertcast.commands.output import say, write_json
from expertcast.data.machine import usable_processors
from expertcast.data.models import load_tokenizer
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json, aligned
from expertcast.runtime.benchmarking.bench import hardware

_RUN = "disk_sides.collect_run"
_CAGED = ("store", "collect")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with one line on standard error."""
    args = _parser().parse_args(arguments)
    try:
        if args.keep is None:
            with tempfile.TemporaryDirectory(prefix="bench-large-") as folder:
                result = measured(args, Path(folder))
        else:
            args.keep.mkdir(parents=True, exist_ok=True)
            result = measured(args, args.keep.resolve())
    except ExpertcastError as error:
        print(f"bench_large: {error}", file=sys.stderr)
        return 2
    print(described(result))
    if args.json is not None:
        write_json(args.json, result)
    return 0


def measured(args: argparse.Namespace, folder: Path) -> Json:
    """Make the model, and run everything once.

    Args:
        args: of the command line.
        folder: where the model, its store and traces lie.

    Raises:
        ExpertcastError: a run failed.
    """
    config = olmoe(args.layers or _layers(args), small=args.small)
    made = write_model(folder / "model", config)
    load_tokenizer("reference").save_pretrained(folder / "model")
    model, store = str(folder / "model"), str(folder / "store")
    text = ["--data", "reference", "--tokens", str(args.tokens), "--early-rank", args.early_rank]
    kept = ["--store-folder", store]
    commands = {
        "store": ["store", model, *kept, "--codec", args.codec],
        "collect": [
            "collect",
            model,
            *text,
            *kept,
            "--memory",
            args.memory,
            "--batch-size",
            str(args.batch_size),
            "--out",
            str(folder / "collect"),
        ],
        "forward": None,
        "plain": ["collect", model, *text, "--out", str(folder / "plain")],
    }
    runs: dict[str, Json] = {}
    for name, command in commands.items():
        if name not in args.runs:
            continue
        shutil.rmtree(folder / name, ignore_errors=True)
        say(f"{name} ...")
        spec: Json = {"model": model, "data": ["reference"], "tokens": args.tokens, "batch_size": 8}
        spec |= {"threads": args.threads} | ({} if command is None else {"arguments": [*command, "--device", "cpu"]})
        runs[name] = run(
            _RUN, spec, folder=folder, memory=int(args.limit) if name in _CAGED else None, cold=[folder / "model"]
        )
        if "failed" in runs[name]:
            raise ExpertcastError(f"{name} failed: {runs[name]['failed']}")
    times = {name: each["seconds"] for name, each in runs.items()}
    over = {name: times["collect"] / times[name] for name in ("forward", "plain") if {"collect", name} <= times.keys()}
    options = {key: value for key, value in vars(args).items() if key not in ("json", "keep")}
    return {
        "options": options, "model": {key: made[key] for key in ("bytes", "experts_bytes", "expert_bytes", "shape")},
        "runs": runs, "collect_over": over, "hardware": hardware(), **provenance(),
    }  # fmt: skip


def described(result: Json) -> str:
    """A row per run, and the ratio."""
    rows = [("run", "seconds", "peak GB", "read GB", "limited")]
    for name, each in result["runs"].items():
        gigabytes = (f"{each[key] / 1e9:.2f}" for key in ("peak_bytes", "bytes_read"))
        rows.append((name, f"{each['seconds']:.1f}", *gigabytes, "yes" if name in _CAGED and each["capped"] else "no"))
    said = "".join(
        f"\n\ncollect takes {over:.2f} times as long as {name}" for name, over in result["collect_over"].items()
    )
    return f"experts of {result['model']['experts_bytes'] / 1e9:.2f} GB\n\n{aligned(rows)}{said}"


def _layers(args: argparse.Namespace) -> int:
    """As many as make so many gigabytes of experts."""
    one, two = (sizes(olmoe(layers, small=args.small)) for layers in (1, 2))
    return max(2, round(args.gigabytes * 1e9 / (two - one)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.8, help="of experts")
    parser.add_argument("--layers", type=int, help="in place of --gigabytes")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--limit", type=float, default=3e9, help="bytes of memory for `store` and `collect`")
    parser.add_argument("--memory", default="400MB", help="of it, for experts")
    parser.add_argument("--batch-size", type=int, default=8, help="windows per forward of `collect`")
    parser.add_argument("--codec", default="raw")
    parser.add_argument("--early-rank", default="8", help="of collections; none leaves early attention out")
    parser.add_argument("--threads", type=int, default=usable_processors())
    parser.add_argument("--runs", nargs="+", choices=("store", "collect", "forward", "plain"),
                        default=("store", "collect", "forward", "plain"))  # fmt: skip
    parser.add_argument("--small", action="store_true", help="experts of toy size, for tests")
    parser.add_argument("--keep", type=Path, help="folder for the model and its store (default: a temporary one)")
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
