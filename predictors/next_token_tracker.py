"""Following a run with `next_token`, layer by layer: the same object for a running model and for stored traces.

B sequences, S tokens of each in a pass, T = B x S, E routed experts, D hidden size, H rows of a forecast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from expertcast.predictors.next_token import NextToken, TextState


class NextTokenTracker:
    """Feeds a predictor what each router says, and gives its forecast when a pass of one token per sequence begins."""

    def __init__(self, predictor: NextToken) -> None:
        self._predictor = predictor
        self._state: TextState | None = None
        self._logits: list[Tensor] = []
        """[T, E] of each layer of this pass."""

    @torch.no_grad()
    def start(self, fresh: bool, token_BS: Tensor | None = None) -> Tensor | None:
        """A pass begins, with new texts if `fresh`; `token_BS`: the ids of its tokens, None where they are not known.

        Returns:
            In a pass of one token per sequence of texts that go on, the probability that at least one sequence uses an
            expert, [H, L, E]: by that token (h = 0), by the h-th after it, and in the last row by each later one.
        """
        self._logits.clear()
        if fresh:
            self._state = None
        state = self._state
        if state is None or (token_BS is not None and token_BS.shape != (len(state.residual_BD), 1)):
            return None
        return any_sequence(self._predictor.tokens_ahead(state, None if token_BS is None else token_BS[:, 0]))

    def see(self, layer: int, residual_TD: Tensor, logits_TE: Tensor, sequences: int) -> None:
        """The router of `layer` has run: its norm read `residual_TD`, it gave `logits_TE`, for B `sequences` one after
        another."""
        predictor = self._predictor
        if len(self._logits) != layer:
            self._logits.clear()  # a pass was cut short
            if layer:
                return
        self._logits.append(logits_TE)
        if layer == predictor.shape.layers - 1:
            self._read(residual_TD, sequences)

    @torch.no_grad()
    def _read(self, residual_TD: Tensor, sequences: int) -> None:
        """All routers of a pass have run."""
        predictor, state = self._predictor, self._state
        if state is None or len(state.residual_BD) != sequences:
            state = predictor.start(sequences)
        logits_TLE = torch.stack(self._logits, dim=1)
        self._logits.clear()
        ids_TJ = predictor.chosen(logits_TLE)
        tokens = len(ids_TJ) // sequences
        last_BD = residual_TD[tokens - 1 :: tokens].bfloat16()  # as traces hold it
        self._state = predictor.read(state, ids_TJ.view(sequences, tokens, -1), last_BD)


def any_sequence(probability_BHLE: Tensor) -> Tensor:
    """Probability [H, L, E] that at least one of B independent sequences uses an expert."""
    if len(probability_BHLE) == 1:
        return probability_BHLE[0]
    return 1 - (1 - probability_BHLE).prod(dim=0)
