"""Time per token of a model with its experts on a disk, for several ways to read them in equal memory.

    python -m benchmarks.disk --keep FOLDER --out disk.json

The benchmark creates a model of OLMoE-1B-7B's shape with experts of real size and packs its stores. It then runs every
side at every memory size (a share of the experts' bytes) and every disk bandwidth (0: unlimited), in alternation. Each
run is a separate process in a memory control group with a cold page cache. All runs read the same text token by token.
The JSON file is written after every run; a second call resumes it.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.children import abilities, run
from benchmarks.disk_files import RUN, Prepared
from benchmarks.results import ResultFile
from expertcast.commands.output import say
from expertcast.data.routing_file import Routing
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json
from expertcast.runtime.config import pool_bytes
from expertcast.runtime.pools.planner import plans
from expertcast.runtime.pools.ranks import rank_model
from expertcast.runtime.pools.states import Costs, ExpertBytes, State, pools_text

SETTINGS = ("layers", "small", "prompt", "warm", "new_tokens", "threads")
"""Settings that must be equal to resume a file."""
DISK, DIRECT = "disk", "direct"
_DISK_SECONDS, _DISK_BYTES = 3, 1 << 30
_COMMON_RATE = 1.5e9
"""Assumed bytes per second of a disk that was not measured."""
_DECODED, _SHARDS = 1.0e9, 6
"""Assumed decoding rate of each of two threads in bytes of bf16 per second, and shards per expert."""
_SPARE = 64 << 20
"""Extra memory of every side beside the experts' share and the measured overhead of side `direct`, in bytes."""
_KEYS = ("side", "memory", "throttle")
_MEDIANS = ("tpot_s", "tpot_mean_s", "ttft_s", "bytes_read", "prompt_bytes_read", "hit_rate", "waited_s", "link_busy_s",
            "rate_waiting", "rate_busy", "rate", "same_tokens", "slots")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to read the experts."""

    name: str
    codec: str = "raw"
    link: str = "disk"
    pools: bool = False
    """Whether the planner reserves part of the memory for compressed experts."""

    def options(self, slots: int) -> Json:
        """Return the fields of an :class:`OffloadConfig`."""
        return {"store": "disk", "codec": self.codec, "link": self.link, "slots": slots}


SIDES = (
    Side(name=DISK),
    Side(name="mapped", link="instant"),
    Side(name=DIRECT),
    Side(name="bitsplit", codec="bitsplit"),
    Side(name="pools", codec="bitsplit", pools=True),
)
"""`disk`: sequential reads without a model; `mapped`: memory-mapped store, read by page faults; `direct`: direct reads
into slots; `bitsplit`: the same with losslessly compressed experts; `pools`: the same with planned memory for
compressed experts.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0, or 2 after one line on standard error."""
    args = _parser().parse_args(arguments)
    try:
        with ExitStack() as stack:
            folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-disk-")))
            folder.mkdir(parents=True, exist_ok=True)
            Bench(args, folder.resolve()).measure()
    except ExpertcastError as error:
        print(f"benchmarks.disk: {error}", file=sys.stderr)
        return 2
    return 0


class Bench:
    """Runs the missing measurements and writes the result file."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder = args, folder
        self._prepared = Prepared(folder, args)
        self._file = ResultFile(args.out, {name: getattr(args, name) for name in SETTINGS})
        self.result = self._file.values
        self.result["abilities"] = abilities(folder)

    def measure(self) -> None:
        """Run everything that is not in the file yet."""
        args, sides = self._args, self._sides()
        codecs = list(dict.fromkeys(["raw", *(side.codec for side in sides)]))  # raw: disk rate and base memory
        made = self._prepared.make(codecs)
        self._ids = made["resident"].pop("ids")
        self.result |= made
        beside = self.result.setdefault("beside", {})
        for codec in codecs:
            if codec not in beside:  # twice, because the first run may load libraries from disk
                beside[codec] = min(self._beside(codec), self._beside(codec))
        done = {_key(each) for each in self.result["runs"] if "failed" not in each}
        for repetition in range(args.repetitions):
            for rate in args.bandwidth:
                for memory in args.memory:
                    for side in sides:
                        share = None if side.name == DISK else memory
                        row: Json = {"side": side.name, "memory": share, "throttle": rate or None}
                        row["repetition"] = repetition
                        if _key(row) not in done:
                            done.add(_key(row))
                            self._keep({**row, **self._run(side, memory, rate or None)})
        self._write()

    def _run(self, side: Side, share: float, rate: float | None) -> Json:
        beside, memory = self.result["beside"], int(share * self.result["model"]["experts_bytes"])
        if side.name == DISK:
            nbytes = int(min(_DISK_BYTES, rate * _DISK_SECONDS)) if rate else _DISK_BYTES
            return self._child(side, {"kind": "disk", "disk_bytes": nbytes}, rate=rate)
        # a side with more overhead than `direct` gets fewer slots
        room = memory - max(0, beside[side.codec] - beside["raw"])
        pools = self._plan(side, room, rate) if side.pools else ""
        options = side.options(self._slots(room - sum(pool_bytes(pools).values())))
        if pools:
            options["pools"] = pools
        if rate and not self.result["abilities"]["throttled"] and side.link == "disk":
            options["bandwidth"] = rate
        truth, limit = self._prepared.truth, beside["raw"] + _SPARE + memory
        found = self._child(side, {"options": options, "truth": str(truth)}, limit, rate)
        return {**found, "limit_bytes": limit, "pools": options.get("pools")}

    def _child(self, side: Side, more: Json, limit: int | None = None, rate: float | None = None) -> Json:
        store = self._prepared.store_folder(side.codec)
        spec = {**self._prepared.base_spec, "kind": "ours", "store_folder": str(store), **more}
        return run(RUN, spec, folder=self._folder, memory=limit, rate=rate, cold=[store, self._prepared.model])

    def _plan(self, side: Side, memory: int, rate: float | None) -> str:
        model, top_k = self.result["model"], self.result["model"]["shape"]["K"]
        measured = [each["rate"] for each in self.result["runs"] if each["side"] == DISK and not each["throttle"]]
        return planned(
            self._ids,
            prompt=self._args.prompt,
            experts=model["shape"]["E"],
            memory=memory,
            passing=top_k,
            block=model["expert_bytes"],
            ratio=self.result["stores"][side.codec]["ratio"],
            rate=rate or (statistics.median(measured) if measured else _COMMON_RATE),
            threads=self._args.threads,
        )

    def _beside(self, codec: str) -> int:
        """Measure the memory overhead of a codec beside its slots, in bytes."""
        say(f"memory beside slots, codec {codec}")
        side, model = Side(name=codec, codec=codec), self.result["model"]
        slots = self._slots(int(max(self._args.memory) * model["experts_bytes"]))
        found = self._child(side, {"options": side.options(slots), "warm": 1, "timed": 1})
        if "failed" in found:
            raise ExpertcastError(f"measuring codec {codec} failed: {found['failed']}")
        return int(found["peak_bytes"]) - found["slots"] * int(model["expert_bytes"])

    def _slots(self, nbytes: int) -> int:
        return nbytes // int(self.result["model"]["expert_bytes"])

    def _sides(self) -> list[Side]:
        """Return the selected sides, and always `disk`."""
        named = self._args.sides or [side.name for side in SIDES]
        return [side for side in SIDES if side.name in (DISK, *named)]

    def _keep(self, row: Json) -> None:
        self.result["runs"] = [each for each in self.result["runs"] if _key(each) != _key(row)] + [row]
        shown = row.get("failed") or f"{row.get('tpot_s') or row['rate']:.4g}"
        say(f"{row['repetition'] + 1}: {row['side']}, {row['memory']}, {row['throttle']}: {shown}")
        self._write()

    def _write(self) -> None:
        self.result["results"] = summaries(self.result["runs"])
        self._file.write()


