"""Trace datasets as the forwards of a runtime: prefills and decode steps, all experts of a layer in one event.

T tokens, B sequences decoded together, L MoE layers, E routed experts per layer, K experts per token, D hidden size.
An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from expertcast.data.batch import TraceBatch
from expertcast.data.traces import TraceDataset
from expertcast.predictors.base import Forecast, Predictor
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import ModelShape, MoELayer, MoEView

PREFILL = 64
"""Tokens of each document that are prefilled; half of a document that is shorter than twice as many."""
FEW_IDS = 512
"""Up to so many ids the runtime asks for experts in the routers' order, beyond in that of their numbers."""
_CHUNK = 2048
"""Tokens routed and forecast at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One forward of the model."""

    fresh: bool
    """A prefill of new texts; else a decode step."""
    sequences: int
    """B"""
    rows: slice | Tensor
    """The trace's tokens that it runs, one sequence after another."""
    keys: list[list[int]]
    """[L] distinct keys that each layer needs by its router, in the order in which the runtime asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """What the policies that look further than keys read, for all tokens of a trace; per layer."""

    view: MoEView
    logits: list[Tensor]
    """[T, E]"""
    ids: list[Tensor]
    """[T, K]"""
    weights: list[Tensor]
    """[T, K]"""
    residual: list[Tensor]
    """[T, D], or [T, 0] where they were not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """A predictor's forecasts for all tokens of a trace, made from the recorded routing (teacher-forced)."""

    ahead: int
    forecasts: dict[int, Forecast]
    """By target layer, with [T, ...] tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The routing of some texts, in the order in which a runtime would see it."""

    shape: ModelShape
    forwards: list[Forward]
    routes: Routes
    hints: Mapping[str, Hints] = field(default_factory=dict)
    """By predictor."""

    @property
    def steps(self) -> int:
        """Decode steps."""
        return sum(not forward.fresh for forward in self.forwards)


def bare_view(shape: ModelShape) -> MoEView:
    """A model of which nothing is there but its shape: enough for policies that do not route."""
    nothing = nn.Identity()
    layers = [
        MoELayer(
            index=index, block_name="", norm_name="", router_name="", experts_name="", block=nothing, norm=nothing,
            router=nothing, experts=nothing, num_experts=shape.experts, top_k=shape.top_k, hidden_size=shape.hidden,
            has_shared=False,
        )
        for index in range(shape.layers)
    ]  # fmt: skip
    return MoEView(tuple(layers), "bare")


def load_trace(
    traces: TraceDataset,
    *,
    split: str = "test",
    tokens: int | None = None,
    prefill: int = PREFILL,
    batch: int = 1,
    predictors: Mapping[str, Predictor] | None = None,
    ahead: int = 1,
    residuals: bool = False,
) -> Trace:
    """The documents of a split, one after another or `batch` at a time, each prefilled and then decoded to its end.

    Sequences of a batch step together until the shortest of them ends.

    Args:
        tokens: only the first so many tokens of the split.
        prefill: tokens of each document that are prefilled.
        predictors: by name, bound to the traces' view; their forecasts are hints in decode steps.
        residuals: keep the residual stream, which forecasts for the next tokens are made from.

    Raises:
        ExpertcastError: a number out of range, or too few documents of two tokens or more.
    """
    if prefill < 1 or batch < 1:
        raise ExpertcastError(f"prefill={prefill}, batch={batch}: give 1 or more of both")
    predictors = predictors or {}
    for name, predictor in predictors.items():
        if ahead not in predictor.ahead:
            raise ExpertcastError(
                f"predictor {name} looks {list(predictor.ahead)} layers ahead, not {ahead}: give one of these as ahead"
            )
    view = traces.view
    parts = [
        _part(rows, view, predictors, ahead, residuals) for rows in traces.batches(split, _CHUNK, max_tokens=tokens)
    ]
    if not parts:
        raise ExpertcastError(f"split {split!r} holds no tokens: collect more text or choose another split")
    routes = Routes(
        view=view,
        **{name: _joined([getattr(part.routes, name) for part in parts]) for name in _COLUMNS},
    )
    document_T = torch.cat([part.document_T for part in parts])
    hints = {
        name: Hints(ahead=ahead, forecasts=_joined_forecasts([p.forecasts[name] for p in parts])) for name in predictors
    }
    return trace_of(view.shape, routes, document_T, prefill=prefill, batch=batch, hints=hints)


def trace_of(
    shape: ModelShape,
    routes: Routes,
    document_T: Tensor,
    *,
    prefill: int = PREFILL,
    batch: int = 1,
    hints: Mapping[str, Hints] | None = None,
) -> Trace:
    """The same from tensors; `document_T` names each token's document, neighbours belong together.

    Raises:
        ExpertcastError: too few documents of two tokens or more.
    """
    groups = list(_groups(document_T, batch))
    if not groups:
        raise ExpertcastError(f"batch={batch}: there are not so many documents of 2 tokens or more; give fewer")
    keys_LTK = [(layer * shape.experts + ids_TK).tolist() for layer, ids_TK in enumerate(routes.ids)]
    forwards = []
    for group in groups:
        cuts = [(document, document.start + min(prefill, len(document) // 2)) for document in group]
        rows_T = torch.cat([torch.arange(document.start, cut) for document, cut in cuts])
        forwards.append(_forward(keys_LTK, rows_T, len(group), fresh=True))
        for step in range(min(document.stop - cut for document, cut in cuts)):
            now = [cut + step for _, cut in cuts]
            rows = slice(now[0], now[0] + 1) if len(now) == 1 else torch.tensor(now)
            forwards.append(_forward(keys_LTK, rows, len(group), fresh=False))
    return Trace(shape=shape, forwards=forwards, routes=routes, hints=hints or {})


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


_COLUMNS = ("logits", "ids", "weights", "residual")


@dataclass(slots=True, kw_only=True)
class _Part:
    """Some rows of a trace."""

    routes: Routes
    document_T: Tensor
    forecasts: dict[str, dict[int, Forecast]]
    """By predictor and target layer."""


@torch.no_grad()
def _part(rows: TraceBatch, view: MoEView, predictors: Mapping[str, Predictor], ahead: int, residuals: bool) -> _Part:
    routed = [view[layer].route(rows.logits_TLE[:, layer]) for layer in range(len(view))]
    states = [rows.state(view, layer) for layer in range(len(view) - ahead)] if predictors else []
    forecasts = {
        name: {layer + ahead: predictor.forecast(state, ahead) for layer, state in enumerate(states)}
        for name, predictor in predictors.items()
    }
    kept = rows.residual_TLD if residuals else rows.residual_TLD[:, :, :0]
    routes = Routes(
        view=view,
        logits=[rows.logits_TLE[:, layer] for layer in range(len(view))],
        ids=[ids_TK for ids_TK, _ in routed],
        weights=[weights_TK for _, weights_TK in routed],
        residual=[kept[:, layer] for layer in range(len(view))],
    )
    return _Part(routes=routes, document_T=rows.document_T, forecasts=forecasts)


def _joined(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Per layer the rows of all parts, in memory of their own."""
    return [torch.cat(list(columns)) for columns in zip(*parts, strict=True)]


def _joined_forecasts(parts: Sequence[dict[int, Forecast]]) -> dict[int, Forecast]:
    return {
        layer: Forecast(
            layer=layer,
            logits_TE=torch.cat([part[layer].logits_TE for part in parts]),
            topk_ids_TK=torch.cat([part[layer].topk_ids_TK for part in parts]),
            topk_weights_TK=torch.cat([part[layer].topk_weights_TK for part in parts]),
        )
        for layer in parts[0]
    }
