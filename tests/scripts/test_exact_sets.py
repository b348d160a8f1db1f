"""Hard, soft and no match of a draft's routing, by hand and on the bundled model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from expertcast.data.text import bundled_ids
from expertcast.predictors import ExpertcastError, MoEView
from expertcast.runtime.drafts.quantised import CALIBRATED, Calibration, QuantisedExperts
from tests.runtime.drafts.by_hand import resident_views

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def test_by_hand() -> None:
    """Four tokens, two layers, K = 2. Layer 0: same; other order; one of two; none. Layer 1: same, same, same, other
    order."""
    from draft_sides.exact_sets import exact_sets

    exact = torch.tensor([[[1, 2], [5, 6]], [[3, 4], [5, 6]], [[1, 2], [0, 7]], [[1, 2], [7, 0]]])
    draft = torch.tensor([[[1, 2], [5, 6]], [[4, 3], [5, 6]], [[1, 3], [0, 7]], [[5, 6], [0, 7]]])
    found = exact_sets(draft, exact)
    assert (found.hard, found.soft) == ([0.25, 0.75], [0.25, 0.25])
    assert found.exact == [0.5, 1.0]
    assert found.recall == [0.625, 1.0]  # (1 + 1 + 1/2 + 0) / 4
    assert found.as_dict() == {"hard": 0.5, "soft": 0.25, "exact": 0.75, "recall": 0.8125, "mismatch": 0.25}


def test_what_is_refused() -> None:
    from draft_sides.exact_sets import exact_sets

    ids = torch.zeros(3, 2, 2, dtype=torch.int64)
    with pytest.raises(ExpertcastError, match=r"\(3, 2, 2\) and \(2, 2, 2\) cannot be compared: run"):
        exact_sets(ids, ids[1:])
    with pytest.raises(ExpertcastError, match="cannot be compared"):
        exact_sets(ids[:0], ids[:0])


def test_drafts_of_the_bundled_model(
    reference_model: PreTrainedModel, reference_view: MoEView, reference_tokenizer: Any
) -> None:
    """More bits agree more often, calibrated ones more often than rounded ones; the model is as it was. The first
    layer's router has no expert before it."""
    from draft_sides.exact_sets import compare_draft, drafting

    ids = torch.tensor(bundled_ids(reference_tokenizer, 3072)).view(-1, 256)
    calibration = Calibration.of(reference_model, reference_view, ids[:8])
    weights, before = resident_views(reference_view), reference_model(input_ids=ids[:1]).logits
    exact, first = {}, {}
    for name in ("int8", CALIBRATED, "int4"):
        quantised = QuantisedExperts.of(reference_view, weights, name, calibration=calibration)
        sets, first[name] = compare_draft(reference_model, reference_view, quantised, ids[8:])
        assert sets.exact[0] == 1.0
        exact[name] = sets.as_dict()["exact"]
    assert list(exact) == sorted(exact, key=lambda name: -exact[name])
    assert exact["int8"] > 0.97 > exact[CALIBRATED] > exact["int4"] + 0.005
    assert exact["int4"] > 0.88
    assert first["int8"] > first["int4"] > 0.92
    assert torch.equal(reference_model(input_ids=ids[:1]).logits, before)
    with drafting(reference_model, reference_view, quantised):
        drafted = reference_model(input_ids=ids[:1]).logits
    assert not torch.equal(drafted, before)
    assert float((drafted.argmax(-1) == before.argmax(-1)).float().mean()) > 0.9
