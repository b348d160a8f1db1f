"""What each request's last token was routed by, for predictors that read it.

R requests of a step, L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from expertcast.data.batch import RouterCall
from expertcast.predictors.view import ModelShape
from expertcast_vllm.requests import Requests


class PreviousTokens:
    """Router logits of the last token of each request in the last step, all layers: a request that pauses, or goes
    on elsewhere, is unknown."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._row: dict[tuple[str, int], int] = {}
        """Of the requests in the present step, each with the position behind its tokens."""
        self._last: list[int] = []
        """Row of each request's last token among the step's."""
        self._known_R: list[int] = []
        """For each request its row in the step before, or -1."""
        self._before_RLE: Tensor | None = None
        self._now_RLE: Tensor | None = None
        self._previous_RLE: Tensor | None = None

    def start(self, running: Requests) -> None:
        """A step over these requests' tokens begins."""
        row, self._row = (
            self._row,
            {
                (part.request, part.start + part.rows.stop - part.rows.start): index
                for index, part in enumerate(running.parts)
            },
        )
        self._known_R = [row.get((part.request, part.start), -1) for part in running.parts]
        self._last = [part.rows.stop - 1 for part in running.parts]
        self._before_RLE, self._now_RLE, self._previous_RLE = self._now_RLE, None, None

    def see(self, call: RouterCall) -> None:
        """A router has run."""
        last_RE = call.logits_TE[self._last]
        if self._now_RLE is None:
            layers, experts = self._shape.layers, self._shape.experts
            self._now_RLE = last_RE.new_full((len(last_RE), layers, experts), float("nan"))
        self._now_RLE[:, call.layer] = last_RE

    def of(self, call: RouterCall) -> Tensor:
        """[R, L, E] for a step of one token each; NaN where a request was not in the step before."""
        if self._previous_RLE is None:
            unknown_1LE = call.logits_TE.new_full((1, self._shape.layers, self._shape.experts), float("nan"))
            held = unknown_1LE if self._before_RLE is None else torch.cat([self._before_RLE, unknown_1LE])
            self._previous_RLE = held[self._known_R]
        return self._previous_RLE
