"""Routing as the forwards of a runtime: prefills and decode steps, all experts of a layer in one event.

T tokens, B sequences decoded together, L MoE layers, E routed experts per layer, K experts per token, D hidden size.
An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from expertcast.data.batch import TraceBatch
from expertcast.data.traces import TraceDataset
from expertcast.predictors.base import Forecast, Predictor
from expertcast.predictors.messages import ExpertcastError, Progress, tokens_read
from expertcast.predictors.view import ModelShape, MoEView, route_all
from expertcast.runtime.engine.engine import LayerFlow
from expertcast.runtime.engine.forecasting import TokenForecasts

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """A predictor's forecasts for all tokens of a trace, made from the recorded routing (teacher-forced)."""

    ahead: int
    """Layers between a forecast and its target."""
    forecasts: dict[int, Forecast]
    """By target layer, with [T, ...] tensors."""

    def due(self, layer: int, forward: Forward) -> bool:
        """Whether a forecast is made at this layer."""
        return layer + self.ahead in self.forecasts

    def ask(self, layer: int, forward: Forward, flow: LayerFlow) -> None:
        """Tell the flow of the forecast that is due at this layer."""
        forecast = self.forecasts[layer + self.ahead][forward.rows]
        flow.hint(forecast, forecast.topk_ids_TK.tolist(), forecast.topk_weights_TK.tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Forecasts of one text as the keys that a run asked for, most needed first; selections have had their word."""

    ahead: int = 1
    steps: Sequence[Mapping[int, Sequence[int]]]
    """Per row of the trace, keys by target layer; layers without a forecast are left out."""

    def due(self, layer: int, forward: Forward) -> bool:
        """As :meth:`Hints.due`."""
        return layer + self.ahead in self._step(forward)

    def ask(self, layer: int, forward: Forward, flow: LayerFlow) -> None:
        """As :meth:`Hints.ask`."""
        flow.residency.prefetch(self._step(forward)[layer + self.ahead])

    def _step(self, forward: Forward) -> Mapping[int, Sequence[int]]:
        assert isinstance(forward.rows, slice), "asked keys are those of one text"
        row: int = forward.rows.start
        return self.steps[row]


ForecastSource = Hints | Asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The routing of some texts, in the order in which a runtime would see it."""

    shape: ModelShape
    forwards: list[Forward]
    routes: Routes | None = None
    """None: a decoding seen from outside, for policies that look at keys alone."""
    hints: Mapping[str, ForecastSource] = field(default_factory=dict)
    """By predictor."""
    tokens_ahead: Sequence[Tensor | None] | None = None
    """Of each forward, the forecast [H, L, E] of the tokens that follow, where one is due; in half precision, for they
    are compared with each other, and there are many. None: eviction policies get none."""

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

    def looking_ahead(self, follower: TokenForecasts, *, progress: bool = False) -> Trace:
        """The same with forecasts of the next tokens, made once for all simulations; the residuals, which they are made
        from, are left out."""
        routes, due, made = self.known_routes(), list[int | None](), list[Tensor]()
        for forward in Progress("forecasts", unit="forward", steps=self.forwards, shown=progress):
            probability_HLE = follower.start(forward.fresh, self.token_ids(forward))
            due.append(None if probability_HLE is None else len(made))
            if probability_HLE is not None:
                made.append(probability_HLE.half())
            for layer in range(self.shape.layers):
                residual_TD, logits_TE = routes.residual[layer][forward.rows], routes.logits[layer][forward.rows]
                follower.see(layer, residual_TD, logits_TE, forward.sequences)
        table_NHLE = torch.stack(made) if made else ()  # one storage, which processes share
        return replace(
            self,
            routes=replace(routes, residual=[residual_TD[:, :0] for residual_TD in routes.residual]),
            tokens_ahead=[None if row is None else table_NHLE[row] for row in due],
        )

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


class ReplayedTokens:
    """Gives the forecasts of a trace's next tokens, forward by forward, from its beginning."""

    def __init__(self, forecasts: Sequence[Tensor | None]) -> None:
        self._forecasts = iter(forecasts)

    def start(self, fresh: bool, token_BS: Tensor | None = None) -> Tensor | None:
        """A forward starts: its forecast, whatever `fresh` and `token_BS` are; or None."""
        forecast_HLE = next(self._forecasts)
        return None if forecast_HLE is None else forecast_HLE.float()

    def see(self, layer: int, residual_TD: Tensor, logits_TE: Tensor, sequences: int) -> None:
        """All that follows from `layer`, `residual_TD`, `logits_TE` and `sequences` is in the forecasts."""


_CHUNK = 2048
"""Tokens routed and forecast at a time."""
_COLUMNS = ("logits", "ids", "weights", "residual")


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Which texts of a dataset are taken, and how they are decoded."""

    split: str = "test"
    """Its documents: train, validation, test or all."""
    tokens: int | None = None
    """Only the first so many tokens of the split."""
    prefill: int = PREFILL
    """Tokens of each document that are prefilled; half of a shorter one."""
    batch: int = 1
    """Documents decoded together, until the shortest of them ends."""


def load_trace(
    traces: TraceDataset, texts: Texts | None = None, *, predictors: Mapping[str, Predictor] | None = None,
    ahead: int = 1, residuals: bool = False,
) -> Trace:  # fmt: skip
    """The documents of a split, one after another or some at a time, each prefilled and then decoded to its end.

    Args:
        traces: recorded routing.
        texts: what of it; None: the default :class:`Texts`.
        predictors: by name, bound to the traces' view; their forecasts are hints in decode steps.
        ahead: layers between these forecasts and their targets.
        residuals: keep the residual stream, which forecasts for the next tokens are made from.

    Raises:
        ExpertcastError: a number out of range, or too few documents of two tokens or more.
    """
    texts, predictors = texts or Texts(), predictors or {}
    if texts.prefill < 1 or texts.batch < 1:
        raise ExpertcastError(f"prefill={texts.prefill}, batch={texts.batch}: give 1 or more of both")
    for predictor in predictors.values():
        predictor.check_ahead(ahead)
    view = traces.view
    batches = traces.batches(texts.split, _CHUNK, max_tokens=texts.tokens)
    total = min(traces.token_count(texts.split), texts.tokens or traces.token_count(texts.split))
    parts = [
        _part(rows, view, predictors, ahead, residuals) for rows in tokens_read(batches, "reading the routing", total)
    ]
    if not parts:
        raise ExpertcastError(f"split {texts.split!r} holds no tokens: collect more text or choose another split")
    ids = [routes.token_T for routes, _, _ in parts if routes.token_T is not None]
    routes = Routes(
        view=view,
        **{name: _joined([getattr(routes, name) for routes, _, _ in parts]) for name in _COLUMNS},
        token_T=torch.cat(ids) if len(ids) == len(parts) else None,
    )
    document_T = torch.cat([document_T for _, document_T, _ in parts])
    hints = {}
    for name in predictors:
        layers = range(ahead, len(view))
        joined = {layer: Forecast.join([forecasts[name][layer] for _, _, forecasts in parts]) for layer in layers}
        hints[name] = Hints(ahead=ahead, forecasts=joined)
    return trace_of(view.shape, routes, document_T, prefill=texts.prefill, batch=texts.batch, hints=hints)


@torch.no_grad()
def _part(
    rows: TraceBatch, view: MoEView, predictors: Mapping[str, Predictor], ahead: int, residuals: bool
) -> tuple[Routes, Tensor, dict[str, dict[int, Forecast]]]:
    """Of some rows of a trace, their routes, documents, and forecasts by predictor and target layer."""
    ids, weights = route_all(view, rows.logits_TLE)
    states = [rows.state(view, layer) for layer in range(len(view) - ahead)] if predictors else []
    forecasts = {
        name: {layer + ahead: predictor.forecast(state, ahead) for layer, state in enumerate(states)}
        for name, predictor in predictors.items()
    }
    kept = rows.residual_TLD if residuals else rows.residual_TLD[:, :, :0]
    routes = Routes(
        logits=list(rows.logits_TLE.unbind(1)), ids=ids, weights=weights, residual=list(kept.unbind(1)),
        token_T=rows.token_T,
    )  # fmt: skip
    return routes, rows.document_T, forecasts


def _joined(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Per layer the rows of all parts, in memory of their own."""
    return [torch.cat(list(columns)) for columns in zip(*parts, strict=True)]
