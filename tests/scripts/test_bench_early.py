"""Recall of forecasts made from forecasts, with the model at hand."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from expertcast.data.taps import RouterTaps
from expertcast.predictors import MoEView
from expertcast.predictors.baselines import PreviousToken

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@torch.no_grad()
def test_what_a_forecast_reads_of_the_token_before_is_its_own_windows(
    reference_model: PreTrainedModel, reference_view: MoEView
) -> None:
    """The first token of a window has none before it: its forecast is by counts, here for the experts 0 to 3."""
    from bench_early import chained_recall

    windows_NW = torch.randint(3, 4096, (3, 9), generator=torch.Generator().manual_seed(0))
    predictor = PreviousToken(PreviousToken.config_class(), reference_view.shape)
    predictor.count_LE[:, : reference_view.shape.top_k] = 1
    predictor.bind(reference_view)
    found = chained_recall(reference_model, reference_view, windows_NW, {"previous": predictor}, batch_size=2)
    hits: list[list[float]] = [[] for _ in reference_view]
    chosen: list[list[list[int]]] = []
    for ids_W in windows_NW:
        chosen.clear()
        with closing(RouterTaps(reference_model, reference_view, lambda call: chosen.append(call.ids_TK.tolist()))):
            reference_model.base_model(input_ids=ids_W[None], use_cache=False)
        for layer, rows in enumerate(chosen):
            for before, row in zip([list(range(len(rows[0]))), *rows], rows, strict=False):
                hits[layer].append(len(set(before) & set(row)) / len(row))
    expected = [sum(each) / len(each) for each in hits[1:]]
    assert found == {"previous": pytest.approx(expected, abs=0.02)}  # a batch may turn a close choice
    assert len(expected) == len(reference_view) - 1
