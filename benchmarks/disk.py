"""Time per token of a model whose experts lie on a disk, in equal memory for all ways to read them.

    python -m benchmarks.disk --keep FOLDER --out benchmarks/results/disk.json

makes a model of OLMoE-1B-7B's shape with experts of real size, packs its stores, and runs every side at every share of
memory (of the experts' bytes) and every rate of the disk (0: as it is), in turns, each run a process of its own in a
memory control group with a cold page cache. All read the same text token by token. It writes the JSON after every run;
given again, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.children import abilities, run
from benchmarks.disk_files import PROCESS_OPTIONS, RUN, Budget, Prepared, codecs
from benchmarks.disk_sides import DISK, OWN, PROCESS, SIDES, Side, summaries
from benchmarks.results import ResultFile
from expertcast.commands.output import say
from expertcast.data.routing_file import Routing
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json
from expertcast.runtime.pools.planner import plans
from expertcast.runtime.pools.ranks import rank_model
from expertcast.runtime.pools.states import Costs, ExpertBytes, State, pools_text

SETTINGS = ("layers", "small", "prompt", "warm", "new_tokens", "threads")
"""Runs of a file with the same ones are kept."""
_DISK_SECONDS, _DISK_BYTES = 3, 1 << 30
_COMMON_RATE = 1.5e9
"""Bytes per second of a disk that was not measured."""
DECODED = 1.0e9
"""Bytes of bf16 that a thread decodes in a second while the other one does, too."""
_SHARDS = 6
_LEAST_FULL = 1
"""Experts per layer for which there is a slot: plans without any would leave every hit to be decoded."""


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
        print(f"benchmarks.disk: {error}", file=sys.stderr)
        return 2
    return 0


class Bench:
    """Measures what is not known yet."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder = args, folder
        self._prepared = Prepared(folder, args)
        self._file = ResultFile(args.out, {name: getattr(args, name) for name in SETTINGS})
        self.result = self._file.values
        commands: list[str] = self.result.setdefault("commands", [])
        if _command(args) not in commands:
            commands.append(_command(args))
        self.result |= {"abilities": abilities(folder), "process": PROCESS_OPTIONS}

    def measure(self) -> None:
        """All runs that are not in the file."""
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
        self._write()

    def _run(self, side: Side, memory: float, rate: float | None, budget: Budget) -> Json:
        spec = {**self._prepared.base_spec, "kind": side.kind, "workload": side.workload, "forecasts": side.forecasts}
        spec["store_folder"] = str(self._prepared.store_folder(side.codec))
        spec["truth"] = str(self._prepared.truth / f"{side.workload}.safetensors")
        total = self.result["model"]["experts_bytes"]
        limit: int | None = budget.base + int(memory * total)
        if side.kind == DISK:
            limit = None
            spec["disk_bytes"] = int(min(_DISK_BYTES, rate * _DISK_SECONDS)) if rate else _DISK_BYTES
        else:
            spec["options"] = side.options(budget.slots(side.codec, int(memory * total)))
            if side.pools:
                spec["options"]["pools"] = self._plan(side, spec["options"]["memory"], rate)
            if rate and not self.result["abilities"]["throttled"] and side.link == "disk":
                spec["options"]["bandwidth"] = rate
        cold = [Path(spec["store_folder"]), self._prepared.model]
        found = run(RUN, spec, folder=self._folder, memory=limit, rate=rate, cold=cold)
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
        found = run(RUN, spec, folder=self._folder)
        if "failed" in found:
            raise ExpertcastError(f"a first run, codec {codec}: {found['failed']}")
        return int(found["peak_bytes"]) - found["slots"] * int(self.result["model"]["expert_bytes"])

    def _sides(self) -> list[Side]:
        """Those that were asked for, and the disk alone."""
        named, workloads = self._args.sides, self._args.workloads
        return [
            side
            for side in SIDES
            if side.kind == DISK or ((not named or side.name in named) and side.workload in workloads)
        ]

    def _keep(self, row: Json) -> None:
        self.result["runs"] = [each for each in self.result["runs"] if _key(each) != _key(row)] + [row]
        shown = row.get("failed") or f"{row.get('tpot_s') or row['rate']:.4g}"
        say(f"{row['repetition'] + 1}: {row['side']}, {row['workload']}, {row['memory']}, {row['throttle']}: {shown}")
        self._write()

    def _write(self) -> None:
        self.result["results"] = summaries(self.result["runs"])
        self._file.write(_command(self._args))


def _key(row: Json) -> tuple[object, ...]:
    return tuple(row[name] for name in ("side", "workload", "memory", "throttle", "repetition"))


def planned(
    ids_TLK: Sequence[Sequence[Sequence[int]]], *, prompt: int, experts: int, memory: int, passing: int,
    block: int, ratio: float, rate: float, threads: int,
) -> str:  # fmt: skip
    """What `OffloadConfig.pools` takes; empty where slots alone are best.

    Args:
        ids_TLK: routing of the text, of which the first `prompt` tokens are read at once.
        experts: E.
        memory: bytes of slots and pools.
        passing: slots that are no pool.
        block: bytes of an expert.
        ratio: of its coded bytes to these.
        rate: bytes per second of the disk.
        threads: that decode.
    """
    layers, plain = len(ids_TLK[0]), block // 2
    routing = Routing(
        source="bench", ids_TLK=np.array(ids_TLK), prompt_T=np.arange(len(ids_TLK)) < prompt, experts=experts
    )
    size = ExpertBytes(plane=plain, exponents=int(block * ratio) - plain)
    costs = Costs(
        read_s=plain / rate, ratio=size.exponents / plain, decode_s=block / _SHARDS / DECODED, shards=_SHARDS,
        threads=threads,
    )  # fmt: skip
    share = (memory - passing * block) // layers
    best = next(
        plan for plan in plans(rank_model(routing), costs, size=size, memory=share, step=0.1)
        if plan.experts[State.F] >= _LEAST_FULL
    )  # fmt: skip
    return pools_text({state: layers * nbytes for state, nbytes in best.memory.items()})


def _command(args: argparse.Namespace) -> str:
    """The command line, without paths of this machine."""
    named = {"keep": "FOLDER"}
    words = ["-m benchmarks.disk"]
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
    parser.add_argument("--threads", type=int, default=2, help="of everyone's products (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="folder for the model and stores (default: a temporary one)")
    parser.add_argument("--small", action="store_true", help="a model of toy size")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the run under way and its groups go, too
    raise SystemExit(main())
