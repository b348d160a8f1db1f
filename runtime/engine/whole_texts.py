"""Whole sequences through slots: many tokens at once, each expert read once, routing and bits of the resident model.

Collection and measurements of quality run this way, without the offload's forecasts and lossy policies. T tokens, D
hidden size, E routed experts per layer, K experts per token, S slots, G groups of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers.integrations.moe import grouped_mm_experts_forward

from expertcast.data.batch import RouterCall
from expertcast.data.experts import Answer, Inner, inner_activations
from expertcast.data.machine import run_alone, usable_processors
from expertcast.data.packed_experts import expanded_experts, packed_matrices, run_experts
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoELayer, MoEView, experts_digest
from expertcast.runtime.engine.engine import Engine, row_order
from expertcast.runtime.engine.kernels import SlotKernel
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.policies import CacheShape, Policies
from expertcast.runtime.storage.memory import trim_heap
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

MOST_TOKENS = 32_768
"""Largest number of tokens of one forward."""


class SlotExperts:
    """Experts of an offloaded model; implements :class:`expertcast.data.experts.Experts`.

    Args:
        engine: of the offload.
        store: holds the experts.
        room: bytes of the device's memory for activations.
        each: bytes of one token's activations in a layer.
    """

    def __init__(self, engine: Engine, store: ExpertStore, room: int, each: int) -> None:
        self._engine, self._store, self._room, self._each = engine, store, room, each

    @cached_property
    def view(self) -> MoEView:
        """The model's MoE layers, with the fingerprint of its experts where they are not packed."""
        view = self._engine.view
        if packed_matrices(view[0].experts):  # a predictor of the expanded model may forecast the packed one
            return view
        return replace(view, experts_known=experts_digest(map(self.weights, view)))

    def windows(self, window: int, beside: int = 0) -> int:
        """Return the number of windows whose activations fit into the memory for the longest sequence."""
        view, shape = self._engine.view, self._engine.view.shape
        # a collection captures residuals and logits, and keeps the experts' outputs until the forward's end
        captured = shape.layers * ((4 + view[0].dtype.itemsize) * shape.hidden + 4 * shape.experts)
        tokens = max(0, self._room - beside) // (captured + self._each)
        return max(1, min(tokens, MOST_TOKENS) // window)

    def answered(self, answers: Mapping[nn.Module, Answer]) -> AbstractContextManager[object]:
        """
        Raises:
            ExpertcastError: the offload cannot run whole texts.
        """
        return self._engine.drafting(_Stage(self._texts, answers))

    def reading(self) -> AbstractContextManager[object]:
        return self.answered({})

    def run(
        self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, inner: Inner | None = None
    ) -> Tensor:
        texts = self._texts
        texts.seen.inner = inner
        try:
            return texts.run(layer, hidden_TD, ids_TK, weights_TK)
        finally:
            texts.seen.inner = None

    def weights(self, layer: MoELayer, *names: str) -> Iterator[Mapping[str, Tensor]]:
        store, first = self._store, layer.index * layer.num_experts
        views = store.views(layer.index) if store.addressable else None

        def expanded(expert: int) -> Mapping[str, Tensor]:
            own = store.layout.views(store.block(first + expert), layer.index) if views is None else views
            parts = {name: tensor[0 if views is None else expert] for name, tensor in own.items()}
            return expanded_experts(layer.experts, parts, *names)

        some = usable_processors()
        with ThreadPoolExecutor(some, initializer=run_alone) as threads:  # a disk is read while others expand
            for begin in range(0, layer.num_experts, 2 * some):
                yield from threads.map(expanded, range(begin, min(begin + 2 * some, layer.num_experts)))

    @cached_property
    def _texts(self) -> _TextEngine:
        if self._engine.speculator.early is not None:
            raise ExpertcastError(
                "this offload's predictor follows the model for early attention, which whole sequences would disturb: "
                "offload without a predictor"
            )
        return _TextEngine(self._engine)


class _TextEngine(Engine):
    """Loads the routers' choices, and the next layer's experts while a layer computes, without forecasts.

    Args:
        engine: of the offload; shares its cache.
    """

    def __init__(self, engine: Engine) -> None:
        view, pool, residency = engine.view, engine.pool, engine.residency
        policies = Policies().make(
            CacheShape(layers=len(view), experts=view.shape.experts, top_k=view.shape.top_k, slots=pool.count)
        )
        policies.eviction = residency.eviction
        self.seen = _SeenKernel(pool, view.shape.experts)
        """Its `inner` receives the inner activations of every kernel call."""
        super().__init__(
            link=residency.link, pool=pool, speculator=Speculator(view, None), policies=policies, kernel=self.seen,
            residency=residency,
        )  # fmt: skip
        self.flow.most = view.shape.experts // 2
        self._other = engine

    def on_start(self, fresh: bool) -> None:
        self._inconsistent |= self._other.is_inconsistent
        super().on_start(fresh)

    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self._inconsistent = True
        self._begin(layer.index, ids_TK)
        self.flow.finish(layer.index)
        return super().run(layer, hidden_TD, ids_TK, weights_TK)


class _SeenKernel(SlotKernel):
    """transformers' grouped kernel over slots, with access to its inner activations.

    Args:
        experts: E.
    """

    def __init__(self, pool: SlotPool, experts: int) -> None:
        super().__init__(grouped_mm_experts_forward)
        self._pool, self._experts = pool, experts
        self.inner: Inner | None = None

    def run(
        self, experts: nn.Module, hidden_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, ids_TK: Tensor,
        slots: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        inner = self.inner
        if inner is None:
            return super().run(experts, hidden_TD, slots_TK, weights_TK, ids_TK, slots)
        order_P, slots_P, by_expert = row_order(ids_TK), slots_TK.reshape(-1), self.by_expert(experts, slots_TK)
        rows_P = slots_P[order_P] if by_expert else slots_P.sort().values
        found, count_G = rows_P.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
        keys = [self._pool.key_of(slot) for slot in found.tolist()]
        expert_G = torch.tensor([key % self._experts for key in keys if key is not None], device=slots_P.device)
        with inner_activations(experts, lambda inner_SI: inner(inner_SI, expert_G, count_G)):
            if by_expert:
                return run_experts(experts, hidden_TD, slots_TK, weights_TK, lambda: order_P, grouped=True)
            return super().run(experts, hidden_TD, slots_TK, weights_TK, ids_TK, slots)


class _Stage:
    """Runs forwards of whole sequences in the engine's place."""

    def __init__(self, engine: _TextEngine, answers: Mapping[nn.Module, Answer]) -> None:
        self._engine, self._answers = engine, answers

    def on_start(self, fresh: bool) -> None:
        self._engine.on_start(fresh)

    def on_router(self, call: RouterCall) -> None:
        """Return None: the router's choice is executed, and requested by :meth:`run`."""

    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        trim_heap()  # the C library keeps freed activations that lie between others
        answer = self._answers.get(layer.experts)
        if answer is not None:
            return answer(hidden_TD, ids_TK, weights_TK)
        return self._engine.run(layer, hidden_TD, ids_TK, weights_TK)
