"""Sphinx builds the pages of this folder as a site: `make docs`."""

from __future__ import annotations

import os
import re
from pathlib import Path

import expertcast
from expertcast.cli import COMMANDS, build_parser

HERE = Path(__file__).parent
SOURCE = "https://github.com/expertcast/expertcast/blob/main/"

project = "expertcast"
author = "The expertcast authors"
release = expertcast.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"expertcast {release}"
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


def point_outside(_app: object, _page: str, text: list[str]) -> None:
    """Links to files of the repository that are no pages lead to its host."""
    text[0] = re.sub(r"\]\(\.\./(?!CHANGELOG)", f"]({SOURCE}", text[0])


def setup(app: object) -> None:
    """Called by Sphinx."""
    write_command_line()
    app.connect("source-read", point_outside)  # type: ignore[attr-defined]
