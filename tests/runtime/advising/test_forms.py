"""Forms of experts: sizes as loaded, and the choice by hand-made measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from expertcast.data.inspection import OpenModel
from expertcast.data.packed_experts import weight_bits
from expertcast.data.source import ModelSource
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime import OffloadConfig, load_offloaded
from expertcast.runtime.advising.forms import FormOption, advise_forms, form_sizes
from tests.families.models import tiny_model
from tests.runtime.test_packed_experts import FORMS

MAKERS = {name: make for name, (make, _) in FORMS.items()}


@pytest.mark.parametrize("name", MAKERS)
def test_sizes_are_those_of_the_loaded_model(name: str, tmp_path: Path) -> None:
    path = MAKERS[name](tmp_path)
    with OpenModel(ModelSource.of(path)) as opened:
        packed = next(row for row in form_sizes(opened, 10**5) if row.form == "packed")
    with load_offloaded(path, device="cpu", slots=6, experts="packed") as offloaded:
        assert packed.expert_bytes == offloaded.store.layout.block_bytes
        assert packed.all_experts_bytes == offloaded.store.nbytes
        assert packed.weight_bits == weight_bits(offloaded.view)
        assert packed.slots == min(10**5 // offloaded.store.layout.block_bytes, len(offloaded.store._blocks))


def test_a_form_that_a_model_does_not_have(tmp_path: Path) -> None:
    """8 inner inputs: no group of the kernel divides them; a plain checkpoint has no codes."""
    tiny_model("qwen3_moe", moe_intermediate_size=8).save_pretrained(tmp_path)
    with OpenModel(ModelSource.of(tmp_path)) as opened:
        rows = {row.form: row for row in form_sizes(opened, None)}
    assert list(rows) == ["expanded", "int8", "int4"]
    assert rows["int4"].slots is None
    assert "cannot be packed" in rows["int4"].note
    assert rows["expanded"].slots == 32


def _measured(form: str, tpot_s: float) -> FormOption:
    return FormOption(form=form, weight_bits=4.5, expert_bytes=100, slots=8, tpot_s=tpot_s, hit_rate=0.5)


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"expanded": 1.0, "packed": 0.5}, "packed"),
        ({"expanded": 1.0, "packed": 0.99}, "expanded"),
        ({"expanded": 1.0, "packed": 2.0}, "expanded"),
        ({"expanded": 1.0, "int8": 0.5, "int4": 0.2}, "expanded"),
        ({"int4": 0.2}, "int4"),
    ],
)
def test_the_fastest_form_with_the_same_weights_is_chosen(times: dict[str, float], chosen: str) -> None:
    advice = advise_forms([_measured(form, tpot_s) for form, tpot_s in times.items()])
    assert advice.chosen.form == chosen
    reasons = "\n".join(advice.reasons)
    for form in times:
        assert form == chosen or f"{form} would take" in reasons
    if chosen == "expanded" and "int4" in times:
        assert "80% less, but is rounded, which changes the model's output (--experts int4)" in reasons
    assert advice.text().count("\n") > len(times)


def test_a_form_that_does_not_fit_is_named_with_the_reason() -> None:
    advice = advise_forms([FormOption(form="expanded", note="needs 9 bytes"), _measured("packed", 1.0)])
    assert advice.chosen.form == "packed"
    assert advice.reasons == ["expanded cannot be tried: needs 9 bytes"]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"draft": "int4"}, "no cheaper"),
        ({"draft": "cascade"}, "no cheaper"),
        ({"policies": "specmd_3"}, "miss 'cascade' keeps copies in fewer bits, no smaller than experts='packed'"),
    ],
)
def test_fewer_bits_than_packed_are_refused_before_loading(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ExpertcastError, match=match):
        OffloadConfig(experts="packed", **fields)
    OffloadConfig(experts="auto", **fields)  # known once the checkpoint is open
    OffloadConfig(experts="packed", draft="resident")
