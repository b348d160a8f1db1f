"""Combine weights that a layer's own rule gives to experts it did not choose.

T tokens, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from expertcast.predictors.view import MoELayer

_SAME_SUM = 0.02
"""Sums of bf16 weights may differ by so much."""


def weights_over(layer: MoELayer, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Combine weights [T, K] that the layer's own rule gives to given experts under given logits.

    The router runs with its last choice, `topk` over the E scores, answered by `ids_TK`: scores are gathered and
    renormalised (or not) by the router's own lines. A rule that chooses without such a topk (sparsemixer) runs
    over logits that are minus infinity outside `ids_TK`.
    """
    answer = _AnswerTopk(layer.num_experts, ids_TK)
    with answer:
        routed_TK, weights_TK = layer.route(logits_TE)
    if not answer.answered:
        outside = torch.ones_like(logits_TE, dtype=torch.bool).scatter(-1, ids_TK, False)
        routed_TK, weights_TK = layer.route(logits_TE.masked_fill(outside, float("-inf")))
        order = (routed_TK.unsqueeze(-2) == ids_TK.unsqueeze(-1)).int().argmax(dim=-1)
        weights_TK = weights_TK.gather(-1, order)
    return weights_TK


def renormalises(layer: MoELayer) -> bool:
    """Whether the layer's rule makes a token's K weights sum to a constant, whatever the logits are."""
    weight = next(layer.router.parameters())
    steep_E = torch.linspace(-2.0, 2.0, layer.num_experts, device=weight.device)
    logits_2E = torch.stack([torch.zeros_like(steep_E), steep_E])
    _, weights_2K = layer.route(logits_2E)
    flat, steep = weights_2K.float().sum(dim=-1).tolist()
    return bool(abs(flat - steep) < _SAME_SUM * abs(flat))


class _AnswerTopk(TorchFunctionMode):
    """Answers `topk(scores [T, E], K)` with given ids and their scores, and the choice of groups before it."""

    def __init__(self, experts: int, ids_TK: Tensor) -> None:
        super().__init__()
        self._experts = experts
        self._ids_TK = ids_TK
        self.answered = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk) or args[0].dim() != 2:
            return func(*args, **kwargs)
        scores, count = args[0], args[1] if len(args) > 1 else kwargs["k"]
        chosen = None
        if scores.shape[1] == self._experts and count == self._ids_TK.shape[1]:
            self.answered = True
            chosen = self._ids_TK
        elif self._experts % scores.shape[1] == 0:
            # groups are chosen first: those of the given ids, for the others' experts are masked out
            group_TK = self._ids_TK // (self._experts // scores.shape[1])
            chosen = torch.zeros_like(scores).scatter(-1, group_TK, 1.0).topk(count).indices
        if chosen is None:
            return func(*args, **kwargs)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
