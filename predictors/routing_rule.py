"""The routing rule: how a layer's own router turns logits into expert ids and combine weights.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
The rule is never written down here: the router module itself runs, and is answered in place of its linear map (with
the given logits) and, where ids are given, in place of its last choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from expertcast.predictors.view import MoELayer, MoEView

_PROBES = 64
"""Random routings that show whether a router goes by its logits alone."""
_SAME_SUM = 0.02
"""Sums of bf16 weights may differ by so much."""


def route(layer: MoELayer, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Expert ids [T, K] (int64) and combine weights [T, K] that the layer's router would return with these logits."""
    return _run(layer, _Answers(layer, logits_TE))


def route_all(view: MoEView, logits_TLE: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Expert ids and combine weights [T, K] by each layer's own rule; logits are of all layers or the first ones."""
    routed = [route(view[layer], logits_TE) for layer, logits_TE in enumerate(logits_TLE.unbind(1))]
    return [ids_TK for ids_TK, _ in routed], [weights_TK for _, weights_TK in routed]


def weights_over(layer: MoELayer, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Combine weights [T, K] that the layer's own rule gives to given experts under given logits.

    The router runs with its last choice, `topk` over the E scores, answered by `ids_TK`: scores are gathered and
    renormalised (or not) by the router's own lines. A rule that chooses without such a topk (sparsemixer) runs
    over logits that are minus infinity outside `ids_TK`.
    """
    answers = _Answers(layer, logits_TE, ids_TK)
    routed_TK, weights_TK = _run(layer, answers)
    if not answers.chose:
        outside = torch.ones_like(logits_TE, dtype=torch.bool).scatter(-1, ids_TK, False)
        routed_TK, weights_TK = route(layer, logits_TE.masked_fill(outside, float("-inf")))
        order = (routed_TK.unsqueeze(-2) == ids_TK.unsqueeze(-1)).int().argmax(dim=-1)
        weights_TK = weights_TK.gather(-1, order)
    return weights_TK


def renormalises(layer: MoELayer) -> bool:
    """Whether the layer's rule makes a token's K weights sum to a constant, whatever the logits are."""
    weight = next(layer.router.parameters())
    steep_E = torch.linspace(-2.0, 2.0, layer.num_experts, device=weight.device)
    _, weights_2K = route(layer, torch.stack([torch.zeros_like(steep_E), steep_E]))
    flat, steep = weights_2K.float().sum(dim=-1).tolist()
    return bool(abs(flat - steep) < _SAME_SUM * abs(flat))


def goes_by_logits(view: MoEView) -> bool:
    """Whether every router simply takes the experts with the highest logits: found out on random ones.

    The logits of a probe lie on a grid about 0, so that no two of them become equal in bf16.
    """
    generator = torch.Generator().manual_seed(0)
    experts, top_k = view.shape.experts, view.shape.top_k
    order_TE = torch.stack([torch.randperm(experts, generator=generator) for _ in range(_PROBES)])
    logits_TE = (order_TE - experts // 2) * 2.0 ** -max(0, experts.bit_length() - 4)
    best_TK = logits_TE.topk(top_k, dim=-1).indices.sort(dim=1).values
    for layer in view:
        weight = next(layer.router.parameters())
        ids_TK, _ = route(layer, logits_TE.to(weight.device, weight.dtype))
        if not torch.equal(ids_TK.sort(dim=1).values.cpu(), best_TK):
            return False
    return True


class _Answers(TorchFunctionMode):
    """Answers a router's linear map (`F.linear` against an [E, D] weight) with given logits, and its choice
    (`topk(scores [T, E], K)`, and one of groups of experts before it) with given ids; everything else runs."""

    def __init__(self, layer: MoELayer, logits_TE: Tensor, ids_TK: Tensor | None = None) -> None:
        super().__init__()
        self.weight_ED, self.logits_TE = _linear_weight(layer), logits_TE
        self._ids_TK = ids_TK
        self.chose = False
        """Whether the ids have been answered."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is functional.linear and args[1].shape == self.weight_ED.shape:
            return self.logits_TE.to(dtype=args[0].dtype, device=args[0].device)
        if self._ids_TK is not None and func in (torch.topk, Tensor.topk) and args[0].dim() == 2:
            chosen = self._choice(self._ids_TK, args[0], args[1] if len(args) > 1 else kwargs["k"])
            if chosen is not None:
                return torch.return_types.topk((args[0].gather(-1, chosen), chosen))
        return func(*args, **kwargs)

    def _choice(self, ids_TK: Tensor, scores: Tensor, count: int) -> Tensor | None:
        experts = len(self.weight_ED)
        if scores.shape[1] == experts and count == ids_TK.shape[1]:
            self.chose = True
            return ids_TK
        if experts % scores.shape[1]:
            return None
        # groups are chosen first: those of the given ids, for the others' experts are masked out
        group_TK = ids_TK // (experts // scores.shape[1])
        return torch.zeros_like(scores).scatter(-1, group_TK, 1.0).topk(count).indices


@torch.no_grad()
def _run(layer: MoELayer, answers: _Answers) -> tuple[Tensor, Tensor]:
    """What the router returns, given answers in place of what it would work out from its input."""
    placeholder_TD = answers.weight_ED.new_zeros(1, 1).expand(len(answers.logits_TE), layer.hidden_size)
    with answers:
        _, weights_TK, ids_TK = layer.router(placeholder_TD)
    return ids_TK, weights_TK


def _linear_weight(layer: MoELayer) -> Tensor:
    for parameter in layer.router.parameters():
        if parameter.shape == (layer.num_experts, layer.hidden_size):
            return parameter
    raise AssertionError(f"{type(layer.router).__name__} holds no [E, D] weight; discovery should have refused it")
