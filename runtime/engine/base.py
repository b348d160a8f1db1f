"""What every engine is: it stands between a model's routers, its experts' modules and the slots.

Whatever runs the model calls :meth:`Engine.on_start` as a forward begins, :meth:`Engine.on_router` when a layer has
been routed and :meth:`Engine.run` in the place of its experts: for `transformers` models :mod:`.seam` and
:class:`expertcast.data.taps.RouterTaps` do. Nothing here, and nothing this stands on, knows what that is.

T tokens, D hidden size, E routed experts per layer, K experts per token, P = T x K token-expert pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from expertcast.data.router_call import RouterCall
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import MoELayer
from expertcast.runtime.engine.drift import DriftMonitor
from expertcast.runtime.engine.flow import LayerFlow
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.engine.tokens_ahead import LIKELY, TokenForecasts
from expertcast.runtime.links.base import Link
from expertcast.runtime.policies.settings import PolicySet
from expertcast.runtime.recording.observer import State, heard
from expertcast.runtime.recording.statistics import RunStatistics
from expertcast.runtime.storage.slots import SlotPool


class Kernel(Protocol):
    """Computes experts from slots: whose parameters are the pool's views [S, ...]."""

    def run(
        self,
        experts: nn.Module,
        hidden_TD: Tensor,
        slots_TK: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        slots: Sequence[int] | None = None,
    ) -> Tensor:
        """The experts' output [T, D].

        Args:
            experts: of the layer.
            hidden_TD, weights_TK: what the experts are given.
            slots_TK, ids_TK: where each token's experts lie, and which they are.
            slots: `slots_TK` (flat) on the host, if it is known there.
        """

    def run_pairs(self, experts: nn.Module, hidden_TD: Tensor, top_k: int, pairs: Tensor, slots: Tensor) -> Tensor:
        """Some pairs' own expert output [pairs, D], not weighted: a part of a step that is done in chunks.

        Args:
            experts, hidden_TD, top_k: of the whole step, whose P = T x K pairs are numbered token by token.
            pairs: which of them, in :func:`expertcast.runtime.engine.rows.row_order`.
            slots: where the pairs' experts lie.
        """

    def combine(self, output_PD: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        """All pairs' outputs, weighted and summed to [T, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine drives, all for one model."""

    link: Link
    """Attached to the pool."""
    pool: SlotPool
    speculator: Speculator
    policies: PolicySet
    kernel: Kernel
    tokens_ahead: TokenForecasts | None = None
    """Forecasts the next tokens' routing."""
    drift: DriftMonitor | None = None
    """Is told what was forecast and what was chosen, by an engine whose host knows."""
    keep: bool = True
    """A cache: False frees an expert's slot as soon as its layer has run."""
    likely: float = LIKELY
    """The least probability by a forecast of a whole token at which an expert is loaded early."""
    gated: bool = False
    """With a cache, make only forecasts that are expected to save more waiting than they cost."""


class Stage(Protocol):
    """What runs a model's MoE layers in an engine's place for some forwards, such as those that draft."""

    def on_start(self, fresh: bool, token_BS: Tensor | None = None) -> None:
        """As :meth:`Engine.on_start`."""

    def on_router(self, call: RouterCall) -> tuple[Tensor, Tensor] | None:
        """As :meth:`Engine.on_router`."""

    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """As :meth:`Engine.run`."""


class Ahead(Protocol):
    """What loads experts ahead of a verification, told how far it has come."""

    def routed(self, call: RouterCall) -> None:
        """A router has run, in a draft or in the verification."""

    def reached(self, layer: int, keys: Sequence[int]) -> None:
        """A layer is about to request these experts (distinct keys)."""

    def load(self) -> None:
        """A layer has made its requests: load what comes next."""


class Engine(ABC):
    """Runs a model's MoE layers from slots."""

    stats: RunStatistics
    stage: Stage | None = None
    """Runs the layers in this engine's place, while there is one."""
    ahead: Ahead | None = None
    """Loads experts ahead, while there is something to verify."""

    def __init__(self, parts: EngineParts) -> None:
        self._speculator, self._kernel, self._pool = parts.speculator, parts.kernel, parts.pool
        self._told = heard(parts.link.observer, "enter")
        """Asked before it is called on the hot path: nine calls that nobody hears are 4% of the work on a layer."""
        self.view = parts.speculator.view
        """The model's MoE layers."""
        self._experts = self.view.shape.experts
        self._pointers = {name: view.data_ptr() for name, view in self._pool.views.items()}
        self._halfway = False
        """A call began that moves experts and, as far as is known, did not end: books and slots may not agree."""
        self._complete = False
        """The last forward ran to its last layer."""

    def _enter(self, state: State, layer: int) -> None:
        if self._told is not None:
            self._told(state, layer)

    @property
    def flow(self) -> LayerFlow:
        """Policies and books, where the host has them.

        Raises:
            ExpertcastError: this engine keeps them on the device.
        """
        raise ExpertcastError("the books of this offload are on the device: it has no flow and no residency")

    @abstractmethod
    def limit(self, layer: int) -> int:
        """Distinct experts of a layer that a step may name at most to be run in one piece."""

    @abstractmethod
    def held(self, layer: int) -> list[int]:
        """A layer's experts (0..E-1) that are in slots or on their way there."""

    @contextmanager
    def drafting(self, stage: Stage | None) -> Iterator[None]:
        """Inside, forwards draft: they run in a stage where one is given, and may end before the last layer."""
        self.stage = stage
        try:
            yield
        except BaseException:
            self._halfway = True  # whatever was cut short
            raise
        finally:
            self.stage = None
        self._complete = True

    @property
    def is_halfway(self) -> bool:
        """Whether a call was cut short that moves experts: books and slots may not agree."""
        return self._halfway

    def go_on(self) -> None:
        """The next forward goes on where another engine of the model stopped."""
        self._complete, self._halfway = True, False

    def attach(self, layer: MoELayer) -> None:
        """Put the slot views in the place of a layer's parameters."""
        for name, view in self._pool.views.items():
            layer.experts._parameters[name] = nn.Parameter(view, requires_grad=False)

    @abstractmethod
    def on_start(self, fresh: bool, token_BS: Tensor | None = None) -> None:
        """A forward starts, with new texts if `fresh`; what an earlier one left that was cut short is cleared.

        `token_BS` are the ids of its tokens, None where it is given embeddings in their place.
        """

    @abstractmethod
    def on_router(self, call: RouterCall) -> tuple[Tensor, Tensor] | None:
        """A router has run: its layer's misses go out first, then its forecast is made and asked for.

        Returns:
            (ids, weights) that are executed in place of the router's, or None.
        """

    @abstractmethod
    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The layer's experts over their slots.

        Args:
            layer: which is attached.
            hidden_TD, ids_TK, weights_TK: what its experts are given.

        Raises:
            ExpertcastError: the layer's parameters are not the slots any more.
        """

    def _run_chunks(
        self, layer: MoELayer, hidden_TD: Tensor, weights_TK: Tensor, chunks: Iterable[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """The same products in several kernel calls, one reduction at the end.

        Args:
            layer, hidden_TD, weights_TK: as for :meth:`run`.
            chunks: pairs (0..P-1), in the order in which they are computed, with their slots. A chunk is read from
                its slots when it comes, and has been when the next one is asked for.
        """
        tokens, top_k = weights_TK.shape
        output_PD = hidden_TD.new_empty(tokens * top_k, hidden_TD.shape[1])
        for pairs, slots in chunks:
            output_PD[pairs] = self._kernel.run_pairs(layer.experts, hidden_TD, top_k, pairs, slots)
            self._enter("policy", layer.index)
        return self._kernel.combine(output_PD, weights_TK, hidden_TD.dtype)

    def _check_untouched(self, layer: MoELayer) -> None:
        for name, pointer in self._pointers.items():
            if layer.experts._parameters[name].data_ptr() != pointer:  # type: ignore[union-attr]
                raise ExpertcastError(
                    f"{layer.experts_name}.{name} was changed or moved while the model is offloaded: close the offload "
                    "first, then move or change the model"
                )
