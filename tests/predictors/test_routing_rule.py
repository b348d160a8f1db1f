"""The routing rule of all layers at once, and of routers that choose by something beside the logits."""

from __future__ import annotations

import pytest
import torch

from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors.routing_rule import goes_by_logits, route_all, weights_over
from tests.families.models import CONFIGS, tiny_model

BY_LOGITS = {"qwen3_moe", "gpt_oss", "olmoe", "mixtral", "qwen2_moe", "phimoe"}
"""The others add a correction bias to the scores, or choose groups of experts first."""


@pytest.mark.parametrize("family", CONFIGS)
def test_all_layers_are_routed_by_their_own_rules(family: str) -> None:
    view = find_moe_layers(tiny_model(family))
    logits_TLE = torch.randn(5, len(view), view.shape.experts, generator=torch.Generator().manual_seed(1))
    ids, weights = route_all(view, logits_TLE)
    assert len(ids) == len(weights) == len(view)
    for layer in view:
        ids_TK, weights_TK = layer.route(logits_TLE[:, layer.index])
        assert torch.equal(ids[layer.index], ids_TK)
        assert torch.equal(weights[layer.index], weights_TK)
    assert len(route_all(view, logits_TLE[:, :1])[0]) == 1


@pytest.mark.parametrize("family", CONFIGS)
def test_which_routers_go_by_their_logits_alone(family: str) -> None:
    assert goes_by_logits(find_moe_layers(tiny_model(family))) == (family in BY_LOGITS)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_routers_own_choice_keeps_its_weights(family: str) -> None:
    """In another order of the ids too, and beside an expert that the router would not have chosen."""
    layer = find_moe_layers(tiny_model(family))[0]
    logits_TE = torch.randn(16, layer.num_experts, generator=torch.Generator().manual_seed(2))
    ids_TK, weights_TK = layer.route(logits_TE)
    assert torch.equal(weights_over(layer, logits_TE, ids_TK), weights_TK)
    torch.testing.assert_close(weights_over(layer, logits_TE, ids_TK.flip(-1)), weights_TK.flip(-1))
