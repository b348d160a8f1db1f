"""The router skeleton on disk: norms, routers and what blocks give them come back; the dtype is the model's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.skeleton import load_skeleton, save_skeleton
from tests.families.table import tiny_family


@pytest.mark.parametrize("family", ["qwen2_moe", "minimax_m2"])
def test_a_skeleton_routes_as_its_model(family: str, tmp_path: Path) -> None:
    """The model's configuration names another dtype than that of its weights now; the block of one gives its router a
    bias. `test_all_families` has the others."""
    model = tiny_family(family)
    view = find_moe_layers(model)
    folder = tmp_path / "new" / "skeleton"
    save_skeleton(view, {**json.loads(model.config.to_json_string()), "dtype": "float16"}, folder)
    again = load_skeleton(folder, "where it came from")
    assert (again.model_id, again.shape, again.fingerprint()) == ("where it came from", view.shape, view.fingerprint())
    residual_TD = torch.randn(7, view.shape.hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    for layer, own in zip(again, view, strict=True):
        with torch.no_grad():
            inputs = [each.router_input(residual_TD) for each in (layer, own)]
            for found, expected in zip(layer.routed(inputs[0]), own.routed(inputs[1]), strict=True):
                assert torch.equal(found, expected)
        assert {each.dtype for each in layer.experts.parameters()} == {torch.bfloat16}
        for module in (layer.norm, layer.router):
            assert not module.training
            assert not any(each.requires_grad for each in module.parameters())
