"""Sides that read one model in equal memory, in alternation: the loop, the medians and the page.

Every run is a process in a control group of its own, with a cold page cache: a prompt at once, then token by token. A
cell is a memory limit and a readahead of the disk. In each repetition every cell runs every side that fits
it, in an order that changes with the repetition. The JSON is written after every run, and a second call goes on.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from textwrap import fill

from benchmarks.children import abilities, run
from benchmarks.conditions import may_set_readahead, readahead, readahead_kib
from benchmarks.results import ResultFile, markdown, shown, spread
from expertcast.commands.output import say
from expertcast.data.models import load_tokenizer
from expertcast.data.text import bundled_ids
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json
from expertcast.runtime.benchmarking.advise_disk import disk_rate
from expertcast.runtime.config import size_bytes
from expertcast.runtime.policies.eviction import Events, next_uses

OURS = "benchmarks.offloaded_run"
CELL = ("memory", "readahead_kib")
_KEY = ("side", *CELL, "repetition")
SETTINGS = ("layers", "prompt", "warm", "new_tokens", "threads", "small")
_SPARE = 128 << 20
"""Bytes of every limit that stay unused."""
_SPREADS = (
    "tpot_s", "ttft_s", "again_s", "again_bytes", "again_hit_rate", "bytes_read", "prompt_bytes_read",
    "hit_rate", "waited_s", "slots", "beside",
)  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One way to run the model."""

    name: str
    options: Json = field(default_factory=dict)
    """Fields of an :class:`OffloadConfig`, or a peer's own."""
    peer: str | None = None
    """Module of the child process of another project."""
    where: tuple[str, ...] = ("whole", "limited")
    """Whether it runs where all experts are in memory, and where the memory is limited."""
    predictor: str | None = None


