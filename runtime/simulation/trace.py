"""Routing as the forwards of a runtime: prefills and decode steps, all experts of a layer in one event.

T tokens, B sequences decoded together, L MoE layers, E routed experts per layer, K experts per token, D hidden size.
An expert's key is layer * E + expert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from expertcast.predictors.base import Forecast
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import ModelShape, MoEView
from expertcast.runtime.engine.flow import LayerFlow

PREFILL = 64
"""Tokens of each document that are prefilled; half of a document that is shorter than twice as many."""
FEW_IDS = 512
"""Up to so many ids the runtime asks for experts in the routers' order, beyond in that of their numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One forward of the model."""

    fresh: bool
    """A prefill of new texts; else a decode step."""
    sequences: int = 1
    """B"""
    rows: slice | Tensor
    """What belongs to it of the trace's routes and forecasts: its tokens, one sequence after another."""
    keys: list[list[int]]
    """[L] distinct keys that each layer needs by its router, in the order in which the runtime asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """What the policies that look further than keys read, for all tokens of a trace; per layer."""

    view: MoEView | None = None
    """Whose routers route; needed by policies that have them route anew."""
    logits: list[Tensor]
    """[T, E]"""
    ids: list[Tensor]
    """[T, K]"""
    weights: list[Tensor]
    """[T, K]"""
    residual: list[Tensor]
    """[T, D], or [T, 0] where they were not asked for."""
    token_T: Tensor | None = None
    """The tokens' own ids; None where they are not known."""


class ForecastSource(ABC):
    """Says what is asked for, at which layer of a decode step."""

    ahead: int
    """Layers between a forecast and its target."""

    @abstractmethod
    def due(self, layer: int, forward: Forward) -> bool:
        """Whether a forecast is made at this layer."""

    @abstractmethod
    def ask(self, layer: int, forward: Forward, flow: LayerFlow) -> None:
        """Tell the flow of the forecast that is due at this layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints(ForecastSource):
    """A predictor's forecasts for all tokens of a trace, made from the recorded routing (teacher-forced)."""

    ahead: int
    forecasts: dict[int, Forecast]
    """By target layer, with [T, ...] tensors."""

    def due(self, layer: int, forward: Forward) -> bool:
        return layer + self.ahead in self.forecasts

    def ask(self, layer: int, forward: Forward, flow: LayerFlow) -> None:
        forecast = self.forecasts[layer + self.ahead][forward.rows]
        flow.hint(forecast, forecast.topk_ids_TK.tolist(), forecast.topk_weights_TK.tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(ForecastSource):
    """Forecasts of one text as the keys that a run asked for, most needed first; selections have had their word."""

    ahead: int = 1
    steps: Sequence[Mapping[int, Sequence[int]]]
    """Per row of the trace, keys by target layer; layers without a forecast are left out."""

    def due(self, layer: int, forward: Forward) -> bool:
        return layer + self.ahead in self._step(forward)

    def ask(self, layer: int, forward: Forward, flow: LayerFlow) -> None:
        flow.residency.prefetch(self._step(forward)[layer + self.ahead])

    def _step(self, forward: Forward) -> Mapping[int, Sequence[int]]:
        assert isinstance(forward.rows, slice), "asked keys are those of one text"
        row: int = forward.rows.start
        return self.steps[row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The routing of some texts, in the order in which a runtime would see it."""

    shape: ModelShape
    forwards: list[Forward]
    routes: Routes | None = None
    """None: a decoding seen from outside, for policies that look at keys alone."""
    hints: Mapping[str, ForecastSource] = field(default_factory=dict)
    """By predictor."""

    @property
    def decode(self) -> list[Forward]:
        """The decode steps."""
        return [forward for forward in self.forwards if not forward.fresh]

    @property
    def steps(self) -> int:
        """Number of decode steps."""
        return len(self.decode)

    def token_ids(self, forward: Forward) -> Tensor | None:
        """The ids [B, S] of a forward's tokens, where they are known; None for prompts of different lengths as well."""
        if self.routes is None or self.routes.token_T is None:
            return None
        token_T = self.routes.token_T[forward.rows]
        return None if len(token_T) % forward.sequences else token_T.view(forward.sequences, -1)

    def known_routes(self) -> Routes:
        """What policies read that look further than keys.

        Raises:
            ExpertcastError: the trace has keys alone.
        """
        if self.routes is None:
            raise ExpertcastError("this trace holds no router logits, which these policies read: record them")
        return self.routes


def trace_of(
    shape: ModelShape, routes: Routes, document_T: Tensor, *, prefill: int = PREFILL, batch: int = 1,
    hints: Mapping[str, ForecastSource] | None = None,
) -> Trace:  # fmt: skip
    """Texts one after another or `batch` at a time, each prefilled and then decoded to its end.

    Args:
        shape: the model's.
        routes: of all T tokens.
        document_T: names each token's document; neighbours belong together.
        prefill: tokens of each document that are prefilled; half of a shorter one.
        batch: documents decoded together, until the shortest of them ends.
        hints: forecasts by predictor, for all T tokens.

    Raises:
        ExpertcastError: too few documents of two tokens or more.
    """
    groups = list(_groups(document_T, batch))
    if not groups:
        raise ExpertcastError(f"batch={batch}: there are not so many documents of 2 tokens or more; give fewer")
    keys_LTK = [(layer * shape.experts + ids_TK).tolist() for layer, ids_TK in enumerate(routes.ids)]
    forwards = []
    for group in groups:
        cuts = [(document, document.start + prefilled(len(document), prefill)) for document in group]
        rows_T = torch.cat([torch.arange(document.start, cut) for document, cut in cuts])
        forwards.append(_forward(keys_LTK, rows_T, len(group), fresh=True))
        for step in range(min(document.stop - cut for document, cut in cuts)):
            now = [cut + step for _, cut in cuts]
            rows = slice(now[0], now[0] + 1) if len(now) == 1 else torch.tensor(now)
            forwards.append(_forward(keys_LTK, rows, len(group), fresh=False))
    return Trace(shape=shape, forwards=forwards, routes=routes, hints=hints or {})


def prefilled(length: int, prefill: int) -> int:
    """How many of a text's `length` tokens are read at once, of which `prefill` are asked for: half of a text that is
    shorter than twice as many. Runs that say what a policy costs in quality read texts by the same rule."""
    return min(prefill, length // 2)


def asked_for(keys: Sequence[int]) -> list[int]:
    """Distinct keys of a layer's T x K ids, in the order in which the runtime asks for them."""
    return list(dict.fromkeys(keys)) if len(keys) <= FEW_IDS else sorted(set(keys))


def _forward(keys_LTK: list[list[list[int]]], rows: slice | Tensor, sequences: int, *, fresh: bool) -> Forward:
    if isinstance(rows, slice):
        keys = [keys_TK[rows.start] for keys_TK in keys_LTK]
    else:
        chosen = rows.tolist()
        keys = [asked_for([key for row in chosen for key in keys_TK[row]]) for keys_TK in keys_LTK]
    return Forward(fresh=fresh, sequences=sequences, rows=rows, keys=keys)


def _groups(document_T: Tensor, batch: int) -> Iterator[list[range]]:
    """Rows of `batch` documents at a time; what is left over at the end is left out."""
    _, counts = torch.unique_consecutive(document_T, return_counts=True)
    documents, start = [], 0
    for count in counts.tolist():
        if count > 1:
            documents.append(range(start, start + count))
        start += count
    for first in range(0, len(documents) - batch + 1, batch):
        yield documents[first : first + batch]
