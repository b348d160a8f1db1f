"""Damage files of small artefacts, open them with the commands, and count the outcomes.

    python scripts/mutate_artefacts.py --count 2000 --seed 0 --json faults.json

An artefact (traces, checkpoints, stores, quantised models, an options file, texts) is copied and one of its files
is changed. Up to two operations then open it, each in a fork with limits of time and memory. Outcomes:

    right       the same result as for the undamaged files, compared exactly
    edited      another result of a file that people may edit, that has no digest, or that was sealed again on purpose
    refused     exit status 2 and one line that names the file or its folder
    unnamed     exit status 2 and one line that names neither
    traceback   an exception, a signal, or more than one line
    changed     another result without an error
    hung        no end within 20 seconds

The first three are correct; the exit status is 1 if there was any other. `--only N` runs case N of a seed alone and
prints its outcome; its files stay in `--out`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import fault_trials
from fault_trials import BAD, CLASSES, OPERATIONS, comparable, outcome, perform

Change = Callable[[bytes, Random], tuple[bytes, str]]

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 0.5, -0.0, 10**9, 2**31, 2**63, 10**30, -(10**30), 1e308, float("nan"), float("inf"), "",
    "1", "nan", "../../etc/passwd", "__class__", "model.layers.0.__class__", "\0", "\ud800", "x" * 100_000, [], {},
    [None], [[]], {"": 0}, [1] * 1000,
)  # fmt: skip
_DEEP = "[" * 100_000 + "]" * 100_000
_HOLE = '"a hole in the JSON"'
_TRIES = 50
_IRREGULAR = ("folder", "link to itself", "pipe", "socket", "endless", "unreadable")
"""Things that can replace a file; `endless` is a link to /dev/zero."""


def mutate(path: Path, others: list[Path], rng: Random) -> str:
    """Change one file of an artefact in place.

    Args:
        path: the file.
        others: files that may replace it.
        rng: draws the change.

    Returns:
        A description of the change.
    """
    kinds: list[Change] = [*_BYTES]
    if path.suffix == ".json":
        kinds += _MEMBERS * 2
    if path.suffix == ".safetensors":
        kinds += [_header] * 6
    if path.suffix == ".gguf":
        kinds += [_front] * 20
    before = path.read_bytes()
    for _ in range(_TRIES):
        if rng.random() < 0.3:
            return _place(path, others, rng)
        after, done = rng.choice(kinds)(before, rng)
        if after != before:
            path.write_bytes(after)
            return done
    raise AssertionError(f"nothing changes {path}")


def _place(path: Path, others: list[Path], rng: Random) -> str:
    what = rng.choice(("removed", "empty", *_IRREGULAR, *["other"] * 3))
    other = rng.choice(others)
    if what == "empty":
        path.write_bytes(b"")
        return "emptied"
    if what == "unreadable":
        path.chmod(0)
        return what
    path.unlink()
    if what == "other":
        shutil.copy(other, path)
        return f"{other.parent.name}/{other.name} in its place"
    if what == "folder":
        path.mkdir()
    elif what in ("link to itself", "endless"):
        path.symlink_to("/dev/zero" if what == "endless" else path)
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(path.parent):  # addresses have at most 108 bytes
            bound.bind(path.name)
    return what


def _flip(data: bytes, rng: Random) -> tuple[bytes, str]:
    place, bit = _place_in(data, rng), rng.randrange(8)
    return _with(data, place, bytes([data[place] ^ 1 << bit])), f"bit {bit} of byte {place} flipped"


def _byte(data: bytes, rng: Random) -> tuple[bytes, str]:
    place, value = _place_in(data, rng), rng.choice((0, 0x30, 0x39, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return _with(data, place, bytes([value])), f"byte {place} made {value}"


def _swap(data: bytes, rng: Random) -> tuple[bytes, str]:
    size = min(rng.choice((1, 2, 4, 64)), len(data) // 2)
    one, other = sorted((rng.randrange(len(data) - size + 1), rng.randrange(len(data) - size + 1)))
    if one + size > other:
        return data, ""
    swapped = _with(_with(data, one, data[other : other + size]), other, data[one : one + size])
    return swapped, f"{size} bytes at {one} and {other} swapped"


def _fill(data: bytes, rng: Random) -> tuple[bytes, str]:
    """0xff is a NaN in every floating type."""
    value, place = rng.choice((0, 0xFF)), _place_in(data, rng)
    size = min(rng.choice((2, 4, 8, 256)), len(data) - place)
    return _with(data, place, bytes([value]) * size), f"{size} bytes at {place} made {value}"


def _cut(data: bytes, rng: Random) -> tuple[bytes, str]:
    size = rng.choice((1, 7, 8, rng.randrange(len(data)), len(data) - 1))
    return data[:size], f"cut to {size} bytes"


def _append(data: bytes, rng: Random) -> tuple[bytes, str]:
    more = rng.choice((b"\0", b" ", b"{}", b"\xff" * 8, rng.randbytes(64), data))
    return data + more, f"{len(more)} bytes appended"


def _insert(data: bytes, rng: Random) -> tuple[bytes, str]:
    place, size = _place_in(data, rng), rng.choice((1, 8, 100))
    return data[:place] + data[place : place + size] + data[place:], f"up to {size} bytes at {place} doubled"


def _drop(data: bytes, rng: Random) -> tuple[bytes, str]:
    place, size = _place_in(data, rng), rng.choice((1, 8, 100))
    return data[:place] + data[place + size :], f"up to {size} bytes at {place} left out"


_BYTES: list[Change] = [_flip, _flip, _byte, _swap, _fill, _cut, _append, _insert, _drop]


def _front(data: bytes, rng: Random) -> tuple[bytes, str]:
    """Damage the names, types and sizes that a GGUF file begins with, or those of its tensors."""
    names = data.rfind(b"blk.", 0, data.rfind(b"_norm.weight"))
    start, end = rng.choice(((0, 1500), (max(0, names - 3000), names + 200)))
    damaged, done = rng.choice((_flip, _byte, _swap, _fill, _insert, _drop))(data[start:end], rng)
    return data[:start] + damaged + data[end:], f"from byte {start}: {done}"


def _member(data: bytes, rng: Random) -> tuple[bytes, str]:
    """Change a member of an object or an element of a list; seal the document again in half of the cases."""
    values = json.loads(data)
    holder, key = _spot(values, rng)
    found = holder[key]
    what = rng.choice(("gone", "value", "value", "value", "near", "twin", "more", "deep"))
    if what == "gone":
        del holder[key]
    elif what == "value":
        holder[key] = rng.choice(VALUES)
    elif what == "near":
        holder[key] = _near(found, rng)
    elif what == "twin":
        holder[key] = rng.choice(list(holder.values()) if isinstance(holder, dict) else holder)
    elif what == "more" and isinstance(holder, dict):
        holder[rng.choice(("more", "", "__class__"))] = rng.choice(VALUES)
    else:
        holder[key] = _HOLE
    sealed = resealed(values) if rng.random() < 0.5 else None
    text = json.dumps(sealed or values, indent=2)
    note = " and sealed again" if sealed else ""
    return text.replace(json.dumps(_HOLE), _DEEP).encode(errors="surrogatepass"), f"{what}: {key!r}{note}"


def _document(data: bytes, rng: Random) -> tuple[bytes, str]:
    other, name = rng.choice(
        [(b"[]", "a list"), (b"null", "null"), (b"{}", "an empty object"), (data + data, "itself twice"),
         (b'"', "a quote"), (_DEEP.encode(), "deep nesting"), (b'{"a":' * 5000 + b"1" + b"}" * 5000, "deep objects"),
         (data.decode().encode("utf-16"), "UTF-16"), (b"\xef\xbb\xbf" + data, "a byte order mark before it")]
    )  # fmt: skip
    return other, name


_MEMBERS: list[Change] = [_member, _member, _member, _document]


def resealed(values: Any) -> Any:
    """Return the object with a new digest; None if it has none."""
    from expertcast.predictors.artefacts import SEAL, seal

    if not isinstance(values, dict) or SEAL not in values:
        return None
    try:
        return seal({name: value for name, value in values.items() if name != SEAL})
    except ValueError:  # NaN cannot be sealed
        return None


def _header(data: bytes, rng: Random) -> tuple[bytes, str]:
    """Change entries or the length of a safetensors header."""
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size])
    names = [name for name in entries if name != "__metadata__"]
    one, other = rng.choice(names), rng.choice(names)
    what = rng.choice(("places swapped", "gone", "renamed", "dtype", "shape", "offsets", "metadata", "length"))
    if what == "places swapped":
        entries[one]["data_offsets"], entries[other]["data_offsets"] = (
            entries[other]["data_offsets"],
            entries[one]["data_offsets"],
        )
    elif what == "gone":
        del entries[one]
    elif what == "renamed":
        entries[one + "_"] = entries.pop(one)
    elif what == "dtype":
        entries[one]["dtype"] = rng.choice(("F32", "BF16", "F16", "I64", "U8", "F8_E4M3", "X", 3))
    elif what == "shape":
        shape = entries[one]["shape"]
        entries[one]["shape"] = rng.choice((shape[::-1], [*shape, 1], [2**40, 2**40], [-1], [], "x", [2**62]))
    elif what == "offsets":
        begin, end = entries[one]["data_offsets"]
        choices = ([begin + 1, end + 1], [end, begin], [0, 2**62], [begin], [begin - 2, end - 2])
        entries[one]["data_offsets"] = rng.choice(choices)
    elif what == "metadata":
        entries["__metadata__"] = rng.choice((None, {}, {"format": "np"}, {"a": 1}, {"more": "1"}))
    text = json.dumps(entries, separators=(",", ":")).encode().ljust(size)
    length = rng.choice((0, 1, size + 8, 2**31, 2**62, 2**64 - 1)) if what == "length" else len(text)
    return length.to_bytes(8, "little") + text + data[8 + size :], f"header, {what}: {one!r}"


def _spot(values: Any, rng: Random) -> tuple[Any, Any]:
    """Choose a place in a JSON value; members near the top are as likely as those of long lists."""
    holder, key = None, None
    while isinstance(values, dict | list) and values and (holder is None or rng.random() < 0.6):
        holder = values
        key = rng.choice(list(values)) if isinstance(values, dict) else rng.randrange(len(values))
        values = values[key]
    return holder, key


def _near(value: Any, rng: Random) -> Any:
    """Return a value of the same or a similar type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return rng.choice((value + 1, value - 1, -value, value * 2, float(value), str(value), [value]))
    if isinstance(value, str):
        return rng.choice((value[:-1], value + "x", value.upper(), [value], value[::-1]))
    if isinstance(value, list):
        return rng.choice((value[::-1], value[:-1], value + value[-1:], {"0": value}, value[:1] * 3))
    if isinstance(value, dict):
        return rng.choice((list(value), list(value.items()), {**value, "more": 1}, None))
    return rng.choice(("None", 0, False))


