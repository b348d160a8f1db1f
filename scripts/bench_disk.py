"""Time per token of a model whose experts lie on a disk, in equal memory for everyone: ours, llama.cpp, accelerate.

    python scripts/bench_disk.py --keep FOLDER --llama-python PYTHON --out benchmarks/results/disk.json

makes a model of OLMoE-1B-7B's shape with experts of real size, packs its stores, and runs every side at every share of
memory (of the experts' bytes) and every rate of the disk (0: as it is), in turns, each run a process of its own in a
memory control group with a cold page cache. All read the same text token by token. It writes the JSON after every run,
then `disk.md` and `disk.png`; given again, it goes on where it stopped.

--llama-python is an interpreter with llama-cpp-python and gguf. Sides whose package is missing are left out, and the
result names them. --thirty instead runs 48 layers of 128 experts in 3 GB of memory, and adds that to the same file.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from disk_sides import report
from disk_sides.figures import summaries
from disk_sides.plan import planned
from disk_sides.prepared import PROCESS_OPTIONS, Budget, Prepared, codecs
from disk_sides.runs import LLAMA, TORCH, abilities, run
from disk_sides.sides import ACCELERATE, DISK, OWN, PROCESS, SIDES, Side
from disk_sides.sides import LLAMA as LLAMA_SIDE
from disk_sides.thirty import measure_thirty
from earlier_result import earlier_result

from expertcast.checkpoints.provenance import provenance
from expertcast.commands.output import say, write_json
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json
from expertcast.runtime.benchmarking.bench import hardware

SETTINGS = ("layers", "small", "prompt", "warm", "new_tokens", "peer_steps", "threads")
"""Runs of a file with the same ones are kept."""
_DISK_SECONDS, _DISK_BYTES = 3, 1 << 30
_COMMON_RATE = 1.5e9
"""Bytes per second of a disk that was not measured."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with one line on standard error."""
    args = _parser().parse_args(arguments)
    try:
        if args.keep is None:
            with tempfile.TemporaryDirectory(prefix="bench-disk-") as folder:
                Bench(args, Path(folder)).measure()
        else:
            args.keep.mkdir(parents=True, exist_ok=True)
            Bench(args, args.keep.resolve()).measure()
    except ExpertcastError as error:
        print(f"bench_disk: {error}", file=sys.stderr)
        return 2
    return 0


