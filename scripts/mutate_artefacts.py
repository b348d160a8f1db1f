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

import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import fault_trials
from fault_trials import CLASSES, OPERATIONS, Row, comparable, conclude, outcome, parser_of, perform

Change = Callable[[bytes, Random], tuple[bytes, str]]

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 0.5, -0.0, 10**9, 2**31, 2**63, 10**30, -(10**30), 1e308, float("nan"), float("inf"), "",
    "1", "nan", "F32", "U8", "../../etc/passwd", "__class__", "model.layers.0.__class__", "\0", "\ud800",
    "x" * 100_000, [], {}, [None], [[]], {"": 0}, [1] * 1000,
)  # fmt: skip
_DEEP = "[" * 100_000 + "]" * 100_000
_HOLE = '"a hole in the JSON"'
_TRIES = 50
_IRREGULAR = ("folder", "link to itself", "pipe", "endless")
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
    more: dict[str, list[Change]] = {".json": [_member] * 6 + [_document] * 2, ".safetensors": [_header] * 6,
                                     ".gguf": [_front] * 20}  # fmt: skip
    kinds: list[Change] = [_bytes] * 9 + more.get(path.suffix, [])
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
    return what


def _bytes(data: bytes, rng: Random) -> tuple[bytes, str]:
    """Flip a bit; overwrite, double or drop some bytes; or cut the file. 0xff is a NaN in every floating type."""
    place = rng.randrange(len(data))
    size = min(rng.choice((1, 2, 8, 64, 256)), len(data) - place)
    piece = data[place : place + size]
    flipped = bytes([piece[0] ^ 1 << rng.randrange(8)]) + piece[1:]
    new = rng.choice((flipped, flipped, bytes([rng.choice((0, 0x30, 0x7F, 0x80, 0xFF))]) * size, piece[:1] * size,
                      rng.randbytes(size), piece * 2, b"", None))  # fmt: skip
    if new is None:
        return data[:place], f"cut to {place} bytes"
    return data[:place] + new + data[place + size :], f"{size} bytes at {place} made {new[:8].hex()}, {len(new)} bytes"


def _front(data: bytes, rng: Random) -> tuple[bytes, str]:
    """Damage the names, types and sizes that a GGUF file begins with, or those of its tensors."""
    names = data.rfind(b"blk.", 0, data.rfind(b"_norm.weight"))
    start, end = rng.choice(((0, 1500), (max(0, names - 3000), names + 200)))
    damaged, done = _bytes(data[start:end], rng)
    return data[:start] + damaged + data[end:], f"from byte {start}: {done}"


def _member(data: bytes, rng: Random) -> tuple[bytes, str]:
    """Change a member of an object or an element of a list; seal the document again in half of the cases."""
    values = json.loads(data)
    holder, key = _spot(values, rng)
    found = holder[key]
    what = rng.choice(("gone", "value", "value", "value", "near", "twin", "swapped", "more", "deep"))
    if what == "gone":
        del holder[key]
    elif what == "value":
        holder[key] = rng.choice(VALUES)
    elif what == "near":
        holder[key] = _near(found, rng)
    elif what in ("twin", "swapped"):
        other = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[key], holder[other] = holder[other], found if what == "swapped" else holder[other]
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
    """Change an entry or the length of a safetensors header."""
    size = int.from_bytes(data[:8], "little")
    text, done = _member(data[8 : 8 + size], rng)
    length = rng.choice((len(text), len(text), len(text), 0, 1, size + 8, 2**31, 2**62, 2**64 - 1))
    return length.to_bytes(8, "little") + text + data[8 + size :], f"header of {length} bytes, {done}"


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


WEIGHTS = dict(zip(fault_trials.ARTEFACTS, (8, 4, 3, 3, 2, 2, 4, 2, *[1] * len(fault_trials.QUANTISED)), strict=True))
EDITABLE = (fault_trials.CONFIG, fault_trials.DATA, *fault_trials.QUANTISED)


def main(argv: list[str] | None = None) -> int:
    """Run the trials; return the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=2000, help="damaged files (default: %(default)s)")
    parser.add_argument("--only", type=int, metavar="N", help="case N alone")
    parser.add_argument(
        "--artefacts", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), metavar="NAME",
        help=f"damage these alone: {', '.join(WEIGHTS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the artefacts there (default: nowhere)")
    args = parser.parse_args(argv)
    fault_trials.prepare()
    with tempfile.TemporaryDirectory() as temporary:
        driver = Driver(args.out or Path(temporary), args.seed, args.artefacts)
        cases = range(args.count) if args.only is None else [args.only]
        trials = itertools.chain.from_iterable(map(driver.case, cases))
        return conclude(trials, CLASSES, args.json, every=args.only is not None)


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

    def case(self, number: int) -> Iterator[Row]:
        """Damage one file, and open it by at most two operations."""
        rng = Random(f"{self.seed}:{number}")
        name = rng.choices(self.artefacts, [WEIGHTS[each] for each in self.artefacts])[0]
        file = rng.choice(damageable(self.made / name))
        operations = OPERATIONS[name]
        weights = [weight for weight, _ in operations.values()]
        chosen = dict.fromkeys(rng.choices(list(operations), weights, k=2))
        others = [path for each in fault_trials.ARTEFACTS for path in damageable(self.made / each)]
        twin = self.other / name / file.relative_to(self.made / name)
        again = f"--seed {self.seed} --artefacts {' '.join(self.artefacts)} --only {number}"
        for operation in chosen:
            target = self._copy(name)
            damaged = target / file.relative_to(self.made / name)
            change = mutate(damaged, [twin] * len(others) + others, Random(f"{self.seed}:{number}:change"))
            edited = name in EDITABLE or "sealed again" in change
            ended, given = perform(name, operation, self.made, target, self._renew(self.work / "out"))
            kind, line = outcome(ended, given, self.right[name][operation], target, edited)
            what = f"{file.relative_to(self.made)}: {change}; {operation}"
            yield Row(again=again, group=name, what=what, outcome=kind, line=line)

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


if __name__ == "__main__":
    sys.exit(main())
