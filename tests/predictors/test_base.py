"""What every predictor and forecast can do, and the text tables that results are printed in."""

from __future__ import annotations

import pytest
import torch

from expertcast.predictors import ExpertcastError, Forecast, ModelShape
from expertcast.predictors.base import PredictorConfig
from expertcast.predictors.baselines import Frequency
from expertcast.predictors.messages import aligned

TENSORS = ("logits_TE", "topk_ids_TK", "topk_weights_TK")


def made(tokens: int, first: int) -> Forecast:
    """A forecast whose numbers tell the token that they are of."""
    row_T1 = torch.arange(first, first + tokens)[:, None]
    return Forecast(
        layer=3, logits_TE=row_T1 + torch.arange(8) / 8, topk_ids_TK=row_T1.repeat(1, 2), topk_weights_TK=row_T1 / 2
    )


def same(one: Forecast, other: Forecast) -> bool:
    return one.layer == other.layer and all(torch.equal(getattr(one, name), getattr(other, name)) for name in TENSORS)


def test_forecasts_are_joined_and_sliced() -> None:
    whole = made(6, 0)
    assert same(Forecast.join([made(1, 0), made(3, 1), made(2, 4)]), whole)
    assert same(whole[1:4], made(3, 1))
    assert same(whole[torch.tensor([4, 5])], made(2, 4))


def test_a_distance_it_was_not_made_for_is_refused() -> None:
    shape = ModelShape(layers=4, experts=8, top_k=2, hidden=4)
    predictor = Frequency(PredictorConfig(ahead=(2, 1)), shape)
    for ahead in (1, 2):
        predictor.check_ahead(ahead)
    for ahead in (0, 3):
        with pytest.raises(ExpertcastError, match=rf"frequency looks \[1, 2\] layers ahead, not {ahead}: give one of"):
            predictor.check_ahead(ahead)


def test_tables() -> None:
    rows = [["run", "ms", "mode"], ["lru", "12.5", "a"], ["belady", "3", ""]]
    assert aligned(rows).splitlines() == ["run       ms  mode", "lru     12.5     a", "belady     3"]
    assert aligned(rows, left=3).splitlines() == ["run     ms    mode", "lru     12.5  a", "belady  3"]
