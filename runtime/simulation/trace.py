"""Recorded routing as a sequence of prefills and decode steps.

T tokens, B sequences decoded together, L MoE layers, E routed experts per layer, K experts per token, D hidden size,
H rows of a forecast of the next tokens. The key of an expert is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from expertcast.data.batch import TraceBatch
from expertcast.data.traces import TraceSource
from expertcast.predictors.base import Forecast, Predictor
from expertcast.predictors.messages import ExpertcastError, with_token_progress
from expertcast.predictors.options import Validated
from expertcast.predictors.view import ModelShape, MoEView, route_all
from expertcast.runtime.engine.engine import LayerFlow

PREFILL = 64
"""Number of tokens of each document in its prefill; half of a document shorter than twice this number."""
FEW_IDS = 512
"""Maximum number of ids for which the runtime requests experts in the order of the routers; otherwise by number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One step of the model."""

    fresh: bool
    """Whether it is a prefill of new sequences; otherwise a decode step."""
    rows: slice | Tensor
    """Rows of its tokens in the routes and forecasts of the trace, one sequence after another."""
    keys: list[list[int]]
    """Distinct keys that the router of each layer chose [L], in the order of the requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Router outputs for all tokens of a trace, one tensor per layer, for policies that read more than keys."""

    view: MoEView | None = None
    """Routers of the model, for policies that route again."""
    logits: list[Tensor]
    """Router logits [T, E]."""
    ids: list[Tensor]
    """Chosen experts [T, K]."""
    weights: list[Tensor]
    """Combine weights [T, K]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """Forecasts of a predictor for all tokens of a trace, computed from the recorded routing (teacher forcing)."""

    ahead: int
    """Number of layers between a forecast and its target."""
    forecasts: dict[int, Forecast]
    """Forecasts by target layer, with tensors [T, ...]."""

    def due(self, layer: int, forward: Forward) -> bool:
        """Return whether this layer makes a forecast."""
        return layer + self.ahead in self.forecasts

    def submit(self, layer: int, forward: Forward, flow: LayerFlow) -> None:
        """Pass the forecast of this layer to the flow."""
        forecast = self.forecasts[layer + self.ahead][forward.rows]
        flow.hint(forecast, forecast.topk_ids_TK.tolist(), forecast.topk_weights_TK.tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Routing of sequences in the order in which a runtime processes it."""

    shape: ModelShape
    forwards: list[Forward]
    routes: Routes | None = None
    """Router outputs; None: keys only."""
    hints: Mapping[str, Hints] = field(default_factory=dict)
    """Forecasts by name of the predictor."""

    @property
    def steps(self) -> int:
        """Number of decode steps."""
        return sum(not forward.fresh for forward in self.forwards)

    def require_routes(self) -> Routes:
        """Return the router outputs.

        Raises:
            ExpertcastError: the trace has keys only.
        """
        if self.routes is None:
            raise ExpertcastError("this trace holds no router logits, which these policies read: record them")
        return self.routes


def trace_of(
    shape: ModelShape, routes: Routes, document_T: Tensor, *, prefill: int = PREFILL, batch: int = 1,
    hints: Mapping[str, Hints] | None = None,
) -> Trace:  # fmt: skip
    """Build a trace in which each document is prefilled and then decoded to its end, `batch` documents at a time.

    Args:
        shape: shape of the model.
        routes: router outputs of all T tokens.
        document_T: document of each token; the tokens of a document are contiguous.
        prefill: number of tokens of each document in its prefill; half of a shorter document.
        batch: number of documents decoded together, until the shortest ends.
        hints: forecasts by name of the predictor, for all T tokens.

    Raises:
        ExpertcastError: there are fewer than `batch` documents of two tokens or more.
    """
    groups = list(_groups(document_T, batch))
    if not groups:
        raise ExpertcastError(f"batch={batch}: there are not so many documents of 2 tokens or more; give fewer")
    keys_LTK = [(layer * shape.experts + ids_TK).tolist() for layer, ids_TK in enumerate(routes.ids)]
    forwards = []
    for group in groups:
        cuts = [(document, document.start + prefilled(len(document), prefill)) for document in group]
        rows_T = torch.cat([torch.arange(document.start, cut) for document, cut in cuts])
        forwards.append(_forward(keys_LTK, rows_T, fresh=True))
        for step in range(min(document.stop - cut for document, cut in cuts)):
            now = [cut + step for _, cut in cuts]
            rows = slice(now[0], now[0] + 1) if len(now) == 1 else torch.tensor(now)
            forwards.append(_forward(keys_LTK, rows, fresh=False))
    return Trace(shape=shape, forwards=forwards, routes=routes, hints=hints or {})


def prefilled(length: int, prefill: int) -> int:
    """Return the number of tokens in the prefill of a sequence: `prefill`, or half of a shorter sequence.

    Measurements of quality use the same rule.

    Args:
        length: number of tokens of the sequence.
        prefill: requested number of tokens.
    """
    return min(prefill, length // 2)


def request_order(keys: Sequence[int]) -> list[int]:
    """Return the distinct keys of a layer's T x K ids in the order in which the runtime requests them."""
    return list(dict.fromkeys(keys)) if len(keys) <= FEW_IDS else sorted(set(keys))


def _forward(keys_LTK: list[list[list[int]]], rows: slice | Tensor, *, fresh: bool) -> Forward:
    if isinstance(rows, slice):
        keys = [keys_TK[rows.start] for keys_TK in keys_LTK]
    else:
        chosen = rows.tolist()
        keys = [request_order([key for row in chosen for key in keys_TK[row]]) for keys_TK in keys_LTK]
    return Forward(fresh=fresh, rows=rows, keys=keys)


def _groups(document_T: Tensor, batch: int) -> Iterator[list[range]]:
    """Yield the rows of `batch` documents at a time, without an incomplete last group."""
    _, counts = torch.unique_consecutive(document_T, return_counts=True)
    documents, start = [], 0
    for count in counts.tolist():
        if count > 1:
            documents.append(range(start, start + count))
        start += count
    for first in range(0, len(documents) - batch + 1, batch):
        yield documents[first : first + batch]


_CHUNK = 2048
"""Number of tokens processed at once."""
_COLUMNS = ("logits", "ids", "weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSelection(Validated):
    """Selection of documents of a trace dataset, and how they are decoded."""

    split: str = "test"
    """Split of the documents: train, validation, test or all."""
    tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of tokens, from the start of the split."""
    prefill: Annotated[int, Field(ge=1)] = PREFILL
    """Number of tokens of each document in its prefill; half of a shorter document."""
    batch: Annotated[int, Field(ge=1)] = 1
    """Number of documents decoded together, until the shortest ends."""


def load_trace(
    traces: TraceSource, texts: SequenceSelection | None = None, *, predictors: Mapping[str, Predictor] | None = None,
    ahead: int = 1,
) -> Trace:  # fmt: skip
    """Load the routing of a trace dataset for simulations.

    Args:
        traces: trace dataset.
        texts: selection of documents; None: the defaults of :class:`SequenceSelection`.
        predictors: predictors by name, bound to the view of the dataset; their forecasts are hints in decode steps.
        ahead: number of layers between a forecast and its target.

    Raises:
        ExpertcastError: a number is out of range, or there are too few documents of two tokens or more.
    """
    texts, predictors = texts or SequenceSelection(), predictors or {}
    for predictor in predictors.values():
        predictor.check_ahead(ahead)
    view = traces.view
    batches = traces.batches(texts.split, _CHUNK, max_tokens=texts.tokens)
    total = min(traces.token_count(texts.split), texts.tokens or traces.token_count(texts.split))
    parts = [
        _part(rows, view, predictors, ahead) for rows in with_token_progress(batches, "reading the routing", total)
    ]
    if not parts:
        raise ExpertcastError(f"split {texts.split!r} holds no tokens: collect more text or choose another split")
    routes = Routes(
        view=view,
        **{name: _joined([getattr(routes, name) for routes, _, _ in parts]) for name in _COLUMNS},
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
    rows: TraceBatch, view: MoEView, predictors: Mapping[str, Predictor], ahead: int
) -> tuple[Routes, Tensor, dict[str, dict[int, Forecast]]]:
    """Return routes, documents, and forecasts by predictor and target layer for some rows of a dataset."""
    ids, weights = route_all(view, rows.logits_TLE)
    states = [rows.state(view, layer) for layer in range(len(view) - ahead)] if predictors else []
    forecasts = {
        name: {layer + ahead: predictor.forecast(state, ahead) for layer, state in enumerate(states)}
        for name, predictor in predictors.items()
    }
    routes = Routes(
        logits=list(rows.logits_TLE.unbind(1)), ids=ids, weights=weights,
    )  # fmt: skip
    return routes, rows.document_T, forecasts


def _joined(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Concatenate the rows of all parts, layer by layer."""
    return [torch.cat(list(columns)) for columns in zip(*parts, strict=True)]
