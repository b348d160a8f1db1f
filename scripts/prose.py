"""Check the project's prose: banned constructions and proselint, over docstrings, comments, error messages and pages.

    python scripts/prose.py                  # everything; exits with 1 if a line is found
    python scripts/prose.py runtime docs     # some files or folders

`banned_prose.txt` beside this file lists the constructions with their remedies.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from proselint.checks import __register__
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).resolve().parents[1]
CODE = ("predictors", "data", "training", "runtime", "checkpoints", "src/expertcast", "integrations", "scripts",
        "benchmarks")  # fmt: skip
PAGES = ("README.md", "CONTRIBUTING.md", "docs", "integrations/vllm/README.md")
SKIPPED = ("docs/_build", "docs/changelog.md", "docs/systems.md")
"""Generated pages, and the page that defines the row numbers."""
OFF = ("typography", "lexical_illusions", "annotations", "needless_variants")
"""Checks of proselint that do not suit plain ASCII text about code."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / name for name in (*CODE, *PAGES)])
    arguments = parser.parse_args()
    CheckRegistry().register_many(__register__)
    found = [line for path in _files(arguments.paths) for line in findings(path)]
    print(*found, f"{len(found)} findings", sep="\n")
    return 1 if found else 0


def findings(path: Path) -> Iterator[str]:
    """Yield `file:line: construction -> remedy: sentence` for each finding in one file."""
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    passages = _pages(path) if path.suffix == ".md" else _python(path)
    for line, text in passages:
        for sentence in _sentences(text):
            for pattern, remedy in BANNED:
                whole = sentence[-1:] in ".:;!?"  # a cell of a table may be a fragment
                if (whole or pattern.pattern[0] != "^") and (match := pattern.search(sentence)):
                    yield f"{shown}:{line}: {match[0]!r} -> {remedy}: {sentence[:120]}"
        for result in LintFile(str(shown), _without_code(text) + "\n").lint(CONFIG):
            yield f"{shown}:{line}: {result.check_result.message}"


def _banned() -> Iterator[tuple[re.Pattern[str], str]]:
    for line in Path(__file__).with_name("banned_prose.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern, remedy = line.split("\t")
            yield re.compile(pattern, re.IGNORECASE), remedy


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        inside = [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])
        for file in inside:
            linked = any(parent.is_symlink() for parent in (file, *file.parents) if parent != ROOT)
            if not linked and not any(str(file).startswith(str(ROOT / name)) for name in SKIPPED):
                yield file


def _pages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield paragraphs, list items and table cells of a page; headings may be questions."""
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(path.read_text())
    for before, token in pairwise(tokens):
        if token.type == "inline" and before.type != "heading_open":
            lines = token.map or before.map or [0]
            yield lines[0] + 1, token.content


def _python(path: Path) -> Iterator[tuple[int, str]]:
    """Yield docstrings, those of attributes included, texts of raised errors, and comments."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for part in body if isinstance(body, list) else []:
            if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) and type(part.value.value) is str:
                yield part.lineno, part.value.value
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield node.lineno, "".join(_texts(node.exc))
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")


def _texts(expression: ast.expr) -> Iterator[str]:
    for leaf in ast.walk(expression):
        if isinstance(leaf, ast.JoinedStr):
            for part in leaf.values:
                yield part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "X"
        elif isinstance(leaf, ast.Constant) and isinstance(leaf.value, str) and " " in leaf.value:
            yield leaf.value + " "


def _sentences(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", _without_code(text)):
        yield from re.split(r"(?<=[.!?;])\s+", " ".join(paragraph.split()))


def _without_code(text: str) -> str:
    text = re.sub(r"(?m)^( *>>>.*|    .*)$", "", text) if ">>>" in text else text
    return re.sub(r"`+[^`]*`+|\]\([^)]*\)|\"[^\"\n]*\"|\w+_\w+", "X", text)


BANNED = list(_banned())
CONFIG = {**DEFAULT, "checks": {**DEFAULT["checks"], **dict.fromkeys(OFF, False)}}

if __name__ == "__main__":
    sys.exit(main())
