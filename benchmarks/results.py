"""Result files that a benchmark can resume, their intervals, and the sections of pages made from them."""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from textwrap import fill

from benchmarks.conditions import ROOT, check_clean, conditions, described
from expertcast.checkpoints.provenance import provenance
from expertcast.commands.output import write_json
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json

RESULTS = ROOT / "benchmarks" / "results"


def result_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a benchmark's parser, with the options that all of them have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=RESULTS / f"{name}.json",
        help="JSON file to write, or to resume (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--page", type=Path, help="Markdown page whose section to write")
    parser.add_argument("--allow-dirty", action="store_true", help="measure a work tree with uncommitted changes")
    return parser


class ResultFile:
    """Result of a benchmark, written to a file after every run.

    Args:
        args: arguments of :func:`result_parser`.
        settings: settings of the runs, stored under `settings`.
        folder: a folder on the disk that is read; None: no disk is measured.

    Raises:
        ExpertcastError: the file has other settings, is not a result, or was measured with another revision or on
            another machine; or the work tree has uncommitted changes.
    """

    def __init__(self, args: argparse.Namespace, settings: Json, folder: Path | None = None) -> None:
        check_clean(allow_dirty=args.allow_dirty)
        self._path: Path = args.out
        self._page: Path | None = args.page
        self.values: Json = {"settings": settings, "runs": []}
        now = conditions(folder, threads=getattr(args, "threads", None))
        if self._path.is_file():
            self.values = self._earlier(settings, now)
        self.values |= {"conditions": now}

    def write(self) -> None:
        """Write the values with date, command and versions."""
        self.values |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), **provenance()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, self.values)

    def publish(self, heading: str, text: str) -> None:
        """Print a section with the conditions and the command, and write it to the page if there is one."""
        about = f"{self.values['date'][:10]}. {described(self.values['conditions'])}"
        text = "\n\n".join([text, fill(about, 140), f"    {self.values['command']}"])
        print(text)
        if self._page is not None:
            write_section(self._page, heading, text)

    def _earlier(self, settings: Json, now: Json) -> Json:
        try:
            found: Json = json.loads(self._path.read_bytes())
        except (OSError, ValueError) as error:
            raise ExpertcastError(f"{self._path} is not a result ({error}): remove it, or use another --out") from error
        before = found.get("conditions", {}) if isinstance(found, dict) else {}
        same = [before.get(name) == now[name] for name in ("cpu", "git_revision", "threads")]
        if not before or found.get("settings") != json.loads(json.dumps(settings)) or not all(same):
            raise ExpertcastError(
                f"{self._path} has other settings, another machine or another revision: remove it, or use another --out"
            )
        return found


def spread(values: Iterable[float | None]) -> Json | None:
    """Return median, least and most of repetitions; None without values."""
    known = [value for value in values if value is not None]
    return {"median": statistics.median(known), "low": min(known), "high": max(known)} if known else None


def shown(found: Json | None, factor: float = 1.0, digits: int = 1) -> str:
    """Return a spread as `median (least-most)`, times a factor."""
    if found is None:
        return ""
    median, low, high = (f"{factor * found[name]:.{digits}f}" for name in ("median", "low", "high"))
    return median if low == high else f"{median} ({low}-{high})"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def write_section(page: Path, heading: str, text: str) -> None:
    """Write a section of a page: in place of the section with this heading, or before all others."""
    title, *sections = re.split(r"(?m)^(?=## )", page.read_text() if page.exists() else f"# {page.stem}\n\n")
    section = f"## {heading}\n\n{text.strip()}\n\n"
    places = [place for place, each in enumerate(sections) if each.startswith(f"## {heading}\n")]
    if places:
        sections[places[0]] = section
    else:
        sections.insert(0, section)
    page.write_text(title + "".join(sections).rstrip() + "\n")
