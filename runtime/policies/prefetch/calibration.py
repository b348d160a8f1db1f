"""How likely each expert is needed, learnt while the model runs: probabilities that mean what they say.

T tokens, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from expertcast.predictors.log_odds import FARTHEST, LogOdds

Array = npt.NDArray[np.float64]

_MEMORY = 0.999
"""What is kept, from one layer to the next, of the weight of earlier outcomes."""
_PRIOR = 1.0
"""Weight of the start (slope 1, offset 0), in units of Fisher information."""
_LEAST = 1e-12


class Calibration:
    """Turns forecast logits into the probability that a step needs an expert.

    A token's log-odds are slope * margin + offset, where the margin is how far the expert's logit lies above the
    boundary, halfway between the forecast's K-th and K+1-th; a step needs what any of its tokens needs, taken as
    independent. Slope and offset, one pair for the whole model, start as 1 and 0 and follow each layer's outcome by one
    Newton step of logistic regression: it costs one pass over T x E and keeps no history.

    Forecasts of a predictor that was calibrated on validation bring a reading of their own for each layer pair: the
    margin is then its log-odds, and what is learnt here is how the text at hand differs from the validation's.

    On the reference model the margin tells more than the log-odds whose probabilities sum to K (Brier score .0082
    against .0113 after calibration, a distilled estimator's forecasts) and costs no search for their sum.
    """

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self.fit = np.array([1.0, 0.0])
        """Slope and offset: log-odds per unit of margin, and of an expert at the boundary."""
        self._information = np.zeros((2, 2))
        self._margins: dict[int, Array] = {}
        """[T, E] of the forecasts whose outcome is not known yet, by layer."""

    def probability(self, layer: int, logits_TE: Tensor, log_odds: LogOdds | None = None) -> Array:
        """[E] probability that at least one of the tokens needs the expert; remembered until `learn` says what came.

        Args:
            layer: the forecast's.
            logits_TE: its logits.
            log_odds: how its predictor's calibration reads them.
        """
        margin_TE = _margin(logits_TE.float().cpu().numpy().astype(np.float64), self._top_k)
        if log_odds is not None:
            root_TE = np.sign(margin_TE) * np.sqrt(np.abs(margin_TE))
            margin_TE = log_odds.slope * margin_TE + log_odds.root * root_TE + log_odds.offset
            margin_TE = margin_TE.clip(-FARTHEST, FARTHEST)
        self._margins[layer] = margin_TE
        return _any(self._of_tokens(margin_TE))

    def learn(self, layer: int, ids: Sequence[int]) -> None:
        """The layer needed these experts (distinct); nothing is learnt without a forecast for it."""
        margin_TE = self._margins.pop(layer, None)
        if margin_TE is None:
            return
        p_TE = self._of_tokens(margin_TE)
        p_E = _any(p_TE)
        needed_E = np.zeros_like(p_E)
        needed_E[list(ids)] = 1.0
        # d p_E = (1 - p_E) * sum over tokens of p_TE * (margin, 1) per unit of (slope, offset)
        step_E2 = np.stack([(p_TE * margin_TE).sum(axis=0), p_TE.sum(axis=0)], axis=1) / p_E[:, None]
        gradient = (p_E - needed_E) @ step_E2
        self._information *= _MEMORY
        self._information += (step_E2 * (p_E * (1 - p_E))[:, None]).T @ step_E2
        self.fit -= np.linalg.solve(self._information + _PRIOR * np.eye(2), gradient)

    def _of_tokens(self, margin_TE: Array) -> Array:
        log_odds_TE = (self.fit[0] * margin_TE + self.fit[1]).clip(-30.0, 30.0)
        probability_TE: Array = 1 / (1 + np.exp(-log_odds_TE))
        return probability_TE


def _margin(logits_TE: Array, top_k: int) -> Array:
    experts = logits_TE.shape[1]
    if top_k >= experts:
        return np.full_like(logits_TE, FARTHEST)
    ranked_TE = np.partition(logits_TE, (experts - top_k - 1, experts - top_k), axis=1)
    boundary_T1 = ranked_TE[:, experts - top_k - 1 : experts - top_k + 1].mean(axis=1, keepdims=True)
    margin_TE: Array = (logits_TE - boundary_T1).clip(-FARTHEST, FARTHEST)
    return margin_TE


def _any(p_TE: Array) -> Array:
    """[E]; exact for one token."""
    p_E: Array = p_TE[0] if len(p_TE) == 1 else 1 - np.prod(1 - p_TE, axis=0)
    return p_E.clip(_LEAST, 1.0)
