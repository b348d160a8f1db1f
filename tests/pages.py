"""Commands and code of the project's pages: read them, run them, record their output.

python -m tests.pages              # run all tutorials and write the outputs into the pages
python -m tests.pages train serve  # some of them
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
_BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```\n(?:\n```text\n.*?^```\n)?", flags=re.MULTILINE | re.DOTALL)
"""A block of code, and the output below it."""


def blocks_of(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in a language, as a reader of Markdown sees them; indented blocks are bash."""
    tokens = MarkdownIt("commonmark").parse((ROOT / page).read_text())
    return [each.content for each in tokens if (each.type, each.info) in {("fence", language), ("code_block", "")}
            and (each.type == "fence" or language == "bash")]  # fmt: skip


def commands_of(page: str, program: str = "expertcast") -> list[str]:
    """Return the arguments of a program in the shell blocks of a page, without comments."""
    shell = "".join(blocks_of(page, "bash")).replace("\\\n", " ")
    lines = re.findall(rf"^(?:\w+=\S+ )*{re.escape(program)} (.*)$", shell, flags=re.MULTILINE)
    return [line.partition(" #")[0].strip() for line in lines]


def run_tutorial(name: str, folder: Path) -> str:
    """Run the blocks of a tutorial in `folder`, in order, and return the page with their outputs.

    Raises:
        subprocess.CalledProcessError: a command of a shell block failed.
    """
    names: dict[str, Any] = {}

    def run(block: re.Match[str]) -> str:
        language, code = block[1], block[2]
        output = _shell(code, folder) if language == "bash" else _python(code, folder, names)
        for private in (folder, ROOT):
            output = output.replace(f"{private}/", "")
        shown = "\n".join(line.rstrip() for line in output.strip("\n").splitlines())
        return f"```{language}\n{code}```\n" + (f"\n```text\n{shown}\n```\n" if shown else "")

    return _BLOCK.sub(run, (TUTORIALS / f"{name}.md").read_text())


def _shell(code: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "ROUTING": str(ROOT / "benchmarks" / "routing"), "COLUMNS": "110"}
    command = ["bash", "-euo", "pipefail", "-c", code]
    return subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, timeout=600, check=True
    ).stdout


def _python(code: str, folder: Path, names: dict[str, Any]) -> str:
    printed = io.StringIO()
    with contextlib.chdir(folder), _importable(folder), contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def tutorials() -> list[str]:
    """Return the names of all tutorials."""
    return sorted(path.stem for path in TUTORIALS.glob("*.md") if path.stem != "index")


def main() -> None:
    pages = {}
    for name in sys.argv[1:] or tutorials():
        with tempfile.TemporaryDirectory() as folder:
            pages[name] = run_tutorial(name, Path(folder))
    for name, page in pages.items():  # after all runs: outputs name a clean revision
        (TUTORIALS / f"{name}.md").write_text(page)


if __name__ == "__main__":
    main()
