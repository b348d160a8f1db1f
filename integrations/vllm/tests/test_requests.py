"""Rows of previous tokens and traces belong to the right requests while requests come, go and move."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expertcast_vllm import observer, offload
from expertcast_vllm.observer import PreviousTokens, TrafficCollector
from expertcast_vllm.step import Part, Requests
from expertcast_vllm.traffic import LiveOptions, LiveTraces

from expertcast.data.batch import RouterCall, TraceBatch
from expertcast.data.trace_format import read_info
from expertcast.data.traces import TraceDataset
from expertcast.predictors.view import ModelShape, MoELayer, MoEView
from expertcast.runtime.recording.recorder import RunStatistics

SHAPE = ModelShape(layers=2, experts=4, top_k=1, hidden=4)
Run = tuple[str, int, int]
"""A request, the position of its first token in a forward pass, and the number of its tokens."""


def running(*runs: Run) -> Requests:
    """Return a forward pass in which each token's id is 1000 x the request's number + its position."""
    parts, ids, rows = [], list[int](), 0
    for request, start, count in runs:
        parts.append(Part(request=request, rows=slice(rows, rows + count), start=start))
        ids += [1000 * int(request) + start + place for place in range(count)]
        rows += count
    return Requests(parts=tuple(parts), token_T=torch.tensor(ids))


def call(step: Requests, layer: int) -> RouterCall:
    """Return a router call whose residuals and logits equal the token ids."""
    assert step.token_T is not None
    value_T1 = step.token_T[:, None].float()
    count = len(value_T1)
    logits_TE = value_T1.expand(-1, SHAPE.experts) + layer / 2
    return RouterCall(
        layer=layer, sequences=count, tokens=1, residual_TD=value_T1.expand(-1, SHAPE.hidden),
        router_input_TD=value_T1.expand(-1, SHAPE.hidden), logits_TE=logits_TE, weights_TK=torch.ones(count, 1),
        ids_TK=torch.zeros(count, 1, dtype=torch.long),
    )  # fmt: skip


def test_the_previous_token_is_that_of_the_same_request() -> None:
    previous = PreviousTokens(SHAPE)
    found: list[list[float]] = []
    for runs in (
        [("1", 0, 5), ("2", 0, 3)],
        [("2", 3, 1), ("1", 5, 1)],  # another order
        [("1", 6, 1), ("3", 7, 1)],  # 2 is paused, 3 is new
        [("1", 7, 1), ("2", 4, 1), ("3", 8, 1)],  # 2 goes on
        [("1", 0, 1), ("2", 5, 1), ("3", 7, 1)],  # 1 and 3 run again
    ):
        step = running(*runs)
        previous.start(step)
        for layer in range(SHAPE.layers):
            previous.record(call(step, layer))
        found.append(previous.of(call(step, 0))[:, 1, 0].nan_to_num(-1).tolist())
    assert found[1:] == [[2002.5, 1004.5], [1005.5, -1], [1006.5, -1, 3007.5], [-1, 2004.5, -1]]


def collected(
    folder: Path, steps: Sequence[Sequence[Run]], ended: Sequence[str] = (), **options: Any
) -> list[list[int]]:
    """Return the token ids of the documents that a collector writes; the `ended` requests end before the last forward
    pass.
    """
    made = LiveOptions(tokens=10_000, **options)
    none = torch.nn.Module()
    layers = [
        MoELayer(
            index=index, norm_name="norm", router_name="", experts_name="", decoder=none, block=none,
            norm=torch.nn.RMSNorm(4), router=torch.nn.Linear(4, SHAPE.experts), experts=none,
            num_experts=SHAPE.experts, top_k=SHAPE.top_k, hidden_size=4, has_shared=False,
        )
        for index in range(SHAPE.layers)
    ]  # fmt: skip
    view = MoEView(tuple(layers), model_id="made")
    live = LiveTraces(folder, view, made, config={}, logits=torch.float32, dtype="float32")
    collector = TrafficCollector(live, SHAPE, lambda ids: f"{ids[0]:016x}")
    names = {request for runs in steps for request, _, _ in runs}
    known = {name: SimpleNamespace(prompt_token_ids=[int(name)], sampling_params=None) for name in names}
    for number, runs in enumerate(steps):
        if number == len(steps) - 1:
            known = {name: each for name, each in known.items() if name not in ended}
            collector.ended(known)
        step = running(*runs)
        collector.start(step, known)
        for layer in range(SHAPE.layers):
            collector.record(call(step, layer))
        collector.finish(step)
    collector.close()
    info = read_info(folder)
    assert info is not None
    traces = TraceDataset(folder, info)
    rows = TraceBatch.cat(list(traces.batches("all", 1000)))
    assert rows.token_T is not None
    assert torch.equal(rows.position_T, rows.token_T % 1000)
    values = rows.token_T.float().bfloat16()[:, None, None]
    assert torch.equal(rows.residual_TLD, values.expand_as(rows.residual_TLD))
    assert torch.equal(rows.logits_TLE[:, 1, 0], rows.token_T + 0.5)
    return sorted(rows.token_T[rows.document_T == document.index].tolist() for document in traces.documents)


def ids(request: int, *places: int) -> list[int]:
    return [1000 * request + place for place in places]


def test_a_prompt_in_pieces_and_what_is_generated_make_one_document(tmp_path: Path) -> None:
    steps = [[("1", 0, 2), ("2", 0, 3)], [("1", 2, 2), ("2", 3, 1), ("3", 0, 2)], [("2", 4, 1), ("1", 4, 1)]]
    assert collected(tmp_path / "t", steps) == [ids(1, 0, 1, 2, 3, 4), ids(2, 0, 1, 2, 3, 4), ids(3, 0, 1)]


def test_tokens_that_run_again_are_kept_once(tmp_path: Path) -> None:
    steps = [[("1", 0, 3), ("2", 0, 1), ("3", 0, 1)], [("1", 3, 1)], [("1", 0, 6)], [("1", 6, 1)]]
    assert collected(tmp_path / "t", steps) == [ids(1, *range(7)), ids(2, 0), ids(3, 0)]


def test_what_was_in_the_prefix_cache_is_not_there(tmp_path: Path) -> None:
    steps = [[("1", 16, 2), ("2", 0, 2), ("3", 0, 1)], [("1", 18, 1)]]
    assert collected(tmp_path / "t", steps)[0] == ids(1, 16, 17, 18)


def test_requests_are_cut_and_one_that_ended_is_a_document(tmp_path: Path) -> None:
    steps = [[("1", 0, 3), ("2", 0, 6), ("3", 0, 1)], [("2", 6, 1), ("3", 1, 1)], [("1", 3, 1), ("2", 7, 1)]]
    found = collected(tmp_path / "t", steps, ended=["3"], window=4)
    assert found == [ids(1, *range(4)), ids(2, *range(4)), ids(3, 0, 1)]


def test_what_has_begun_is_collected_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for three requests of eight tokens, and four at once: the fourth is skipped, none is cut."""
    rows = SHAPE.layers * (2 * 4 + 4 * SHAPE.experts) + 12
    monkeypatch.setattr(observer, "MOST_BYTES", 3 * 8 * rows + 7)
    steps = [[(str(name), place, 2) for name in range(1, 5)] for place in range(0, 8, 2)]
    assert collected(tmp_path / "t", steps, window=8) == [ids(name, *range(8)) for name in (1, 2, 3)]


def test_a_run_without_requests_has_no_hit_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list[str]()
    monkeypatch.setattr(offload.logger, "info", lambda line, *values: lines.append(line % values))
    statistics = RunStatistics(2)
    offload._sum_up(statistics)
    statistics.total.requests = statistics.layers[0].requests = 4
    statistics.total.hits = statistics.layers[0].hits = 1
    offload._sum_up(statistics)
    assert ["none of them" in lines[0], "25.0% of them" in lines[1]] == [True, True]
