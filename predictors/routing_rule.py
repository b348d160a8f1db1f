"""Routing rule: how a layer's own router turns logits into expert ids and combine weights.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
The rule is not reimplemented. The router module runs under a `TorchFunctionMode` that replaces the result of the
operation that produces its logits, and on request the result of its final `topk`. Operations before the logits (a
multiplier, a soft cap, a softmax) are part of the logits, not of the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from expertcast.predictors.messages import ExpertcastError

if TYPE_CHECKING:
    from expertcast.predictors.view import MoELayer, MoEView

_PROBES = 64
"""Random routings that test whether a router depends on its logits alone."""
_SAME_SUM = 0.02
"""Relative tolerance for sums of bf16 weights."""


def route(layer: MoELayer, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids [T, K] (int64) and combine weights [T, K] that the layer's router returns for these logits."""
    return _run(layer, _Answers(layer, logits_TE))


def route_all(view: MoEView, logits_TLE: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return ids and combine weights [T, K] of each layer by its own rule, for logits of the first layers or all."""
    routed = [route(view[layer], logits_TE) for layer, logits_TE in enumerate(logits_TLE.unbind(1))]
    return [ids_TK for ids_TK, _ in routed], [weights_TK for _, weights_TK in routed]


def weights_over(layer: MoELayer, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Return the combine weights [T, K] that the layer's own rule assigns to fixed experts under given logits.

    The router runs with the result of its final `topk` over E scores replaced by `ids_TK`, so its own code gathers and
    renormalises the scores. A rule without such a topk (sparsemixer) runs on logits that are minus infinity outside
    `ids_TK`.
    """
    answers = _Answers(layer, logits_TE, ids_TK)
    routed_TK, weights_TK = _run(layer, answers)
    if not answers.chose:
        outside = torch.ones_like(logits_TE, dtype=torch.bool).scatter(1, ids_TK, False)
        routed_TK, weights_TK = route(layer, logits_TE.masked_fill(outside, float("-inf")))
        order = (routed_TK.unsqueeze(-2) == ids_TK.unsqueeze(-1)).int().argmax(dim=-1)
        weights_TK = weights_TK.gather(1, order)
    return weights_TK


def renormalises(layer: MoELayer) -> bool:
    """Return whether a token's K weights sum to a constant under the layer's rule, whatever the logits."""
    steep_E = torch.linspace(-2.0, 2.0, layer.num_experts)
    _, weights_2K = route(layer, torch.stack([torch.zeros_like(steep_E), steep_E]))
    flat, steep = weights_2K.float().sum(dim=-1).tolist()
    return bool(abs(flat - steep) < _SAME_SUM * abs(flat))


def routes_by_logits(view: MoEView) -> bool:
    """Return whether every router takes the K experts with the highest logits, tested on random logits.

    The test logits lie on a grid around 0 that bf16 represents without ties.
    """
    generator = torch.Generator().manual_seed(0)
    experts, top_k = view.shape.experts, view.shape.top_k
    order_TE = torch.stack([torch.randperm(experts, generator=generator) for _ in range(_PROBES)])
    logits_TE = (order_TE - experts // 2) * 2.0 ** -max(0, experts.bit_length() - 4)
    best_TK = logits_TE.topk(top_k).indices.sort(dim=1).values
    for layer in view:
        ids_TK, _ = route(layer, logits_TE)
        if not torch.equal(ids_TK.sort(dim=1).values.cpu(), best_TK):
            return False
    return True


class _Watched(TorchFunctionMode):
    """Records the result of every operation, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[object] = []

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        result = func(*args, **kwargs or {})
        self.results.append(result)
        return result


class _Answers(TorchFunctionMode):
    """Replaces the result of the operation that produces a router's logits, and optionally the ids of its `topk`.

    If the router first chooses groups of experts, that `topk` returns the groups of the ids. All else runs unchanged.
    """

    def __init__(self, layer: MoELayer, logits_TE: Tensor, ids_TK: Tensor | None = None) -> None:
        super().__init__()
        self._made = _logits_of(layer)
        self.logits_TE, self._experts = logits_TE, layer.num_experts
        self._ids_TK = ids_TK
        self._left = self._made.number
        """Operations left before the one whose result is replaced."""
        self.chose = False
        """Whether a `topk` has returned the ids."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        self._left -= 1
        if self._left == -1:
            return self.logits_TE.to(dtype=self._made.dtype, device=self._made.device)
        if self._ids_TK is not None and func in (torch.topk, Tensor.topk) and args[0].dim() == 2:
            chosen = self._choice(self._ids_TK, args[0], args[1] if len(args) > 1 else kwargs["k"])
            if chosen is not None:
                return torch.return_types.topk((args[0].gather(1, chosen), chosen))
        return func(*args, **kwargs)

    def _choice(self, ids_TK: Tensor, scores: Tensor, count: int) -> Tensor | None:
        experts = self._experts
        if scores.shape[1] == experts and count == ids_TK.shape[1]:
            self.chose = True
            return ids_TK
        if experts % scores.shape[1]:
            return None
        # the router chooses groups first: choose the groups of the ids, as it masks the experts of other groups
        group_TK = ids_TK // (experts // scores.shape[1])
        return torch.zeros_like(scores).scatter(1, group_TK, 1.0).topk(count).indices


@dataclass(frozen=True, slots=True)
class _MadeLogits:
    """Identifies the operation of a router that produces its logits."""

    number: int
    """Index of the operation."""
    dtype: torch.dtype
    device: torch.device


_MADE: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], _MadeLogits]] = WeakKeyDictionary()


def _logits_of(layer: MoELayer) -> _MadeLogits:
    # cached until the router's device or dtype changes
    weight = next(layer.router.parameters())
    placeholder_1D = _placeholder(layer, 1)
    key = (weight.device, weight.dtype, placeholder_1D.dtype, layer.router.training)
    known = _MADE.setdefault(layer.router, {})
    if key not in known:
        tracing = torch._C._get_tracing_state()
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]  # keep this run out of a trace being recorded
        try:
            with torch.no_grad(), _Watched() as watched:
                logits_TE = layer.routed(placeholder_1D, hooks=False)[0]
        finally:
            torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]
        made = [number for number, result in enumerate(watched.results) if result is logits_TE]
        if not made:
            raise ExpertcastError(
                f"{type(layer.router).__name__}: no operation of the router produces its logits, so expertcast cannot "
                "apply its routing rule"
            )
        known[key] = _MadeLogits(made[-1], logits_TE.dtype, logits_TE.device)
    return known[key]


@torch.no_grad()
def _run(layer: MoELayer, answers: _Answers) -> tuple[Tensor, Tensor]:
    """Return the router's ids and weights under the replacements."""
    placeholder_TD = _placeholder(layer, len(answers.logits_TE))
    with answers:
        _, weights_TK, ids_TK = layer.routed(placeholder_TD, hooks=False)
    return ids_TK, weights_TK


def _placeholder(layer: MoELayer, tokens: int) -> Tensor:
    weight = next(layer.router.parameters())
    return weight.new_zeros(1, 1, dtype=layer.dtype).expand(tokens, layer.hidden_size)
