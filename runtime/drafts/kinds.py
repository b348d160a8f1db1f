"""Kinds of drafts.

    int4, int8            all experts in ggml's blocks of 4 or 8 bits, on the device
    resident              resident experts replace absent ones
    drop, substitute, cascade, drop_cascade, cache_aware     a lossy policy, with its options
    speculate             the model executes the forecasts of the predictor

Source of int4 drafts: MoE-SpeQ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from expertcast.data.batch import RouterCall
from expertcast.data.packed_experts import form_for, matrices, pack_module, run_experts
from expertcast.predictors.messages import Progress
from expertcast.predictors.view import MoELayer, MoEView
from expertcast.runtime.drafts.prefetch import Schedule
from expertcast.runtime.engine.engine import Engine, Stage
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.links.base import Link
from expertcast.runtime.policies import CacheShape, Policies
from expertcast.runtime.storage.layout import expert_parameters


@dataclass
class PassDraft:
    """Draft by cheaper passes of the model itself, which share its key-value cache."""

    name: str
    """Name with options."""
    engine: Engine
    stage: Stage | None = None
    """Runs the MoE layers while drafting; None: the engine."""
    forecasts: bool = False
    """Whether all layers that have a forecast execute it while drafting."""
    nbytes: int = 0
    """Device memory of the draft in addition to the slots, in bytes."""

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Return a context manager in which forward passes of the model are draft passes."""
        with ExitStack() as undo:
            speculator = self.engine.speculator
            if self.forecasts:
                undo.callback(setattr, speculator, "layers", speculator.layers)
                speculator.layers = frozenset(range(len(speculator.view)))
            with self.engine.drafting(self.stage):
                yield


# Drafts that run the experts in another way


class QuantisedExperts:
    """Every layer's experts in ggml's blocks: Q8_0 in 8 bits, Q4_K or Q4_0 in 4. Biases stay as they are.

    Args:
        view: the model's MoE layers, resident or offloaded.
        views: returns a layer's parameters [E, ...] by name, in host memory, such as
            :meth:`expertcast.runtime.storage.store.ExpertStore.views`.
        precision: a name of :data:`.names.QUANTISED`.
        device: the device that computes; None: the routers' device.

    Raises:
        ExpertcastError: ggml is not installed.
    """

    def __init__(
        self, view: MoEView, views: Callable[[int], Mapping[str, Tensor]], precision: str = "int4",
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.layers: list[nn.Module] = []
        """A packed copy of each layer's experts module."""
        for layer in Progress(f"quantising experts to {precision}", unit="layer", steps=view):
            packed = object.__new__(type(layer.experts))  # copy.copy refuses modules of an offloaded model
            packed.__dict__.update(layer.experts.__dict__)
            there = device or next(layer.router.parameters()).device
            own = views(layer.index)
            packed._parameters = {name: nn.Parameter(each, requires_grad=False) for name, each in own.items()}
            pack_module(packed, layer.num_experts, int(precision.removeprefix("int")), there.type, "BF16")
            for name, parameter in packed._parameters.items():  # parts that stay as they are must not keep the store's
                packed._parameters[name] = nn.Parameter(parameter.to(there, copy=name in own), requires_grad=False)
            self.layers.append(packed)

    @property
    def nbytes(self) -> int:
        """Bytes of blocks and biases."""
        return sum(each.nbytes for layer in self.layers for each in layer._parameters.values() if each is not None)


def expected_bytes(view: MoEView, precision: str) -> int:
    """Return :attr:`QuantisedExperts.nbytes` before weights are loaded.

    Args:
        view: the model's MoE layers, on any device.
        precision: a name of :data:`.names.QUANTISED`.

    Raises:
        ExpertcastError: see :class:`QuantisedExperts`.
    """
    bits, total = int(precision.removeprefix("int")), 0
    for layer in view:
        packed = matrices(layer.experts, layer.num_experts)
        for name, value in expert_parameters(layer.experts, layer.num_experts).items():
            form = form_for(layer.experts, value, bits, rest="BF16") if name in packed else None
            total += value.nbytes if form is None else layer.num_experts * form.nbytes
    return total


class QuantisedStage:
    """Draft with all experts resident in less precision, which waits for no transfer."""

    def __init__(self, experts: QuantisedExperts, schedule: Schedule, link: Link) -> None:
        self._experts, self._schedule, self._link = experts, schedule, link

    def on_start(self, fresh: bool) -> None:
        self._link.follow()

    def on_router(self, call: RouterCall) -> None:
        self._schedule.routed(call)

    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        output_TD = run_experts(self._experts.layers[layer.index], hidden_TD, ids_TK, weights_TK)
        self._schedule.load()
        return output_TD


class PolicyStage:
    """Draft by lossy policies over the same slots, with the experts on the device."""

    def __init__(self, engine: Engine, policies: Policies, schedule: Schedule) -> None:
        shape, residency = engine.view.shape, engine.residency
        made = policies.make(
            CacheShape(layers=shape.layers, experts=shape.experts, top_k=shape.top_k, slots=engine.pool.count)
        )
        made.eviction = residency.eviction
        self.precisions = made.miss.precisions
        """Precisions of copies that the store holds beside the full experts."""
        self._residency, self._schedule = residency, schedule
        self._engine = Engine(
            link=residency.link, pool=engine.pool, speculator=Speculator(engine.view, None), policies=made,
            kernel=engine.kernel, residency=residency,
        )  # fmt: skip

    def on_start(self, fresh: bool) -> None:
        self._engine.go_on()
        self._engine.on_start(fresh)

    def on_router(self, call: RouterCall) -> tuple[Tensor, Tensor] | None:
        self._residency.only_arrived = True
        try:
            executed = self._engine.on_router(call)
        finally:
            self._residency.only_arrived = False
        self._schedule.routed(call)
        return executed

    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self._engine.run(layer, hidden_TD, ids_TK, weights_TK)
