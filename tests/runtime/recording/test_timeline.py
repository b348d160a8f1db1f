"""The Chrome trace against the trace event format, and the picture by opening it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from benchmarks.steps_picture import draw_steps
from transformers import PreTrainedModel

from expertcast.predictors import ExpertcastError
from expertcast.runtime.offloading import offload
from expertcast.runtime.recording.recorder import Recorder, Span, chrome_trace, write_timeline
from tests.runtime.made import MadeRecorder, record, spans_of

STATES = [
    ("compute", 0, 0.010), ("policy", 0, 0.001), ("forecast", 0, 0.002), ("policy", 0, 0.001), ("compute", 0, 0.001),
    ("wait", 0, 0.020), ("compute", 0, 0.005), ("compute", 1, 0.004),
]  # fmt: skip


@pytest.fixture(scope="module")
def recorders(reference_model: PreTrainedModel, reference_tokenizer: Any) -> dict[str, Recorder]:
    ids = reference_tokenizer("The old man went down to the river and", return_tensors="pt")["input_ids"]
    found = {}
    for name, arguments in (("on demand", {}), ("exact", {"predictor": "next_norm"})):
        recorder = found[name] = Recorder()
        with offload(
            reference_model, slots=64, cache=False, bandwidth=5e7, observers=[recorder], **arguments
        ) as offloaded:
            record(offloaded, ids, 5, recorder)
    return found


def _complete(trace: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X" and all(event[key] == value for key, value in wanted.items())
    ]


def test_hand_made_events() -> None:
    spans = spans_of(STATES, step=3, start=7.0)
    copies = [Span("copy", 0, 7.03, 7.04, -1, False, 5), Span("copy", 1, 7.02, 7.03, -1, True, 5)]
    trace = chrome_trace({"run": MadeRecorder(spans, copies)})
    compute = _complete(trace, tid=1)
    names = "attention, router|policy|forecast|policy|before experts|experts wait|experts"
    assert [event["name"] for event in compute] == [*(f"L0 {name}" for name in names.split("|")), "output"]
    assert [event["cat"] for event in compute] == [state for state, _, _ in STATES]
    assert [event["ts"] for event in compute] == pytest.approx([0, 10e3, 11e3, 13e3, 14e3, 15e3, 35e3, 40e3])
    assert [event["dur"] for event in compute] == pytest.approx([1e6 * seconds for _, _, seconds in STATES])
    assert compute[-1]["args"] == {"layer": 1, "step": 3}
    first, second = _complete(trace, tid=2)  # in order of time
    assert (first["name"], first["args"]) == ("L1 E5 miss", {"layer": 1, "expert": 5, "urgent": True})
    assert (second["name"], second["args"]) == ("L0 E5 forecast", {"layer": 0, "expert": 5, "urgent": False})
    assert (first["ts"], first["dur"]) == pytest.approx((20e3, 10e3))


def test_trace_event_format(recorders: dict[str, Recorder], tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    write_timeline(path, recorders)
    trace = json.loads(path.read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    kinds = {"process_name": str, "thread_name": str, "process_sort_index": int, "thread_sort_index": int}
    for event in trace["traceEvents"]:
        assert event["name"]
        assert all(isinstance(event[key], kind) for key, kind in (("name", str), ("pid", int), ("tid", int)))
        if event["ph"] == "M":
            (value,) = event["args"].values()
            assert isinstance(value, kinds[event["name"]])
        else:
            assert event["ph"] == "X"
            assert isinstance(event["cat"], str)
            assert min(event["ts"], event["dur"]) >= 0
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == ["on demand", "exact"]
    rows = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert rows == ["compute", "link"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.json"]


def test_what_the_rows_show(recorders: dict[str, Recorder]) -> None:
    trace = chrome_trace(recorders)
    for process in (1, 2):
        for row in (1, 2):
            events = _complete(trace, pid=process, tid=row)
            for before, after in pairwise(events):
                assert before["ts"] + before["dur"] <= after["ts"] + 0.01  # one thing at a time, in order
        assert min(event["ts"] for event in _complete(trace, pid=process)) == 0
        waits = _complete(trace, pid=process, tid=1, cat="wait")
        assert [event["name"] for event in waits] == [f"L{layer} experts wait" for layer in range(12)] * 4
        assert len(_complete(trace, pid=process, name="output")) == 4
    on_demand, exact = (_complete(trace, pid=process, tid=2) for process in (1, 2))
    assert len(on_demand) == 4 * 12 * 4
    assert all(event["args"]["urgent"] for event in on_demand)
    assert {event["args"]["urgent"] for event in exact} == {True, False}
    assert {event["args"]["layer"] for event in exact} == set(range(12))
    assert all(0 <= event["args"]["expert"] < 64 for event in exact)
    assert len({event["args"]["expert"] for event in exact}) > 20


def test_picture(recorders: dict[str, Recorder], tmp_path: Path) -> None:
    timeline, path = tmp_path / "timeline.json", tmp_path / "timeline.png"
    write_timeline(timeline, recorders)
    draw_steps(timeline, list(recorders), path)
    picture = matplotlib.image.imread(path)
    height, width, _ = picture.shape
    assert width > 1500
    assert height > 400
    colours = {tuple(pixel) for pixel in (picture[::3, ::3, :3] * 15).astype(int).reshape(-1, 3).tolist()}
    assert len(colours) > 20  # layers, forecasts, waits
    upper, lower = picture[: height // 2], picture[height // 2 :]
    orange = [((half[..., :3] - [0.91, 0.53, 0.12]) ** 2).sum(-1) < 0.003 for half in (upper, lower)]
    assert orange[1].sum() > 3 * orange[0].sum()  # forecasts are made below only


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ExpertcastError, match="cannot write"):
        write_timeline(tmp_path / "missing" / "file", {"a": MadeRecorder(spans_of(STATES))})
    assert not list(tmp_path.iterdir())
