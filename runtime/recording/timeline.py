"""Timelines of recorded runs: Chrome traces, and pictures of a few decode steps.

A trace opens in Perfetto (ui.perfetto.dev) or chrome://tracing. Each run is a process that starts at 0, with one row
for the compute stream and one for the link.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from expertcast.predictors.artefacts import write_user_file
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.runtime.recording.recorder import Recorder, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import ColorType

COMPUTE, LINK = 1, 2
"""Thread ids of the rows."""
_ROW_NAMES = {COMPUTE: "compute", LINK: "link"}
_FORECAST, _WAIT, _HOST = "#e8871e", "#d1495b", "#d9d9d9"


def chrome_trace(recorders: Mapping[str, Recorder]) -> Json:
    """Return the runs in the JSON object form of the trace event format, with times in microseconds.

    Args:
        recorders: recorders by name of the run.
    """
    events: list[Json] = []
    for process, (name, recorder) in enumerate(recorders.items(), start=1):
        spans, copies = recorder.spans(), sorted(recorder.copies(), key=attrgetter("start"))
        origin = min((span.start for span in (*spans, *copies)), default=0.0)
        events += _labels(process, name)
        labelled = zip(_span_labels(spans), spans, strict=True)
        events += [_event(label, span, process, COMPUTE, origin) for label, span in labelled]
        events += [_event(_copy_label(copy), copy, process, LINK, origin) for copy in copies]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_timeline(path: str | Path, recorders: Mapping[str, Recorder]) -> None:
    """Write :func:`chrome_trace` to a file, atomically.

    Args:
        path: path of the JSON file.
        recorders: recorders by name of the run.

    Raises:
        ExpertcastError: the folder does not exist or is not writable.
    """
    write_user_file(Path(path), json.dumps(chrome_trace(recorders), allow_nan=False).encode())


def draw_steps(recorders: Mapping[str, Recorder], png_path: str | Path, *, steps: int = 2) -> None:
    """Draw consecutive decode steps of median duration of each run on one time scale, as a PNG file.

    Each run has a row for compute and one for the link; a layer has the same colour in both. Copies of misses are
    hatched.

    Args:
        recorders: recorders by name of the run.
        png_path: path of the PNG file.
        steps: number of steps to draw.

    Raises:
        ExpertcastError: there is no run, a run has fewer steps, or the path is not writable.
    """
    windows = {name: _window(name, recorder, steps) for name, recorder in recorders.items()}
    if not windows:
        raise ExpertcastError("recorders is empty: give at least one recorder by name")
    from matplotlib.figure import Figure

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
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    write_user_file(Path(png_path), picture.getvalue())


def _labels(process: int, name: str) -> list[Json]:
    """Return metadata events with the labels and the order of the rows in Perfetto."""
    labels = [("process_name", 0, {"name": name}), ("process_sort_index", 0, {"sort_index": process})]
    for thread, row in _ROW_NAMES.items():
        labels += [("thread_name", thread, {"name": row}), ("thread_sort_index", thread, {"sort_index": thread})]
    return [{"ph": "M", "name": key, "pid": process, "tid": thread, "args": args} for key, thread, args in labels]


def _event(label: str, span: Span, process: int, thread: int, origin: float) -> Json:
    own = {"expert": span.expert, "urgent": span.urgent} if span.state == "copy" else {"step": span.step}
    return {
        "ph": "X", "name": label, "cat": span.state, "pid": process, "tid": thread,
        "ts": 1e6 * (span.start - origin), "dur": 1e6 * span.seconds, "args": {"layer": span.layer, **own},
    }  # fmt: skip


def _span_labels(spans: Sequence[Span]) -> list[str]:
    """Return labels of spans: a layer computes attention before its wait, and experts after it."""
    labels: list[str] = []
    last, before, waited = max((span.layer for span in spans), default=0), (-1, -1), False
    for span in spans:
        if span.state == "wait":
            waited = True
            labels.append(f"L{span.layer} experts wait")
        elif span.state != "compute":
            labels.append(f"L{span.layer} {span.state}")
        elif span.layer == last:
            labels.append("output")
        elif waited:
            waited = False
            labels.append(f"L{span.layer} experts")
        else:
            fresh, before = before != (span.step, span.layer), (span.step, span.layer)
            labels.append(f"L{span.layer} attention, router" if fresh else f"L{span.layer} before experts")
    return labels


def _copy_label(copy: Span) -> str:
    return f"L{copy.layer} E{copy.expert} {'miss' if copy.urgent else 'forecast'}"


def _window(name: str, recorder: Recorder, steps: int) -> tuple[list[Span], list[Span], float]:
    """Return spans and copies of the consecutive steps of median duration, shifted to 0, and their duration."""
    bounds = recorder.steps()
    if steps < 1 or len(bounds) < steps:
        raise ExpertcastError(f"steps={steps}, run {name!r} has {len(bounds)} recorded steps: draw 1 to that many")
    windows = [(first[0], last[1]) for first, last in zip(bounds, bounds[steps - 1 :], strict=False)]
    start, end = sorted(windows, key=lambda window: window[1] - window[0])[len(windows) // 2]

    def within(spans: Sequence[Span]) -> list[Span]:
        inside = [span for span in spans if span.end > start and span.start < end]
        return [replace(span, start=span.start - start, end=span.end - start) for span in inside]

    return within(recorder.spans()), within(recorder.copies()), end - start


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
    from matplotlib import colormaps

    if layer >= layers:
        return "#9aa0a6"
    red, green, blue, _ = colormaps["viridis"](0.1 + 0.85 * layer / max(1, layers - 1))
    light = 0.35 * (layer % 2)
    return tuple(value + (1 - value) * light for value in (red, green, blue))


def _legend(figure: Figure, layers: int) -> None:
    from matplotlib.patches import Patch

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