def add_options(parser: argparse.ArgumentParser, *, memory: Sequence[str], layers: int) -> None:
    """Add the options of a comparison to a benchmark's parser."""
    parser.add_argument("--keep", type=Path, required=True, help="folder for the model and the stores")
    parser.add_argument("--sides", nargs="+", default=[], metavar="NAME", help="(default: the most important ones)")
    parser.add_argument(
        "--memory", nargs="+", default=list(memory), metavar="SIZE",
        help="limits: shares of the experts, sizes such as 8GB, or 0: none (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--readahead", nargs="+", type=int, default=[128, 0], metavar="KIB",
        help="readahead of the disk in KiB; 0: the machine's own (default: %(default)s; other values need root)",
    )  # fmt: skip
    parser.add_argument("--repetitions", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, default=layers, help="layers of the model (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens read at once (default: %(default)s)")
    parser.add_argument("--warm", type=int, default=4, help="tokens before those timed (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens that are timed (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads of every side (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="start no run after this time; call again to go on")
    parser.add_argument("--small", action="store_true", help="a tiny model, for tests")


class SideBySide:
    """Runs what the result file lacks.

    Args:
        args: arguments of the command line.
        file: the result.
        sides: the sides; without a limit the first one shows how much memory a side needs beside the experts.
        model: `path`, `experts_bytes`, `count` of experts, and more to print.
    """

    def __init__(self, args: argparse.Namespace, file: ResultFile, sides: Sequence[Side], model: Json) -> None:
        self._args, self._file, self._folder, self._began = args, file, args.keep.resolve(), time.monotonic()
        if unknown := set(args.sides) - {side.name for side in sides}:
            raise ExpertcastError(f"no side {sorted(unknown)[0]!r}: choose from {', '.join(s.name for s in sides)}")
        self._sides, self._reference = [side for side in sides if side.name in args.sides], sides[0]
        self._path = Path(model["path"])
        self.result = file.values
        self.result["model"] = {**model, "path": self._path.name}
        self.result["abilities"] = abilities()
        files = [self._path] if self._path.is_file() else sorted(self._path.glob("*.safetensors"))
        self.result.setdefault("disk_rate", disk_rate(files[0], 2 << 20, most=1 << 30))
        tokens = args.prompt + args.warm + args.new_tokens
        self._tokens = bundled_ids(load_tokenizer("reference"), tokens)

    def measure(self) -> None:
        """Run every side in every cell, `--repetitions` times."""
        runs: list[Json] = self.result["runs"]
        runs[:] = [each for each in runs if "failed" not in each]  # these are tried again
        done, cells = {tuple(each[name] for name in _KEY) for each in runs}, list(self.cells())
        for repetition in range(self._args.repetitions):
            for cell in cells:
                where = "whole" if cell["memory"] is None else "limited"
                sides = [side for side in self._sides if where in side.where]
                for side in sides[repetition % len(sides) :] + sides[: repetition % len(sides)]:
                    row: Json = {"side": side.name, **cell, "repetition": repetition}
                    if tuple(row[name] for name in _KEY) in done:
                        continue
                    if self._args.minutes and time.monotonic() - self._began > 60 * self._args.minutes:
                        say("the time is up: call the command again to go on")
                        self._write()
                        return
                    runs.append({**row, **self._run(side, cell)})
                    say(_line(runs[-1]))
                    self._write()
        self._write()

    def cells(self) -> Iterator[Json]:
        """Yield memory and readahead of each cell."""
        own, may = readahead_kib(self._folder), may_set_readahead(self._folder)
        ways = list(dict.fromkeys((kib or own) if may else own for kib in self._args.readahead))
        for text in self._args.memory:
            memory = memory_of(text)
            for kib in ways if memory else ways[:1]:
                yield {"memory": memory, "readahead_kib": kib}

    def _run(self, side: Side, cell: Json) -> Json:
        limit, count = self._limit(cell["memory"]), int(self.result["model"]["count"])
        if limit is None or side.peer or cell["memory"] > 1:  # sizes: as a user runs it
            found = self._child(side, cell, limit, count if limit is None else None)
        else:
            room = limit - _SPARE - self._beside(side)
            slots = int(room / self._block)
            if slots < self.result["model"]["top_k"]:
                return {"failed": f"{max(0, room) / 1e9:.2f} GB are left for experts", "limit_bytes": limit}
            found = self._child(side, cell, limit, min(count, slots))
        routing = found.pop("routing", None)
        if routing is not None:
            self.result.setdefault("routing", routing)
        return found if limit is None else {**found, "limit_bytes": limit}

    @property
    def _block(self) -> float:
        """Mean bytes of an expert."""
        return float(self.result["model"]["experts_bytes"] / self.result["model"]["count"])

    def _limit(self, memory: float | None) -> int | None:
        """Return a limit in bytes: a share is of the experts, beside all that the first side needs besides."""
        if memory is None or memory > 1:
            return memory if memory is None else int(memory)
        return self._beside(self._reference) + _SPARE + int(memory * self.result["model"]["experts_bytes"])

    def _beside(self, side: Side) -> int:
        """Return the most memory that a side takes beside the experts, from a run without a limit."""
        known, name = self.result.setdefault("beside_bytes", {}), side.name.partition(",")[0]
        if name not in known:
            count = int(self.result["model"]["count"])
            whole = [e for e in self.result["runs"] if (e["side"], e["memory"]) == (side.name, None)]
            found, held = (whole or [{"failed": ""}])[0], count
            if "failed" in found:
                say(f"memory beside the experts, {side.name}")
                held = count if side.peer else count // 4
                found = self._child(side, dict.fromkeys(CELL), None, held)
            if "failed" in found:
                raise ExpertcastError(f"{side.name} without a limit: {found['failed']}")
            known[name] = max(0, int(found["peak_bytes"] - held * self._block))
        return int(known[name])

    def _child(self, side: Side, cell: Json, limit: int | None, slots: int | None) -> Json:
        args, options, store = self._args, side.options, self._folder / f"store-{side.name.partition(',')[0]}"
        if not side.peer:  # slots that are given leave room for all that a run without a limit took
            given = {"context": len(self._tokens)} if slots is None else {"slots": slots, "context": 1}
            options = {"store": "disk", "store_folder": str(store), **options, **given}
        # a peer reads a second prompt without a limit alone, our sides always
        spec: Json = {
            "model": str(self._path), "tokens": self._tokens, "prompt": args.prompt, "warm": args.warm,
            "timed": args.new_tokens, "threads": args.threads, "options": options, "predictor": side.predictor,
            "again": limit is None, "limit": limit, "store": str(store), "routed": "routing" in self.result,
        }  # fmt: skip
        module, python = (side.peer, str(args.peer)) if side.peer else (OURS, sys.executable)
        # a store, where a side needs one, is written while its first run loads
        with readahead(self._folder, cell["readahead_kib"]):
            return run(module, spec, memory=limit, python=python, cold=[self._path, store])

    def _write(self) -> None:
        self.result["results"] = summaries(self.result)
        self._file.write()


def memory_of(text: str) -> float | None:
    """Return the limit that an argument names: None (no limit), a share below 1, or bytes."""
    try:
        share = float(text)
    except ValueError:
        return float(size_bytes(text))
    return share if share else None


def _line(row: Json) -> str:
    took = row.get("failed") or f"{row['ttft_s']:.2f} s, then {1e3 * row['tpot_s']:.1f} ms a token"
    return f"{row['repetition'] + 1}: {row['side']}, memory {row['memory'] or 'all'}, {_disk(row)}: {took}"


def bypass_misses(events: Events, slots: int) -> list[int]:
    """Count the misses of each event under the optimal policy if a missed expert need not get a slot.

    After each event the policy keeps any `slots` of the experts that were resident or used; to keep those whose next
    use is nearest is optimal. O(n log n) in the total number of uses.

    Args:
        events: distinct keys of each event.
        slots: number of slots.

    Returns:
        Number of misses of each event.
    """
    nexts, _ = next_uses(events)
    held: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    misses = []
    for keys, following in zip(events, nexts, strict=True):
        misses.append(sum(key not in held for key in keys))
        for key, index in zip(keys, following, strict=True):
            held[key] = index
            heapq.heappush(farthest, (-index, key))
        while len(held) > slots:
            index, key = heapq.heappop(farthest)
            if held.get(key) == -index:
                del held[key]
    return misses


def needed_bytes(result: Json, row: Json) -> float | None:
    """Return the fewest bytes of experts per timed token that any cache of a row's size could read.

    The count is Belady's with bypassing, over the recorded routing from the prompt on; all experts are taken to be of
    their mean size.
    """
    passes, model, settings = result.get("routing"), result["model"], result["settings"]
    block, beside = model["experts_bytes"] / model["count"], result.get("beside_bytes", {})
    slots = row["slots"] and row["slots"]["median"]
    if slots is None and (limit := row["limit_bytes"]) is not None:
        name = row["side"].partition(",")[0]
        slots = (limit - beside[name]) / block if name in beside else None
    elif slots is None:
        slots = model["count"]
    if passes is None or slots is None:
        return None
    experts = model["count"] // len(passes[0])
    events = [
        sorted({layer * experts + expert for expert in chain.from_iterable(rows)})
        for each in passes
        for layer, rows in enumerate(each)
    ]
    timed = settings["new_tokens"] * len(passes[0])
    return sum(bypass_misses(events, max(0, int(slots)))[-timed:]) * block / settings["new_tokens"]


def summaries(result: Json) -> list[Json]:
    """Return the spread of the repetitions for each side and cell, cell by cell."""
    groups: dict[tuple[object, ...], list[Json]] = {}
    for each in result["runs"]:
        groups.setdefault((*(each[name] for name in CELL), each["side"]), []).append(each)
    order = list(dict.fromkeys(key[:-1] for key in groups))
    found = []
    for key in sorted(groups, key=lambda key: order.index(key[:-1])):
        good = [each for each in groups[key] if "failed" not in each]
        row: Json = dict(zip((*CELL, "side"), key, strict=True)) | {"repetitions": len(good)}
        row["limit_bytes"] = groups[key][0].get("limit_bytes")
        if good:
            row |= {name: spread(each.get(name) for each in good) for name in _SPREADS}
            row["start_s"] = spread(each["load_s"] + each["ttft_s"] for each in good if "load_s" in each)
            row |= {"peak_bytes": max(each["peak_bytes"] for each in good), "largest": good[0]["largest"]}
            row |= {"needed_bytes": needed_bytes(result, row)}
            row |= {"capped": good[0]["capped"]}
        else:
            row["failed"] = groups[key][0]["failed"]
        found.append(row)
    return found


# The page


def _memory(row: Json) -> str:
    memory = row["memory"]
    return "all" if memory is None else f"{memory:.0%}" if memory < 1 else f"{memory / 1e9:g} GB"


def _disk(row: Json) -> str:
    return f"{row['readahead_kib'] or '?'} KiB"


def best(rows: Sequence[Json], figure: str) -> Json | None:
    """Return the row with the lowest median of a figure."""
    return min((row for row in rows if row.get(figure)), key=lambda row: row[figure]["median"], default=None)


def conclusion(rows: Sequence[Json], base: str) -> str:
    """Return one row for each cell: the best side whose name begins with `base` against the best of the others."""
    lines = []
    for cell in dict.fromkeys(tuple(row[name] for name in CELL) for row in rows):
        here = [row for row in rows if tuple(row[name] for name in CELL) == cell]
        parts = [row["side"].startswith(base) for row in here]
        cells: list[str] = []
        for figure, factor, digits in (("tpot_s", 1e3, 1), ("ttft_s", 1.0, 2), ("start_s", 1.0, 2)):
            sides = [best([row for row, is_base in zip(here, parts, strict=True) if is_base is way], figure)
                     for way in (True, False)]  # fmt: skip
            cells += [shown(each and each[figure], factor, digits) for each in sides]
            known = [each[figure]["median"] for each in sides if each]
            cells.append(f"**{known[0] / known[1]:.2f}**" if len(known) == 2 else "")
        lines.append([_memory(here[0]), _disk(here[0]), *cells])
    head = ["memory for experts", "disk readahead", f"{base}, ms per token", "expertcast", "times as fast",
            f"{base}, prompt, s", "expertcast", "times as fast", f"{base}, loading and prompt, s", "expertcast",
            "times as fast"]  # fmt: skip
    return markdown(head, lines)


def details(rows: Sequence[Json], experts_bytes: float) -> str:
    """Return one row for each side and cell."""
    first = {tuple(row[name] for name in CELL): row.get("largest") for row in reversed(rows) if "failed" not in row}
    lines = []
    for row in rows:
        place = [_memory(row), _disk(row), row["side"]]
        if "failed" in row:
            lines.append([*place, row["failed"], *[""] * 9])
            continue
        likely = first[tuple(row[name] for name in CELL)] or []
        same = sum(a == b for a, b in zip(row["largest"], likely, strict=False)) / max(1, len(likely))
        again = f"; {row['again_s']['median']:.2f} warm" if row["again_s"] else ""
        moved = row["again_bytes"] and row["again_bytes"]["median"] / experts_bytes
        lines.append([
            *place, shown(row["tpot_s"], 1e3), shown(row["ttft_s"], 1, 2) + again, shown(row["bytes_read"], 1e-6, 0),
            "" if row["needed_bytes"] is None else f"{row['needed_bytes'] / 1e6:.0f}", shown(row["hit_rate"], 1, 2),
            "" if moved is None else f"{moved:.0%}, {row['again_hit_rate']['median']:.2f}", shown(row["slots"], 1, 0),
            f"{row['peak_bytes'] / 1e9:.2f}", f"{same:.0%}", str(row["repetitions"]),
        ])  # fmt: skip
    head = ["memory", "readahead", "side", "ms per token", "s to first token", "MB read per token", "MB needed", "hits",
            "moved again", "slots", "peak GB", "same tokens", "runs"]  # fmt: skip
    return markdown(head, lines)


def method(result: Json) -> str:
    """Return how it was measured."""
    model, settings, able = result["model"], result["settings"], result["abilities"]
    limits = {(row["memory"], row["limit_bytes"]) for row in result["results"] if row.get("limit_bytes")}
    listed = ", ".join(f"{_memory({'memory': memory})} {limit / 1e9:.2f} GB" for memory, limit in sorted(limits))
    besides = ", ".join(f"{name} {nbytes / 1e9:.2f} GB" for name, nbytes in result.get("beside_bytes", {}).items())
    others = max((row["beside"]["high"] for row in result["results"] if row.get("beside")), default=0.0)
    versions = sorted({each["version"] for each in result["runs"] if each.get("version")})
    peers = " ".join(f"Peer: {each}." for each in versions)
    group = "a control group" if able["capped"] else "nothing here"
    paragraphs = [
        f"""Direct reads of the disk: {result["disk_rate"] / 1e9:.2f} GB/s. Other processes used at most {others:.2f}
processors during a run. {peers}""",
        f"""{model["layers"]} layers, {model["count"]} experts of {model["experts_bytes"] / 1e9:.2f} GB. Each run is
a process with a cold page cache: it loads, and reads a prompt of {settings["prompt"]} tokens at once,
{settings["warm"]} single tokens, and {settings["new_tokens"]} that are timed (median). Figures are medians of the
repetitions (least-most), sides in alternation. Memory of a run,
pages of files included, is limited by {group}: {listed or "no limit"}; a share is of the
experts' bytes, added to what the first side takes beside them ({besides or "not measured"}). *MB needed*: the fewest
bytes that a cache of this size could read for this routing (Belady). *Moved again*: the experts' bytes that a second
prompt, the first one backwards, moves into slots, and the hits of {settings["new_tokens"]} tokens after it. *Same
tokens*: likeliest tokens equal to the first side's.""",
    ]
    return "\n\n".join(fill(each, 140) for each in paragraphs)


def page(result: Json, base: str) -> str:
    """Return a section: conclusion, details, method."""
    rows = result["results"]
    return "\n\n".join([conclusion(rows, base), details(rows, result["model"]["experts_bytes"]), method(result)])
