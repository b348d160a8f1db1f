"""A matplotlib figure as SVG inside a page: text stays text, and ink, paper and grid follow the page's colours."""

from __future__ import annotations

import io
import re

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from expertcast.training.drawing import BLACK, GREY, GRID

_COLOURS = {
    "#000000": "var(--ink)",
    BLACK.lower(): "var(--ink)",
    GREY.lower(): "var(--soft)",
    GRID.lower(): "var(--line)",
}
_LEAST_WIDTH = 0.75
"""Of its own width that a figure is shrunk to on a narrow screen, and no further: its text is to be read."""


def inline_svg(figure: Figure, name: str, description: str) -> Markup:
    """The figure as an `svg` element.

    Args:
        figure: drawn on any background, which is left out.
        name: begins the ids in it, so that those of several figures do not meet.
        description: for who cannot see it.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text).groups()  # type: ignore[union-attr]
    size = f"width: {float(width):.0f}pt; max-width: 100%; min-width: {float(width) * _LEAST_WIDTH:.0f}pt"
    named = f'role="img" aria-label="{Markup.escape(description)}"'
    opening = f'<svg {named} viewBox="0 0 {width} {height}" style="{size}">'
    text = opening + text[text.index(">") + 1 :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'( id="|url\(#|xlink:href="#)', rf"\g<1>{name}-", text)
    for colour, variable in _COLOURS.items():
        text = text.replace(colour, variable)
    return Markup(text)
