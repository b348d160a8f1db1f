"""Following a run with `next_token`, layer by layer: the same object for a running model and for stored traces.

B sequences, T tokens of them together, E routed experts, D hidden size, H rows of a forecast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from expertcast.predictors.next_token import NextToken, TextState


class NextTokenTracker:
    """Feeds a predictor what each router says, and gives its forecasts when they are due.

    In a pass of one token per sequence they are due at the predictor's trigger layers and at the last layer; in a pass
    of several (a prompt) at the last layer.
    """

    def __init__(self, predictor: NextToken) -> None:
        self._predictor = predictor
        self._state: TextState | None = None
        self._logits: list[Tensor] = []
        """[T, E] of each layer of this pass."""

    def start(self, fresh: bool) -> None:
        """A pass begins; `fresh`: with new texts."""
        self._logits.clear()
        if fresh:
            self._state = None

    @torch.no_grad()
    def see(self, layer: int, residual_TD: Tensor, logits_TE: Tensor, sequences: int) -> Tensor | None:
        """The router of `layer` has run: its norm read `residual_TD`, it gave `logits_TE`, for B `sequences` one after
        another.

        Returns:
            Where a forecast is due, the probability that at least one sequence uses an expert, [H, L, E]: by this token
            (h = 0, later layers only), by the h-th token after it, and in the last row by each token after those.
        """
        predictor = self._predictor
        if len(self._logits) != layer:
            self._logits.clear()  # a pass was cut short
            if layer:
                return None
        self._logits.append(logits_TE)
        state = self._state
        if state is None or len(state.last_BN) != sequences:
            state = self._state = predictor.start(sequences)
        if layer == predictor.shape.layers - 1:
            self._state = state = self._read(state, residual_TD, sequences)
            self._logits.clear()
            return any_sequence(predictor.tokens_ahead(state))
        if layer in predictor.config.triggers and len(residual_TD) == sequences:
            return any_sequence(predictor.tokens_ahead(state, layer, residual_TD.bfloat16()))
        return None

    def _read(self, state: TextState, residual_TD: Tensor, sequences: int) -> TextState:
        logits_TLE = torch.stack(self._logits, dim=1).float()
        last_B = slice(len(logits_TLE) // sequences - 1, None, len(logits_TLE) // sequences)
        member_TN = self._predictor.membership(self._predictor.chosen(logits_TLE))
        return self._predictor.read(
            state,
            member_TN.view(sequences, -1, member_TN.shape[1]),
            logits_TLE[last_B].softmax(dim=-1).flatten(1),
            residual_TD[last_B].bfloat16(),  # as traces hold it
        )


def any_sequence(probability_BHLE: Tensor) -> Tensor:
    """Probability [H, L, E] that at least one of B independent sequences uses an expert."""
    if len(probability_BHLE) == 1:
        return probability_BHLE[0]
    return 1 - (1 - probability_BHLE).prod(dim=0)