def _place_in(data: bytes, rng: Random) -> int:
    return rng.randrange(len(data))


def _with(data: bytes, place: int, piece: bytes) -> bytes:
    return data[:place] + piece + data[place + len(piece) :]


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a fork has one thread


WEIGHTS = {fault_trials.TRACES: 8, fault_trials.ESTIMATOR: 4, fault_trials.FREE: 3,
           fault_trials.STORE: 3, fault_trials.CONFIG: 2, fault_trials.DATA: 2, fault_trials.PACKED_STORE: 4,
           fault_trials.ROUNDED_STORE: 2,
           **dict.fromkeys(fault_trials.QUANTISED, 1)}  # fmt: skip
EDITABLE = (fault_trials.CONFIG, fault_trials.DATA, *fault_trials.QUANTISED)


@dataclass(frozen=True, slots=True)
class Row:
    """One operation on one damaged artefact."""

    case: int
    file: str
    change: str
    operation: str
    outcome: str
    line: str


def main(argv: list[str] | None = None) -> int:
    """Run the trials; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="damaged files (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--only", type=int, metavar="N", help="case N alone")
    parser.add_argument(
        "--artefacts", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), metavar="NAME",
        help=f"damage these alone: {', '.join(WEIGHTS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="keep the artefacts there (default: a temporary folder)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there as well")
    args = parser.parse_args(argv)
    fault_trials.prepare()
    with tempfile.TemporaryDirectory() as temporary:
        driver = Driver(args.out or Path(temporary), args.seed, args.artefacts)
        rows: list[Row] = []
        done = 0
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):  # what is counted so far is written
            for case in range(args.count) if args.only is None else [args.only]:
                for row in driver.case(case):
                    rows.append(row)
                    if row.outcome in BAD or args.only is not None:
                        print(
                            f"--seed {args.seed} --artefacts {' '.join(args.artefacts)} --only {case}: {row}",
                            flush=True,
                        )
                done += 1
    by_file = counts(rows)
    print(table(by_file))
    if args.json:
        failures = [asdict(row) for row in rows if row.outcome in BAD]
        result = {"seed": args.seed, "count": done, "operations": len(rows), "by_file": by_file}
        args.json.write_text(json.dumps({**result, "failures": failures}, indent=2) + "\n")
    return int(any(row.outcome in BAD for row in rows))


class Driver:
    """The artefacts, and the results of their operations without damage.

    Args:
        folder: folder of the artefacts; created if needed.
        seed: seed of the damage.
        artefacts: names of the artefacts to damage.
    """

    def __init__(self, folder: Path, seed: int, artefacts: list[str]) -> None:
        self.seed, self.artefacts = seed, artefacts
        self.made, self.other = folder / "made", folder / "other"
        self.work = folder / "work"

        for number, made in enumerate((self.made, self.other)):
            shutil.rmtree(made, ignore_errors=True)
            for make in (fault_trials.make, fault_trials.make_quantised):
                fault_trials.call(partial(make, made, number), self._renew(self.work / "out"))
        self.right = {name: {operation: self._right(name, operation) for operation in OPERATIONS[name]}
                      for name in artefacts}  # fmt: skip

    def case(self, number: int) -> list[Row]:
        """Damage one file, and open it by at most two operations."""
        rng = Random(f"{self.seed}:{number}")
        name = rng.choices(self.artefacts, [WEIGHTS[each] for each in self.artefacts])[0]
        file = rng.choice(damageable(self.made / name))
        operations = OPERATIONS[name]
        weights = [weight for weight, _ in operations.values()]
        chosen = dict.fromkeys(rng.choices(list(operations), weights, k=2))
        others = [path for each in fault_trials.ARTEFACTS for path in damageable(self.made / each)]
        twin = self.other / name / file.relative_to(self.made / name)
        rows = []
        for operation in chosen:
            target = self._copy(name)
            damaged = target / file.relative_to(self.made / name)
            change = mutate(damaged, [twin] * len(others) + others, Random(f"{self.seed}:{number}:change"))
            edited = name in EDITABLE or "sealed again" in change
            ended, given = perform(name, operation, self.made, target, self._renew(self.work / "out"))
            kind, line = outcome(ended, given, self.right[name][operation], target, edited)
            rows.append(Row(number, f"{name}/{file.relative_to(self.made / name)}", change, operation, kind, line))
        return rows

    def _right(self, name: str, operation: str) -> Any:
        given = []
        for _ in range(2):
            ended, result = perform(name, operation, self.made, self._copy(name), self._renew(self.work / "out"))
            assert ended.status == 0, f"{operation} of undamaged {name}: {ended.err}"
            given.append(comparable(result))
        assert given[0] == given[1], f"{operation} of {name} gives another result every time"
        return given[0]

    def _copy(self, name: str) -> Path:
        """Copy an artefact, always to the same place: results may contain the path."""
        target = self.work / name
        if target.exists():
            shutil.rmtree(target)
        shutil.copytree(self.made / name, target)
        return target

    @staticmethod
    def _renew(folder: Path) -> Path:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        return folder


def damageable(folder: Path) -> list[Path]:
    """Return the files of an artefact that are read; for a quantised checkpoint those with weights."""
    others = (".json",) if folder.name in fault_trials.QUANTISED else (".md",)
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in others)


def counts(rows: list[Row]) -> dict[str, dict[str, int]]:
    """Return the number of operations by file and class."""
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in rows:
        found[row.file][row.outcome] += 1
    return {file: {name: count[name] for name in CLASSES} for file, count in sorted(found.items())}


def table(by_file: dict[str, dict[str, int]]) -> str:
    """Return a table with a row per file and their sum."""
    total = {name: sum(row[name] for row in by_file.values()) for name in CLASSES}
    lines = [f"{'file':40}" + "".join(f"{name:>11}" for name in CLASSES)]
    lines += [f"{file:40}" + "".join(f"{row[name]:>11}" for name in CLASSES) for file, row in by_file.items()]
    return "\n".join([*lines, f"{'all':40}" + "".join(f"{total[name]:>11}" for name in CLASSES)])


if __name__ == "__main__":
    sys.exit(main())
