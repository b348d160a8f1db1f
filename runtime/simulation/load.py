"""Trace datasets as :class:`expertcast.runtime.simulation.trace.Trace`, with predictors' forecasts of them.

T tokens, B sequences decoded together, L MoE layers, E routed experts per layer, K experts per token, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expertcast.data.batch import TraceBatch
from expertcast.data.traces import TraceDataset
from expertcast.predictors.base import Forecast, Predictor
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.progress import tokens_read
from expertcast.predictors.routing_rule import route_all
from expertcast.predictors.view import MoEView
from expertcast.runtime.simulation.trace import PREFILL, Hints, Routes, Trace, trace_of

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


@dataclass(slots=True, kw_only=True)
class _Part:
    """Some rows of a trace."""

    routes: Routes
    document_T: Tensor
    forecasts: dict[str, dict[int, Forecast]]
    """By predictor and target layer."""


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
    ids = [part.routes.token_T for part in parts if part.routes.token_T is not None]
    routes = Routes(
        view=view,
        **{name: _joined([getattr(part.routes, name) for part in parts]) for name in _COLUMNS},
        token_T=torch.cat(ids) if len(ids) == len(parts) else None,
    )
    document_T = torch.cat([part.document_T for part in parts])
    hints = {}
    for name in predictors:
        layers = range(ahead, len(view))
        joined = {layer: Forecast.join([part.forecasts[name][layer] for part in parts]) for layer in layers}
        hints[name] = Hints(ahead=ahead, forecasts=joined)
    return trace_of(view.shape, routes, document_T, prefill=texts.prefill, batch=texts.batch, hints=hints)


@torch.no_grad()
def _part(rows: TraceBatch, view: MoEView, predictors: Mapping[str, Predictor], ahead: int, residuals: bool) -> _Part:
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
    return _Part(routes=routes, document_T=rows.document_T, forecasts=forecasts)


def _joined(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Per layer the rows of all parts, in memory of their own."""
    return [torch.cat(list(columns)) for columns in zip(*parts, strict=True)]
