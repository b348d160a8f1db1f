"""Picture of two decode steps of a timeline, on demand above, with forecasts below.

expertcast bench reference --predictor checkpoint --timeline steps.trace.json
python -m benchmarks.steps_picture steps.trace.json steps.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.typing import ColorType

from expertcast.predictors.messages import Json

_COLOURS = {"forecast": "#e8871e", "wait": "white", "policy": "#d9d9d9"}
_OUTPUT, _WAIT = "#9aa0a6", "#d1495b"


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
    events = json.loads(timeline.read_text())["traceEvents"]
    pids = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    runs = {name: [event for event in events if event["ph"] == "X" and event["pid"] == pids[name]] for name in names}
    windows = {name: _window(run, steps) for name, run in runs.items()}
    longest = max(end - start for start, end in windows.values())
    figure = Figure(figsize=(15, 1.5 + 1.7 * len(runs)), layout="constrained")
    axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    layers = max(event["args"]["layer"] for run in runs.values() for event in run)  # what follows them is layer L
    for axis, (name, run) in zip(axes, runs.items(), strict=True):
        start, end = windows[name]
        for event in run:
            begin, length, row = event["ts"] - start, event["dur"], int(event["cat"] != "copy")
            if begin + length <= 0 or begin >= end - start:
                continue
            colour, layer = _COLOURS.get(event["cat"]), event["args"]["layer"]
            hatch = "xxx" if event["cat"] == "wait" else "////" if event["args"].get("urgent") else ""
            axis.broken_barh(
                [(begin / 1e3, length / 1e3)], (row - 0.4, 0.8), facecolor=colour or _colour(layer, layers),
                edgecolor=_WAIT if event["cat"] == "wait" else "black", linewidth=0.3, hatch=hatch,
            )  # fmt: skip
            if colour is None and layer < layers and length > 0.006 * longest:
                box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6}
                middle = (begin + length / 2) / 1e3
                axis.text(middle, row, layer, ha="center", va="center", fontsize=6.5, bbox=box, clip_on=True)
        axis.axvline((end - start) / 1e3, color="black", linewidth=1.2)
        axis.set_title(f"{name}: {(end - start) / 1e3 / steps:.2f} ms per token", loc="left", fontsize=10)
        axis.set(xlim=(0, longest / 1e3), ylim=(-0.5, 1.5), yticks=[0, 1], yticklabels=["link", "compute"])
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(f"time over {steps} decode steps (ms)")
    middle = _colour(layers // 2, layers)
    legend: dict[str, Json] = {
        "compute, by layer (number)": {"facecolor": middle}, "after the last layer": {"facecolor": _OUTPUT},
        "forecast": {"facecolor": _COLOURS["forecast"]}, "idle (host work)": {"facecolor": _COLOURS["policy"]},
        "wait for copies": {"facecolor": "white", "edgecolor": _WAIT, "hatch": "xxx"},
        "copy of a miss": {"facecolor": middle, "hatch": "////"}, "copy of a forecast": {"facecolor": middle},
    }  # fmt: skip
    patches = [Patch(label=label, **{"edgecolor": "black", **each}) for label, each in legend.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
    figure.savefig(picture, format="png", dpi=130)


def _window(run: Sequence[Json], steps: int) -> tuple[float, float]:
    """Return begin and end of the consecutive steps of median duration, in microseconds."""
    found: dict[int, list[float]] = {}
    for event in run:
        if event["cat"] != "copy":
            found.setdefault(event["args"]["step"], []).extend((event["ts"], event["ts"] + event["dur"]))
    bounds = [(min(times), max(times)) for _, times in sorted(found.items())]
    if len(bounds) < steps:
        raise SystemExit(f"steps={steps}: a run has {len(bounds)} recorded steps")
    windows = [(first[0], last[1]) for first, last in zip(bounds, bounds[steps - 1 :], strict=False)]
    return sorted(windows, key=lambda window: window[1] - window[0])[len(windows) // 2]


def _colour(layer: int, layers: int) -> ColorType:
    """Return the colour of a layer; neighbours differ in lightness too, and time after the last layer is grey."""
    if layer >= layers:
        return _OUTPUT
    light, colour = 0.35 * (layer % 2), colormaps["viridis"](0.1 + 0.85 * layer / max(1, layers - 1))
    return tuple(each + (1 - each) * light for each in colour[:3])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("timeline", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--runs", nargs="+", default=["on_demand", "exact"], help="runs to draw")
    args = parser.parse_args()
    draw_steps(args.timeline, args.runs, args.picture)
