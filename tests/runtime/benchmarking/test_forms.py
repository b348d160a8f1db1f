"""Forms of experts: sizes as loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from expertcast import OffloadConfig, load_offloaded
from expertcast.data.inspection import OpenModel
from expertcast.data.packed_experts import weight_bits
from expertcast.data.source import ModelSource
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.benchmarking.forms import form_sizes
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
