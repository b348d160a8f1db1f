"""Picture of two decode steps of a timeline, on demand above, with forecasts below.

expertcast bench reference --predictor checkpoint --timeline steps.trace.json
python -m benchmarks.steps_picture steps.trace.json steps.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.typing import ColorType

from expertcast.runtime.recording.recorder import Span

_FORECAST, _WAIT, _HOST = "#e8871e", "#d1495b", "#d9d9d9"


def read_runs(timeline: Path) -> dict[str, tuple[list[Span], list[Span]]]:
    """Return the spans of compute and the copies of each run of a Chrome trace, by its name."""
    names: dict[int, str] = {}
    found: dict[str, tuple[list[Span], list[Span]]] = {}
    for event in json.loads(timeline.read_text())["traceEvents"]:
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
            found[event["args"]["name"]] = [], []
        elif event["ph"] == "X":
            start = event["ts"] / 1e6
            span = Span(event["cat"], start=start, end=start + event["dur"] / 1e6, **{"step": -1} | event["args"])
            found[names[event["pid"]]][event["cat"] == "copy"].append(span)
    return found


def draw_steps(timeline: Path, names: Sequence[str], picture: Path, *, steps: int = 2) -> None:
    """Draw consecutive decode steps of median duration of each run on one time scale, as a PNG file.

    Each run has a row for compute and one for the link; a layer has the same colour in both. Copies of misses are
    hatched.

    Args:
        timeline: file of `expertcast bench --timeline`.
        names: names of the runs to draw.
        picture: path of the PNG file.
        steps: number of steps to draw.
    """
    runs = read_runs(timeline)
    windows = {name: _window(*runs[name], steps) for name in names}
    layers = max(span.layer for spans, _, _ in windows.values() for span in spans)  # what follows them is layer L
    longest_s = max(length for _, _, length in windows.values())
    figure = Figure(figsize=(15, 1.5 + 1.7 * len(windows)), layout="constrained")
    axes = figure.subplots(len(windows), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, (spans, copies, length)) in zip(axes, windows.items(), strict=True):
        _draw_run(axis, spans, copies, layers, longest_s)
        axis.axvline(1e3 * length, color="black", linewidth=1.2)
        axis.set_title(f"{name}: {1e3 * length / steps:.2f} ms per token", loc="left", fontsize=10)
        axis.set_xlim(0, 1e3 * longest_s)
    axes[-1].set_xlabel(f"time over {steps} decode step{'s' * (steps > 1)} (ms)")
    _legend(figure, layers)
    figure.savefig(picture, format="png", dpi=130)


def _window(spans: list[Span], copies: list[Span], steps: int) -> tuple[list[Span], list[Span], float]:
    """Return spans and copies of the consecutive steps of median duration, shifted to 0, and their duration."""
    numbers = sorted({span.step for span in spans})
    own = [[span for span in spans if span.step == number] for number in numbers]
    bounds = [(each[0].start, each[-1].end) for each in own]
    if len(bounds) < steps:
        raise SystemExit(f"steps={steps}: a run has {len(bounds)} recorded steps")
    windows = [(first[0], last[1]) for first, last in zip(bounds, bounds[steps - 1 :], strict=False)]
    start, end = sorted(windows, key=lambda window: window[1] - window[0])[len(windows) // 2]

    def within(spans: Sequence[Span]) -> list[Span]:
        inside = [span for span in spans if span.end > start and span.start < end]
        return [replace(span, start=span.start - start, end=span.end - start) for span in inside]

    return within(spans), within(copies), end - start


def _draw_run(axis: Axes, spans: list[Span], copies: list[Span], layers: int, length_s: float) -> None:
    """Draw a run: compute above, the link below."""
    for layer in range(layers + 1):
        colour = _colour(layer, layers)
        _bars(axis, [s for s in spans if s.state == "compute" and s.layer == layer], 1, colour)
        own = [copy for copy in copies if copy.layer == layer]
        _bars(axis, [copy for copy in own if not copy.urgent], 0, colour)
        _bars(axis, [copy for copy in own if copy.urgent], 0, colour, hatch="////")
    for state, colour in (("forecast", _FORECAST), ("policy", _HOST)):
        _bars(axis, [span for span in spans if span.state == state], 1, colour)
    _bars(axis, [span for span in spans if span.state == "wait"], 1, "white", edge=_WAIT, hatch="xxx")
    _name_layers(axis, [s for s in spans if s.state == "compute" and s.layer < layers], 1, length_s)
    _name_layers(axis, copies, 0, length_s)
    axis.set_yticks([0, 1], ["link", "compute"])
    axis.set_ylim(-0.5, 1.5)
    axis.spines[["top", "right"]].set_visible(False)


def _bars(
    axis: Axes, spans: Sequence[Span], row: int, colour: ColorType, *, edge: str = "black", hatch: str = ""
) -> None:
    if spans:
        times = [(1e3 * span.start, 1e3 * span.seconds) for span in spans]
        axis.broken_barh(times, (row - 0.4, 0.8), facecolor=colour, edgecolor=edge, linewidth=0.3, hatch=hatch)


def _name_layers(axis: Axes, spans: Sequence[Span], row: int, length_s: float) -> None:
    """Write the number of the layer on its spans where it fits; adjacent copies of a layer get one number."""
    joined: list[Span] = []
    for span in sorted(spans, key=attrgetter("start")):
        if joined and joined[-1].layer == span.layer and span.start - joined[-1].end < 0.002 * length_s:
            joined[-1] = replace(joined[-1], end=span.end)
        else:
            joined.append(span)
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6}
    for span in joined:
        if span.seconds > 0.006 * length_s:
            middle = 1e3 * (span.start + span.end) / 2
            axis.text(middle, row, str(span.layer), ha="center", va="center", fontsize=6.5, bbox=box, clip_on=True)


def _colour(layer: int, layers: int) -> ColorType:
    """Return the colour of a layer; neighbours differ in lightness too, and time after the last layer is grey."""
    if layer >= layers:
        return "#9aa0a6"
    red, green, blue, _ = colormaps["viridis"](0.1 + 0.85 * layer / max(1, layers - 1))
    light = 0.35 * (layer % 2)
    return tuple(value + (1 - value) * light for value in (red, green, blue))


def _legend(figure: Figure, layers: int) -> None:
    middle = _colour(layers // 2, layers)
    patches = [
        Patch(facecolor=middle, edgecolor="black", label="compute, by layer (number)"),
        Patch(facecolor="#9aa0a6", edgecolor="black", label="after the last layer"),
        Patch(facecolor=_FORECAST, edgecolor="black", label="forecast"),
        Patch(facecolor="white", edgecolor=_WAIT, hatch="xxx", label="wait for copies"),
        Patch(facecolor=_HOST, edgecolor="black", label="idle (host work)"),
        Patch(facecolor=middle, edgecolor="black", hatch="////", label="copy of a miss"),
        Patch(facecolor=middle, edgecolor="black", label="copy of a forecast"),
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("timeline", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--runs", nargs="+", default=["on_demand", "exact"], help="runs to draw")
    args = parser.parse_args()
    draw_steps(args.timeline, args.runs, args.picture)
