"""The ridge part of a predictor's forecast of one layer: where its weights are, what it reads, how a change gets in.

T tokens, F features, R directions (F, or fewer), E routed experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from expertcast.predictors.base import Predictor, RouterState
from expertcast.predictors.estimator import Estimator
from expertcast.predictors.hybrid import Hybrid
from expertcast.predictors.linear import Linear

MOST_DIRECTIONS = 512
"""Of more features than this, only so many directions are learned in: time goes with their square, and their cube."""


class RidgePart:
    """Weights [F, E] and bias [E] of one layer's forecast, with what they were when this was made.

    The weights are changed in place: programs traced from the predictor, and graphs captured of those, read them there.

    Args:
        predictor: of `linear` or `estimator`, bound; its weights are in use by nobody else.
        layer: the source layer.
        ahead: layers from it to the target.
    """

    def __init__(self, predictor: Linear | Estimator, layer: int, ahead: int) -> None:
        self.predictor, self.layer, self.ahead = predictor, layer, ahead
        name = "weight_PFE" if isinstance(predictor, Estimator) else "weight_PDE"
        self._weight_FE = predictor.get_buffer(f"{name}_{ahead}")[layer]
        self._bias_E = predictor.get_buffer(f"bias_PE_{ahead}")[layer]
        self._frozen = self._weight_FE.clone(), self._bias_E.clone()
        self._applied_GE: Tensor | None = None
        features = len(self._weight_FE)
        self.directions = min(features, MOST_DIRECTIONS)
        self._basis_FR = None if features == self.directions else _basis(self._weight_FE, self.directions)
        self._scale: tuple[Tensor, Tensor] | None = None
        """Mean and inverse spread [F] that make the features about 1 wide, where the predictor does not."""

    def directions_of(self, state: RouterState) -> Tensor:
        """What the map reads [T, R], each about 1 wide: by the spread on the tokens that are asked for first."""
        predictor, ahead = self.predictor, self.ahead
        if isinstance(predictor, Estimator):
            mean_F, inverse_F = (predictor.get_buffer(f"{name}_PF_{ahead}")[self.layer] for name in ("mean", "inverse"))
            x_TF = (predictor.features(state, ahead) - mean_F) * inverse_F
        else:
            x_TF = predictor.input_vector(state, ahead).float()
            if self._scale is None:
                spread_F = x_TF.std(dim=0, correction=0)
                self._scale = x_TF.mean(dim=0), 1 / spread_F.clamp(min=max(1e-6, 0.05 * float(spread_F.mean())))
            x_TF = (x_TF - self._scale[0]) * self._scale[1]
        return x_TF if self._basis_FR is None else x_TF @ self._basis_FR

    def frozen_logits(self, state: RouterState, x_TR: Tensor) -> Tensor:
        """The forecast [T, E] as it would be with the weights as they were; `x_TR` is what the map reads."""
        logits_TE = self.predictor.logits(state, self.ahead).float()
        return logits_TE if self._applied_GE is None else logits_TE - changed(x_TR, self._applied_GE)

    def apply(self, change_GE: Tensor | None) -> None:
        """Put the weights as they were plus `change_GE` [R + 1, E] in their place; None: as they were, bit for bit."""
        weight_FE, bias_E = self._frozen
        if change_GE is not None:
            add_FE = change_GE[:-1] if self._basis_FR is None else self._basis_FR @ change_GE[:-1]
            bias_E = bias_E + change_GE[-1]
            if self._scale is not None:
                add_FE = add_FE * self._scale[1][:, None]
                bias_E = bias_E - self._scale[0] @ add_FE
            weight_FE = weight_FE + add_FE
        self._weight_FE.copy_(weight_FE)
        self._bias_E.copy_(bias_E)
        self._applied_GE = change_GE


def changed(x_TR: Tensor, change_GE: Tensor) -> Tensor:
    """What a change adds to the logits [T, E]: `x_TR` through its rows, and its bias, which is the last row."""
    return torch.addmm(change_GE[-1], x_TR, change_GE[:-1])


def ridge_part(predictor: Predictor, layer: int, ahead: int) -> RidgePart | None:
    """The ridge part that forecasts layer `layer + ahead`; None where there is none.

    Args:
        predictor: any; of a hybrid, the member that it chose for the layer.
        layer: the source layer.
        ahead: layers from it to the target.
    """
    if isinstance(predictor, Hybrid):
        predictor = predictor.member(predictor.chosen[ahead, layer + ahead])
    if isinstance(predictor, Linear) or (isinstance(predictor, Estimator) and predictor.config.form == "residual"):
        return RidgePart(predictor, layer, ahead)
    return None


def _basis(weight_FE: Tensor, directions: int) -> Tensor:
    """Orthonormal directions [F, R]: those that the frozen map reads first, the others at random."""
    features, experts = weight_FE.shape
    generator = torch.Generator().manual_seed(0)
    others = torch.randn(features, max(0, directions - experts), generator=generator).to(weight_FE)
    basis_FR: Tensor = torch.linalg.qr(torch.cat([weight_FE, others], dim=1)).Q[:, :directions]
    return basis_FR.contiguous()