def _key(row: Json) -> tuple[object, ...]:
    return tuple(row[name] for name in (*_KEYS, "repetition"))


def planned(
    ids_TLK: Sequence[Sequence[Sequence[int]]], *, prompt: int, experts: int, memory: int, passing: int,
    block: int, ratio: float, rate: float, threads: int,
) -> str:  # fmt: skip
    """Plan the pools for `OffloadConfig.pools`; return an empty string if slots alone are best.

    Args:
        ids_TLK: routing of the text; its first `prompt` tokens run at once.
        prompt: tokens of the prompt.
        experts: E.
        memory: bytes for slots and pools.
        passing: slots that belong to no pool.
        block: bytes of one expert.
        ratio: compressed share of these bytes.
        rate: disk bandwidth in bytes per second.
        threads: decoding threads.
    """
    layers, plain = len(ids_TLK[0]), block // 2
    routing = Routing(
        source="bench", ids_TLK=np.array(ids_TLK), prompt_T=np.arange(len(ids_TLK)) < prompt, experts=experts
    )
    size = ExpertBytes(plane=plain, exponents=int(block * ratio) - plain)
    costs = Costs(
        read_s=plain / rate, ratio=size.exponents / plain, decode_s=block / _SHARDS / _DECODED, shards=_SHARDS,
        threads=threads,
    )  # fmt: skip
    share = (memory - passing * block) // layers
    best = next(
        plan for plan in plans(rank_model(routing), costs, size=size, memory=share, step=0.1)
        if plan.experts[State.F]  # without any full expert every hit needs decoding
    )  # fmt: skip
    return pools_text({state: layers * nbytes for state, nbytes in best.memory.items()})


