"""Hints: the ids of the likeliest experts, or their logits, with fewer operations than a forecast.

The linear parts of a forecast are folded into one map per layer: the target's norm into its router, means and spreads
into biases, ridge and projection side by side. Probes with random inputs show what norm and router compute; a norm or
router of another form is not folded. Hints differ from forecasts by rounding.

T tokens, D hidden size, E routed experts, K experts per token, R rank, V length of a map's input, X outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from expertcast.predictors.base import Predictor, RouterState
    from expertcast.predictors.view import MoELayer

# Norm and router of the model as maps

_PROBES = 16
_CLOSE = 2e-2
"""Largest error of a folded module on random inputs, relative to its largest output; bf16 alone causes 0.004."""


@torch.no_grad()
def norm_scale(norm: nn.Module, size: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return g [D] and c [] in fp32 for an RMS norm x * g / sqrt(|x|^2 + c^2); None for another norm.

    Args:
        norm: module to probe.
        size: D.
        like: tensor with the dtype and device of the norm's inputs.
    """
    if any(each.shape != (size,) for each in norm.parameters()):
        return None
    run: Callable[[Tensor], Tensor] = norm.forward  # without hooks
    square = size * float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)) or 0.0)
    scale_D = run(like.new_ones(1, size))[0].float() * (size + square) ** 0.5
    x_TD = torch.cat([factor * _random(_PROBES, size, like) for factor in (0.03, 1.0, 30.0)])
    folded_TD = x_TD.float() * scale_D / (x_TD.float().square().sum(dim=1, keepdim=True) + square).sqrt()
    return (scale_D, scale_D.new_tensor(square**0.5)) if _close(folded_TD, run(x_TD)) else None


@torch.no_grad()
def router_map(layer: MoELayer) -> tuple[Tensor, Tensor] | None:
    """Return W [D, E] and b [E] in fp32 if the logits of a layer's router are x W + b, else None."""
    like = next(layer.router.parameters()).new_empty(0, dtype=layer.dtype)
    unit_DD = torch.eye(layer.hidden_size).to(like)
    bias_1E = layer.routed(torch.zeros_like(unit_DD[:1]))[0].float()
    map_DE = layer.routed(unit_DD)[0].float() - bias_1E
    x_TD = _random(_PROBES, layer.hidden_size, like)
    folded_TE = torch.addmm(bias_1E, x_TD.float(), map_DE)
    return (map_DE, bias_1E[0]) if _close(folded_TE, layer.routed(x_TD)[0]) else None


def _random(rows: int, size: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)  # a separate generator: sampled generation must not change
    return torch.randn(rows, size, generator=generator).to(like)


def _close(folded: Tensor, own: Tensor) -> bool:
    return bool((folded - own.float()).abs().max() <= _CLOSE * own.float().abs().max())


# A forecast as maps

NORMED = ("quasi_hidden", "early")
"""Inputs that pass through the target's norm; names as in `LinearConfig.inputs`."""
_IN_ORDER = (*NORMED, "router_input", "previous")
_LARGE = 512 << 10
"""Bytes of a map above which int8 is faster, where the map does not fit a core's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Maps:
    """Forecast for one pair of layers as maps: logits = then(sum over inputs of input @ map + bias)."""

    of: Mapping[str, Tensor]
    """Map [D or E, X] by input. `previous` is the previous token's logits minus `usual_E`, zero if unknown."""
    bias_X: Tensor
    then: Callable[[Tensor], Tensor] | None = None
    """Function from [T, X] to logits [T, E]; None for the identity."""
    defaults: tuple[Tensor, Tensor] | None = None
    """Default vectors of the source layer's experts [E, D] and shared experts [D], for the input `quasi_hidden`."""
    usual_E: Tensor | None = None


def hints(predictor: Predictor, layer: int, ahead: int) -> Hints | None:
    """Return hints for forecasts at `layer` for layer + `ahead`; None if a part cannot be folded."""
    target = predictor.view[layer + ahead]
    like = next(target.router.parameters()).new_empty(0, dtype=target.dtype)
    maps, norm = predictor.maps(layer, ahead), norm_scale(target.norm, target.hidden_size, like)
    return None if maps is None or norm is None else Hints(maps, norm, target.index)


