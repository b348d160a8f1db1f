"""A view made of weights against the one found in the model that they come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from expertcast.checkpoints.checkpoint import load_predictor, save_predictor
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError, ModelShape, MoEView, PredictorConfig, predictor_class
from expertcast.predictors.base import RouterState
from expertcast.predictors.view import LinearRouter, RoutingRule, follows_rule, plain_view
from tests.families.models import tiny_model

RULES = {
    "qwen3_moe": RoutingRule(top_k=2),
    "mixtral": RoutingRule(top_k=2),
    "olmoe": RoutingRule(top_k=2, renormalise=False),
    "glm4_moe_lite": RoutingRule(top_k=2, scoring="sigmoid", renormalise=True, scale=1.8),
}


def plain(model: PreTrainedModel, view: MoEView, rule: RoutingRule, norms: bool = True) -> MoEView:
    """The same layers, of copies of the weights."""
    routers = []
    for layer in view:
        weights = layer.router.state_dict()
        weight = next(tensor for name, tensor in weights.items() if name.endswith("weight"))
        computed = layer.router_logits(torch.zeros(1, view.shape.hidden, dtype=layer.dtype)).dtype
        routers.append(
            LinearRouter(weight.to(computed, copy=True), rule, correction_E=weights.get("e_score_correction_bias"))
        )
    own = [layer.norm for layer in view] if norms else None
    return plain_view(view.shape, routers, model_id=str(model.config._name_or_path), norms=own)


@pytest.mark.parametrize("family", RULES)
def test_it_routes_as_the_model_does(family: str) -> None:
    model = tiny_model(family)
    view = find_moe_layers(model)
    made = plain(model, view, RULES[family])
    hidden_TD = torch.randn(64, view.shape.hidden, generator=torch.Generator().manual_seed(1)).to(view[0].dtype)
    for own, layer in zip(view, made, strict=True):
        for found, true in zip(layer.routed(hidden_TD), own.routed(hidden_TD), strict=True):
            torch.testing.assert_close(found.float(), true.float(), rtol=1e-2, atol=1e-2)
        logits_TE, _, ids_TK = layer.routed(hidden_TD)
        assert torch.equal(ids_TK.sort(dim=-1).values, own.routed(hidden_TD)[2].sort(dim=-1).values)
        assert torch.equal(layer.route(logits_TE)[0], ids_TK)
        assert follows_rule(layer, hidden_TD)


def test_its_checkpoints_are_those_of_the_model(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    view = find_moe_layers(model)
    made = plain(model, view, RULES["qwen3_moe"])
    assert made.fingerprint() == view.fingerprint()
    assert made.experts_fingerprint() is None
    predictor = predictor_class("router_input")(PredictorConfig(), view.shape).bind(view)
    save_predictor(predictor, tmp_path / "checkpoint", view=view)
    loaded = load_predictor(tmp_path / "checkpoint", made)
    hidden_TD = torch.randn(5, view.shape.hidden).to(view[0].dtype)
    logits_TE, weights_TK, ids_TK = view[0].routed(hidden_TD)
    state = RouterState(
        layer=0, residual_TD=hidden_TD, router_input_TD=hidden_TD, logits_TE=logits_TE, topk_ids_TK=ids_TK,
        topk_weights_TK=weights_TK,
    )  # fmt: skip
    assert torch.equal(loaded.forecast(state, 1).topk_ids_TK, predictor.forecast(state, 1).topk_ids_TK)
    other = plain(model, view, RULES["qwen3_moe"])
    with torch.no_grad():
        next(other[1].router.parameters()).add_(1.0)
    with pytest.raises(ExpertcastError):
        load_predictor(tmp_path / "checkpoint", other)


def test_without_norms_the_routers_are_known() -> None:
    model = tiny_model("qwen3_moe")
    view = find_moe_layers(model)
    made = plain(model, view, RULES["qwen3_moe"], norms=False)
    assert made.router_fingerprint() == view.router_fingerprint()
    assert made.fingerprint() != view.fingerprint()
    residual_TD = torch.randn(3, view.shape.hidden).to(made[0].dtype)
    assert torch.equal(made[0].router_input(residual_TD), residual_TD)


def test_groups_leave_experts_out() -> None:
    """Four groups of two; the best two are those with the largest sums, wherever the best expert is."""
    weight_ED = torch.eye(8)
    router = LinearRouter(
        weight_ED, RoutingRule(top_k=3, scoring="sigmoid", groups=4, groups_used=2, renormalise=False)
    )
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.7, 0.2, 0.2, 0.8, 0.3]])
    _, weights_TK, ids_TK = router(scores.logit())
    assert ids_TK.tolist() == [[6, 3, 2]]
    torch.testing.assert_close(weights_TK, torch.tensor([[0.8, 0.7, 0.6]]))


def test_what_does_not_fit_is_refused() -> None:
    shape = ModelShape(layers=2, experts=4, top_k=1, hidden=6)
    router = LinearRouter(torch.zeros(4, 6), RoutingRule(top_k=1))
    with pytest.raises(ExpertcastError, match="1 routers for 2 MoE layers"):
        plain_view(shape, [router], model_id="m")
    with pytest.raises(ExpertcastError, match=r"router 1 has weights of \[\(2, 6\)\]"):
        plain_view(shape, [router, LinearRouter(torch.zeros(2, 6), RoutingRule(top_k=1))], model_id="m")
