"""Trace datasets as forwards: order, unions, and forecasts as the predictor makes them from each token's state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError
from expertcast.runtime.forecasters import resolve_predictor
from expertcast.runtime.policies import Policies
from expertcast.runtime.simulation.trace import FEW_IDS, Hints, SequenceSelection, Trace, load_trace, request_order
from tests.runtime.simulation import made


def rows_of(trace: Trace) -> list[list[int]]:
    count = len(trace.require_routes().ids[0])
    return [torch.arange(count)[forward.rows].tolist() for forward in trace.forwards]


def test_documents_follow_each_other() -> None:
    """Documents of 5, 1 and 3 tokens, two prefilled at most: half of the third is one, the second has no step."""
    trace = made.trace([[[0]]] * 9, experts=2, documents=[5, 1, 3], prefill=2)
    assert rows_of(trace) == [[0, 1], [2], [3], [4], [6], [7], [8]]
    assert [forward.fresh for forward in trace.forwards] == [True, False, False, False, True, False, False]
    assert trace.steps == 5


def test_batches_step_until_the_shortest_ends() -> None:
    """Documents of 4, 5, 3, 4 and 9 tokens, two at a time: the fifth has no partner."""
    trace = made.trace([[[0]]] * 25, experts=2, documents=[4, 5, 3, 4, 9], batch=2)
    assert rows_of(trace) == [[0, 4], [1, 5], [2, 6], [3, 7], [9, 12], [10, 13], [11, 14]]


def test_keys_are_a_union_in_the_runtimes_order() -> None:
    """Few ids come in the routers' order, many in that of their numbers; keys of layer 1 begin at E = 4."""
    trace = made.trace([[[3, 1], [2, 0]], [[1, 0], [3, 1]]], experts=4, documents=[2], prefill=1)
    assert [forward.keys for forward in trace.forwards] == [[[3, 1], [6, 4]], [[1, 0], [7, 5]]]
    both = made.trace([[[3, 1], [2, 0]], [[1, 0], [3, 2]], [[0, 1], [0, 1]], [[0, 1], [0, 1]]], experts=4, prefill=2)
    assert both.forwards[0].keys == [[3, 1, 0], [6, 4, 7]]
    assert request_order([2, 1] * (FEW_IDS // 2)) == [2, 1]
    assert request_order([2, 1] * (FEW_IDS // 2) + [0]) == [0, 1, 2]


def test_of_a_trace_dataset(reference_traces: TraceDataset) -> None:
    view = reference_traces.view
    predictor, _ = resolve_predictor("next_norm", view)
    assert predictor is not None
    trace = load_trace(reference_traces, SequenceSelection(tokens=300, prefill=16), predictors={"next_norm": predictor})
    hints, routes = trace.hints["next_norm"], trace.require_routes()
    assert isinstance(hints, Hints)
    (batch,) = list(reference_traces.batches("test", 300, max_tokens=300))
    for layer in (0, 7):
        ids_TK, weights_TK = view[layer].route(batch.logits_TLE[:, layer])
        assert torch.equal(routes.ids[layer], ids_TK)
        assert torch.equal(routes.weights[layer], weights_TK)
        step = trace.forwards[5]
        assert isinstance(step.rows, slice)
        assert step.keys[layer] == (layer * 64 + ids_TK[step.rows.start]).tolist()
        expected = predictor.forecast(batch.state(view, layer))
        assert torch.equal(hints.forecasts[layer + 1].logits_TE, expected.logits_TE)
        assert torch.equal(hints.forecasts[layer + 1].topk_ids_TK, expected.topk_ids_TK)
    assert list(hints.forecasts) == list(range(1, 12))


def test_keys_alone_serve_policies_that_look_at_keys() -> None:
    trace = made.random_trace(1)
    seen = replace(trace, routes=None)
    for policies in (Policies(), Policies(eviction="lfu", scope="layer")):
        alone, whole = (made.simulate(each, policies, 9, made.machine(3)) for each in (seen, trace))
        assert (alone.steps_s, alone.decode.layers) == (whole.steps_s, whole.decode.layers)
    for policies in (Policies(eviction="score"), Policies(miss="drop"), Policies(routing="cache_aware")):
        with pytest.raises(ExpertcastError, match="holds no router logits"):
            made.simulate(seen, policies, 9, made.machine(3))


def test_refuses_in_one_line(reference_traces: TraceDataset) -> None:
    predictor, _ = resolve_predictor("next_norm", reference_traces.view)
    assert predictor is not None
    with pytest.raises(ExpertcastError, match="prefill=0: must be greater than or equal to 1"):
        load_trace(reference_traces, SequenceSelection(prefill=0))
    with pytest.raises(ExpertcastError, match="batch=99: there are not so many documents"):
        load_trace(reference_traces, SequenceSelection(batch=99))
    with pytest.raises(ExpertcastError, match="unknown split 'dev': choose from train, validation, test, all"):
        load_trace(reference_traces, SequenceSelection(split="dev"))
    with pytest.raises(ExpertcastError, match=r"next_norm forecasts .* not 2"):
        load_trace(reference_traces, predictors={"next_norm": predictor}, ahead=2)