class Bench:
    """Measures what is not known yet."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder = args, folder
        self._prepared = Prepared(folder, args)
        self.result: Json = {"settings": {name: getattr(args, name) for name in SETTINGS}, "runs": []}
        self.result = earlier_result(args.out, self.result["settings"]) or self.result
        commands: list[str] = self.result.setdefault("commands", [])
        if args.page:
            return
        command = _command(args)
        if command not in commands:
            commands.append(command)
        self.result |= {
            "date": datetime.now(UTC).isoformat(timespec="seconds"), **provenance(command),
            "hardware": hardware(), "abilities": abilities(folder), "process": PROCESS_OPTIONS,
        }  # fmt: skip

    def measure(self) -> None:
        """All runs, then the page."""
        args = self._args
        if args.thirty:
            self.result["thirty"] = measure_thirty(args, self._prepared)
        elif not args.page:
            self._measure_sides()
        self._write()
        report.write(self.result, args.out)
        print(report.tables(self.result))

    def _measure_sides(self) -> None:
        args, sides = self._args, self._sides()
        self.result |= self._prepared.make(sides)
        beside = self.result.setdefault("beside", {})
        for codec in codecs(sides):
            if codec not in beside:  # the first run may find libraries that are not in the page cache, and pay for them
                beside[codec] = min(self._beside(codec), self._beside(codec))
        budget = Budget(self.result["beside"])
        self.result["base_bytes"] = budget.base
        done = {_key(each) for each in self.result["runs"] if "failed" not in each}
        for repetition in range(args.repetitions):
            for rate in args.bandwidth:
                for memory in args.memory:
                    for side in sides:
                        share = None if side.kind == DISK else memory
                        row: Json = {"side": side.name, "workload": side.workload, "memory": share,
                                     "throttle": rate or None, "repetition": repetition}  # fmt: skip
                        if _key(row) not in done:
                            done.add(_key(row))
                            self._keep({**row, **self._run(side, memory, rate or None, budget)})

    def _run(self, side: Side, memory: float, rate: float | None, budget: Budget) -> Json:
        spec = {**self._prepared.base_spec, "kind": side.kind, "workload": side.workload, "forecasts": side.forecasts}
        spec["store_folder"] = str(self._prepared.store_folder(side.codec))
        spec["truth"] = str(self._prepared.truth / f"{side.workload}.safetensors")
        total = self.result["model"]["experts_bytes"]
        limit: int | None = budget.base + int(memory * total)
        cold, module, python = [Path(spec["store_folder"])], TORCH, sys.executable
        if side.kind == "ours":
            spec["options"] = side.options(budget.slots(side.codec, int(memory * total)))
            if side.pools:
                spec["options"]["pools"] = self._plan(side, spec["options"]["memory"], rate)
            if rate and not self.result["abilities"]["throttled"] and side.link == "disk":
                spec["options"]["bandwidth"] = rate
        elif side.kind == DISK:
            limit = None
            spec["disk_bytes"] = int(min(_DISK_BYTES, rate * _DISK_SECONDS)) if rate else _DISK_BYTES
        elif side.kind == ACCELERATE:
            spec |= {"warm": 1, "timed": self._args.peer_steps}
            cold = [self._prepared.model]
        else:
            module, python, cold = LLAMA, self._args.llama_python, [self._folder]
        if module == TORCH and side.kind != ACCELERATE:
            cold.append(self._prepared.model)
        found = run(module, spec, folder=self._folder, python=python, memory=limit, rate=rate, cold=cold)
        if "largest" in found:
            found |= report.same_largest(found.pop("largest"), Path(spec["truth"]))
        return {**found, "limit_bytes": limit, "pools": spec.get("options", {}).get("pools")}

    def _plan(self, side: Side, memory: int, rate: float | None) -> str:
        model, top_k = self.result["model"], len(self._prepared.ids[side.workload][0][0])
        measured = [each["rate"] for each in self.result["runs"] if each["side"] == DISK and not each["throttle"]]
        return planned(
            self._prepared.ids[side.workload],
            prompt=self._args.prompt,
            experts=model["experts_bytes"] // model["expert_bytes"] // len(self._prepared.ids[side.workload][0]),
            memory=memory,
            passing=(2 if side.forecasts else 1) * top_k,
            block=model["expert_bytes"],
            ratio=self.result["stores"][side.codec]["ratio"],
            rate=rate or (statistics.median(measured) if measured else _COMMON_RATE),
            threads=self._args.threads,
        )

    def _beside(self, codec: str) -> int:
        """Bytes of memory that a side of this codec takes beside its slots, as far as it is counted as its own."""
        say(f"memory beside slots, codec {codec}")
        side = Side(name=codec, codec=codec)
        slots = max(self._args.memory) * self.result["model"]["experts_bytes"]
        spec = {**self._prepared.base_spec, "kind": "ours", "workload": OWN, "forecasts": False, "warm": 1, "timed": 1}
        spec |= {"store_folder": str(self._prepared.store_folder(codec)), "options": side.options(int(slots))}
        found = run(TORCH, spec, folder=self._folder)
        if "failed" in found:
            raise ExpertcastError(f"a first run, codec {codec}: {found['failed']}")
        return int(found["peak_bytes"]) - found["slots"] * int(self.result["model"]["expert_bytes"])

    def _sides(self) -> list[Side]:
        """Those that were asked for and can be run; the others are named in the result."""
        named, workloads = self._args.sides, self._args.workloads
        wanted = [
            side
            for side in SIDES
            if side.kind == DISK or ((not named or side.name in named) and side.workload in workloads)
        ]
        missing: Json = {}
        for side in wanted:
            if side.kind == ACCELERATE and importlib.util.find_spec("accelerate") is None:
                missing[side.name] = "accelerate is not installed"
            elif side.kind == LLAMA_SIDE and not _has_llama(self._args.llama_python):
                missing[side.name] = "no interpreter with llama-cpp-python and gguf: give --llama-python"
        self.result["skipped"] = missing
        return [side for side in wanted if side.name not in missing]

    def _keep(self, row: Json) -> None:
        self.result["runs"] = [each for each in self.result["runs"] if _key(each) != _key(row)] + [row]
        shown = row.get("failed") or f"{row.get('tpot_s') or row['rate']:.4g}"
        say(f"{row['repetition'] + 1}: {row['side']}, {row['workload']}, {row['memory']}, {row['throttle']}: {shown}")
        self._write()

    def _write(self) -> None:
        self.result["results"] = summaries(self.result["runs"])
        write_json(self._args.out, self.result)


def _key(row: Json) -> tuple[object, ...]:
    return tuple(row[name] for name in ("side", "workload", "memory", "throttle", "repetition"))


def _has_llama(python: str) -> bool:
    done = subprocess.run([python, "-c", "import llama_cpp, gguf"], capture_output=True, check=False)
    return done.returncode == 0


def _command(args: argparse.Namespace) -> str:
    """The command line, without paths of this machine."""
    named = {"keep": "FOLDER", "llama_python": "PYTHON"}
    words = ["bench_disk.py"]
    for name, value in vars(args).items():
        if value != _parser().get_default(name):
            option = f"--{name.replace('_', '-')}"
            values = [] if value is True else value if isinstance(value, list) else [named.get(name, value)]
            words += [option, *map(str, values)]
    return " ".join(words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted({side.name for side in SIDES})
    parser.add_argument("--sides", nargs="*", choices=names, default=[], help="(default: all)")
    workloads = [OWN, PROCESS]
    parser.add_argument("--workloads", nargs="+", choices=workloads, default=workloads, help="(default: both)")
    parser.add_argument("--memory", nargs="+", type=float, default=[0.08, 0.15, 0.3], help="shares of the experts")
    parser.add_argument("--bandwidth", nargs="+", type=float, default=[0, 5e8, 2e8], help="bytes/s; 0: as it is")
    parser.add_argument("--repetitions", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=32, help="tokens read at once (default: %(default)s)")
    parser.add_argument("--warm", type=int, default=4, help="tokens before those timed (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens that are timed (default: %(default)s)")
    parser.add_argument("--peer-steps", type=int, default=2, help="of accelerate (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of everyone's products (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="folder for the model and stores (default: a temporary one)")
    parser.add_argument("--llama-python", default=sys.executable, help="interpreter that has llama.cpp")
    parser.add_argument("--small", action="store_true", help="a model of toy size")
    parser.add_argument("--thirty", action="store_true", help="48 layers of 128 experts in 3 GB")
    parser.add_argument("--gigabytes", type=float, default=20, help="experts of --thirty (default: %(default)s)")
    parser.add_argument("--page", action="store_true", help="write the page from the file alone")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the run under way and its groups go, too
    raise SystemExit(main())
