"""The view of a model whose modules are not at hand as `transformers` makes them: from routers' and norms' weights.

An engine that runs a model in modules of its own gives its routers and norms here; predictors, their checkpoints and
the runtime stand on that as on any other view. Weights that are those of the `transformers` model, by the same names,
have its fingerprint. T tokens, D hidden size, E routed experts per layer, K experts per token, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import ModelShape, MoELayer, MoEView


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """How scores are made of a router's logits, experts chosen by them, and combine weights made of those."""

    top_k: int
    """K"""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Of the logits, in float32."""
    renormalise: bool = True
    """A token's K weights sum to 1, before they are scaled."""
    scale: float = 1.0
    """What weights are multiplied by."""
    groups: int = 1
    """G: experts are chosen among those of the best groups, each rated by the sum of its two best."""
    groups_used: int = 1


class LinearRouter(nn.Module):
    """A linear map and a rule: what it returns is what a router of a `transformers` model does.

    Args:
        weight_ED: of the linear map, in the dtype that it is computed in.
        rule: what is made of its logits.
        bias_E: of the linear map.
        correction_E: added to the scores where experts are chosen, not where they are weighted.
    """

    e_score_correction_bias: Tensor | None

    def __init__(
        self, weight_ED: Tensor, rule: RoutingRule, *, bias_E: Tensor | None = None, correction_E: Tensor | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_ED, requires_grad=False)
        self.bias = None if bias_E is None else nn.Parameter(bias_E, requires_grad=False)
        self.register_buffer("e_score_correction_bias", correction_E)
        self.rule = rule

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, E], combine weights (float32) and ids (int64) [T, K]."""
        logits_TE = F.linear(hidden_TD.to(self.weight.dtype), self.weight, self.bias)
        rule, logits = self.rule, logits_TE.float()
        scores_TE = logits.softmax(dim=-1) if rule.scoring == "softmax" else logits.sigmoid()
        chosen_by = scores_TE if self.e_score_correction_bias is None else scores_TE + self.e_score_correction_bias
        ids_TK = self._of_best_groups(chosen_by).topk(rule.top_k, dim=-1).indices
        weights_TK = scores_TE.gather(-1, ids_TK)
        if rule.renormalise:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + torch.finfo(torch.float32).tiny)
        return logits_TE, weights_TK * rule.scale, ids_TK

    def _of_best_groups(self, scores_TE: Tensor) -> Tensor:
        """The scores of experts in groups that are used; minus infinity for others."""
        rule = self.rule
        if rule.groups == rule.groups_used:
            return scores_TE
        scores_TGe = scores_TE.view(len(scores_TE), rule.groups, -1)
        best_TG = scores_TGe.topk(2, dim=-1).values.sum(dim=-1).topk(rule.groups_used, dim=-1).indices
        left_out_TG = torch.ones_like(scores_TGe[..., 0], dtype=torch.bool).scatter(-1, best_TG, False)
        return scores_TGe.masked_fill(left_out_TG.unsqueeze(-1), float("-inf")).view(scores_TE.shape)


def plain_view(
    shape: ModelShape,
    routers: Sequence[nn.Module],
    *,
    model_id: str,
    norms: Sequence[nn.Module] | None = None,
    experts: Sequence[nn.Module] | None = None,
    has_shared: bool = False,
) -> MoEView:
    """The view of a model's MoE layers, each made of what is given.

    Args:
        shape: of the model.
        routers: called with [T, D], each returns logits [T, E], combine weights and ids [T, K]; its logits are what its
            one linear map (`torch.nn.functional.linear`) gives, as :class:`LinearRouter`'s are.
        model_id: hub id or path that it comes from.
        norms: before the routers, called with the residual [T, D]. None: the residual is not known, what routers read
            stands for it, and :meth:`MoEView.fingerprint` is not that of the model: `router_fingerprint` may be.
        experts: modules whose parameters become an engine's slots; none are empty ones.
        has_shared: whether shared experts add to a layer's output.

    Raises:
        ExpertcastError: not one module for each layer, or a router whose weight is not [E, D].
    """
    for kind, modules in (("routers", routers), ("norms", norms), ("experts", experts)):
        if modules is not None and len(modules) != shape.layers:
            raise ExpertcastError(f"{len(modules)} {kind} for {shape.layers} MoE layers: give one for each")
    for index, router in enumerate(routers):
        sizes = [tuple(weight.shape) for weight in router.parameters()]
        if (shape.experts, shape.hidden) not in sizes:
            raise ExpertcastError(
                f"router {index} has weights of {sizes}, none of (experts, hidden size) = "
                f"{(shape.experts, shape.hidden)}: give it whole, or the model's own shape"
            )
    layers = []
    for index, router in enumerate(routers):
        name = f"layers.{index}"
        layers.append(
            MoELayer(
                index=index,
                block_name=name,
                norm_name="" if norms is None else f"{name}.norm",
                router_name=f"{name}.router",
                experts_name=f"{name}.experts",
                decoder=nn.Module(),
                block=nn.Module(),
                norm=nn.Identity() if norms is None else norms[index],
                router=router,
                experts=nn.Module() if experts is None else experts[index],
                num_experts=shape.experts,
                top_k=shape.top_k,
                hidden_size=shape.hidden,
                has_shared=has_shared,
            )
        )
    return MoEView(tuple(layers), model_id=model_id)