class Hints:
    """Computes the ids of the experts with the highest forecast logits.

    Args:
        maps: maps of the predictor for the pair of layers.
        norm: scale and floor of the target layer's norm, from :func:`norm_scale`.
        target: index of the target layer.
    """

    def __init__(self, maps: Maps, norm: tuple[Tensor, Tensor], target: int) -> None:
        self._maps, self._target = maps, target
        self._scale_D, self._floor = norm
        self._root = math.sqrt(len(self._scale_D))  # normed inputs have mean square 1, as the others have roughly
        scale_D1 = self._scale_D[:, None] / self._root
        folded = {name: scale_D1 * each if name in NORMED else each for name, each in maps.of.items()}
        # by output: a product with one row takes half the time
        self._map_XV = torch.cat([folded[name] for name in _IN_ORDER if name in folded]).T.contiguous()
        self._step_X: Tensor | None = None
        """Unit of each output's row of a large map, which is kept in int8."""
        # torch's product in int8 takes rows of multiples of 16
        if self._map_XV.nbytes > _LARGE and self._map_XV.device.type == "cpu" and self._map_XV.shape[1] % 16 == 0:
            step_X1 = self._map_XV.abs().amax(dim=1, keepdim=True).clamp_min(1e-20) / 127
            self._map_XV = (self._map_XV / step_X1).round_().to(torch.int8)
            self._step_X = step_X1[:, 0].bfloat16()
        self._bare = len(folded) == 1 and not maps.of.keys().isdisjoint(NORMED)
        self._bare = self._bare and maps.then is None and not maps.bias_X.any()
        """Whether the norm can be left out: a positive factor does not change the order of logits."""
        self._rows = maps.defaults
        """Rows by expert and the start of their sum: default vectors, joined with the map of `routing`."""
        if "routing" in maps.of:
            expert_ED, shared_D = maps.defaults or (maps.of["routing"][:, :0], maps.bias_X[:0])
            self._rows = torch.cat([expert_ED, maps.of["routing"]], dim=1), torch.cat([shared_D, maps.bias_X])

    def ids(self, state: RouterState, count: int) -> Tensor:
        """Return ids [T, count], each token's likeliest first."""
        return self.logits(state, scaled=not self._bare).topk(count).indices

    def logits(self, state: RouterState, scaled: bool = True) -> Tensor:
        """Return logits [T, E] in fp32; without `scaled`, up to a positive factor for each token."""
        maps, start, parts = self._maps, self._maps.bias_X, []
        tokens = len(state.residual_TD)
        if self._rows is not None:
            mixed_TV = mixed(*self._rows, state.topk_ids_TK, state.topk_weights_TK)
            if "routing" in maps.of:
                outputs = len(maps.bias_X)
                mixed_TV, start = mixed_TV.split_with_sizes([mixed_TV.shape[1] - outputs, outputs], dim=1)
            if maps.defaults is not None:
                parts.append(mixed_TV + state.residual_TD)
        if "early" in maps.of:
            assert state.early_TD is not None
            parts.append(state.early_TD)
        if not scaled:
            return self._product(start, parts[0])
        if parts:
            parts = [self._normed(_joined(parts).view(-1, len(self._scale_D))).view(tokens, -1)]
        if "router_input" in maps.of:
            parts.append(state.router_input_TD)
        if "previous" in maps.of:
            parts.append(self._previous(state, tokens))
        y_TX = self._product(start, _joined(parts))
        return y_TX if maps.then is None else maps.then(y_TX)

    def _normed(self, x_HD: Tensor) -> Tensor:
        size_H1 = torch.linalg.vector_norm(x_HD, dim=1, keepdim=True, dtype=torch.float32)
        return x_HD * (self._root / torch.hypot(size_H1, self._floor))

    def _product(self, start: Tensor, x_TV: Tensor) -> Tensor:
        """Return start + x @ map [T, X] in fp32."""
        if self._step_X is None:
            return torch.addmm(start, x_TV.float(), self._map_XV.T)
        y_TX: Tensor = torch._weight_int8pack_mm(x_TV.bfloat16(), self._map_XV, self._step_X)
        return start + y_TX

    def _previous(self, state: RouterState, tokens: int) -> Tensor:
        """Return the input `previous`, zero if the previous token is unknown."""
        usual_E = self._maps.usual_E
        assert usual_E is not None
        if state.previous_logits_TLE is None:
            return torch.zeros_like(usual_E).expand(tokens, -1)
        return torch.nan_to_num(state.previous_logits_TLE.select(1, self._target) - usual_E)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def mixed(rows_EV: Tensor, start_V: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return start + the rows of each token's experts by their weights [T, V], in fp32."""
    weights_TK = weights_TK.float()
    if len(weights_TK) == 1:  # a third of the operations of the sum below
        return torch.addmm(start_V, weights_TK, rows_EV.index_select(0, ids_TK[0]).float())
    rows_TKV = functional.embedding(ids_TK, rows_EV).float()
    return torch.baddbmm(start_V, weights_TK.unsqueeze(1), rows_TKV).squeeze(1)