def summaries(runs: Sequence[Json]) -> list[Json]:
    """Return medians by side, memory and bandwidth, in the order of the first runs."""
    groups: dict[tuple[object, ...], list[Json]] = {}
    for each in runs:
        if "failed" not in each:
            groups.setdefault(tuple(each[name] for name in _KEYS), []).append(each)
    rates = {
        key[-1]: statistics.median(run["rate"] for run in group) for key, group in groups.items() if key[0] == DISK
    }
    return [_summary(dict(zip(_KEYS, key, strict=True)), group, rates) for key, group in groups.items()]


def _summary(key: Json, group: Sequence[Json], rates: Json) -> Json:
    row: Json = {**key, "disk_bandwidth": rates.get(key["throttle"], key["throttle"]), "repetitions": len(group)}
    for name in _MEDIANS:
        values = [run[name] for run in group if run.get(name) is not None]
        if values:
            row[name] = statistics.median(values)
    times = [run["tpot_s"] for run in group if "tpot_s" in run]
    if times:
        row["tpot_range_s"] = [min(times), max(times)]
    row["peak_bytes"] = max(run["peak_bytes"] for run in group)
    row["identical"] = all(run["identical"] for run in group) if "identical" in group[0] else None
    return row | {name: group[0].get(name) for name in ("limit_bytes", "capped", "throttled")}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(side.name for side in SIDES)
    parser.add_argument("--sides", nargs="*", choices=names, default=[], help="(default: all)")
    parser.add_argument("--memory", nargs="+", type=float, default=[0.08, 0.15, 0.3], help="shares of the experts")
    parser.add_argument("--bandwidth", nargs="+", type=float, default=[0, 5e8, 2e8], help="bytes/s; 0: unlimited")
    parser.add_argument("--repetitions", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=32, help="tokens read at once (default: %(default)s)")
    parser.add_argument("--warm", type=int, default=4, help="tokens before those timed (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens that are timed (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="compute threads (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="folder for the model and stores (default: a temporary one)")
    parser.add_argument("--small", action="store_true", help="use a tiny model")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the running child and removes its groups
    raise SystemExit(main())
