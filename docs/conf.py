"""Sphinx builds the pages of this folder as a site: `make docs`."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from pathlib import Path

import expertcast
from expertcast.cli import COMMANDS, build_parser

HERE = Path(__file__).parent
SOURCE = "https://github.com/expertcast/expertcast/blob/main/"
"""The one place to change on publication, with the links at the end of README.md."""
FORMATS = {
    "Traces": "expertcast.data.trace_format",
    "Predictor checkpoints": "expertcast.checkpoints.checkpoint",
    "Expert stores": "expertcast.runtime.storage.expert_file",
    "Routing files": "expertcast.data.routing_file",
}

project = "expertcast"
author = "The expertcast authors"
copyright = "2026, the expertcast authors"
release = expertcast.__version__
extensions = [
    "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx",
    "sphinx_copybutton", "sphinx_design",
]  # fmt: skip
default_role = "code"
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"expertcast {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_google_docstring = True
intersphinx_mapping: dict[str, tuple[str, str | None]] = {}  # pages build without a network


def write_command_line() -> None:
    """`cli.md`: the help of every command, as the program prints it."""
    os.environ["COLUMNS"] = "110"
    parser = build_parser()
    commands = next(action for action in parser._actions if action.dest == "command").choices
    assert isinstance(commands, dict)
    parsers = {"": parser, **{name: commands[name] for name in COMMANDS}}
    pages = [f"## expertcast {name}\n\n```text\n{own.format_help().rstrip()}\n```\n" for name, own in parsers.items()]
    (HERE / "cli.md").write_text("# Command line\n\n" + "\n".join(pages))


def write_formats() -> None:
    """`formats.md`: the docstrings of the modules that define the project's files."""
    sections = []
    for title, name in FORMATS.items():
        text = inspect.getdoc(importlib.import_module(name)) or ""
        sections.append(f"## {title}\n\nDefined in `{name}`.\n\n```text\n{text}\n```\n")
    (HERE / "formats.md").write_text("# File formats\n\n" + "\n".join(sections))


def write_results() -> None:
    """`results/`: the pages of `benchmarks/`, with links that work from here."""
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    for page in (HERE.parent / "benchmarks").glob("*.md"):
        text = page.read_text()
        text = re.sub(r"(!\[[^]]*\]\()(results/)", r"\1../../benchmarks/\2", text)
        text = re.sub(r"(?<!\])\]\((?!https?:|#|\.\./|[\w-]+\.md|\S+\.png)", f"]({SOURCE}benchmarks/", text)
        text = text.replace("](../docs/", "](../")
        (folder / page.name).write_text(text)


def point_outside(_app: object, page: str, text: list[str]) -> None:
    """Point links to files of the repository that are not pages to its host."""
    up = r"\.\./" * (page.count("/") + 1)
    text[0] = re.sub(rf"(?<!!)(\[[^]]*\]\(){up}(?!CHANGELOG|docs)", rf"\1{SOURCE}", text[0])


def setup(app: object) -> None:
    """Called by Sphinx."""
    write_command_line()
    write_formats()
    write_results()
    app.connect("source-read", point_outside)  # type: ignore[attr-defined]
