"""Timelines of recorded runs as Chrome traces.

A trace opens in Perfetto (ui.perfetto.dev) or chrome://tracing. Each run is a process that starts at 0, with one row
for the compute stream and one for the link.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path

from expertcast.predictors.artefacts import write_user_file
from expertcast.predictors.messages import Json
from expertcast.runtime.recording.recorder import Recorder, Span

COMPUTE, LINK = 1, 2
"""Thread ids of the rows."""
_ROW_NAMES = {COMPUTE: "compute", LINK: "link"}


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
