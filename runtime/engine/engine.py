"""One offloaded forward, layer by layer.

The caller runs the model. It calls :meth:`Engine.on_start` when a forward begins, :meth:`Engine.on_router` when a
layer's router has run, and :meth:`Engine.run` in place of the layer's experts. :class:`Engine` takes these steps:

    on_router   decide      routing and miss policies: experts that run, and their precision
                begin       request the layer's experts, misses before anything else
                forecast    make a forecast, if it pays
                hint        pre-eviction, then prefetches
                finish      loads without forecasts of this layer; the next layer's, where most experts run
    run         wait, compute, release      chunk by chunk

T tokens, B sequences, D hidden size, E routed experts per layer, K experts per token, P = T x K token-expert pairs.
An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from expertcast.data.batch import RouterCall
from expertcast.data.packed_experts import combine, is_packed, of_few
from expertcast.predictors.base import Forecast
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.view import ModelShape, MoELayer, MoEView
from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.links.base import Link
from expertcast.runtime.links.driver import Readback
from expertcast.runtime.policies.eviction import MOST, PROMPT_ROWS
from expertcast.runtime.policies.miss import Lookup, MissDecision
from expertcast.runtime.policies.prefetch import Candidates, NoPrefetch, by_rank
from expertcast.runtime.policies.routing import RouterOutput, Standard
from expertcast.runtime.policies.settings import ALWAYS, AUTO, PolicySet
from expertcast.runtime.recording.recorder import RunStatistics, State
from expertcast.runtime.storage.layout import FULL
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.transfer import Sent

if TYPE_CHECKING:
    from expertcast.runtime.drafts.prefetch import Schedule
    from expertcast.runtime.engine.forecasting import ForecastGovernor, Pace
    from expertcast.runtime.engine.host import HostExperts
    from expertcast.runtime.engine.speculation import Speculator

# Token-expert pairs


def row_order(ids_TK: Tensor) -> Tensor:
    """Return the order [P] of token-expert pairs in the kernels: by expert, ties as torch's sort leaves them."""
    return torch.sort(ids_TK.reshape(-1)).indices


@dataclass(slots=True)
class Plan:
    """One run of a layer: its experts, their slots, and the chunks in which they are computed."""

    layer: int
    ids_TK: Tensor
    ids: list[int] | None
    """`ids_TK`, flat, where the host has them."""
    pairs: Mapping[int, int] | None
    """By key, its number among the T x K ids, where these are many; None: they are few, and the host has them."""
    chunks: list[list[int]]
    """Distinct keys, chunk by chunk; one chunk when all fit the slots."""
    precision: dict[int, str] | None
    """Precision by key, where it may be less than full."""
    slots: list[int] | None = None
    """Slot of each of the T x K ids, when they are few and one chunk."""
    sent: Sent | None = None
    """Slots of the T x K ids in flight to the device, or of all experts where the ids are many; for one chunk."""
    on_host: Sequence[int] = ()
    """Pairs whose experts the host computes. `sent` then has the other pairs, their slots, and these pairs."""


# Routing rewritten by miss policies: ids and weights, T rows of K


def named(ids: list[list[int]], weights: list[list[float]]) -> list[list[int]]:
    """Return ids in which places of weight 0 name the row's heaviest expert, so that no other is requested."""
    named = []
    for row, values in zip(ids, weights, strict=True):
        heaviest = row[max(range(len(row)), key=values.__getitem__)]
        named.append([expert if weight else heaviest for expert, weight in zip(row, values, strict=True)])
    return named


def rewritten(
    ids: list[list[int]], weights: list[list[float]], verdict: MissDecision
) -> tuple[list[list[int]], list[list[float]]]:
    """Return ids and weights with dropped experts at weight 0 and missing ones replaced by their substitutes."""
    new_weights = [
        [0.0 if expert in verdict.dropped else weight for expert, weight in zip(row, values, strict=True)]
        for row, values in zip(ids, weights, strict=True)
    ]
    new_ids = [[verdict.substitute.get(expert, expert) for expert in row] for row in ids]
    return named(new_ids, new_weights), new_weights


# The flow, which the simulator shares


def _pieces(keys: list[int], size: int) -> list[list[int]]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]


@dataclass(slots=True)
class Decision:
    """Experts that a layer executes, on the host."""

    ids: list[list[int]]
    """T rows of K."""
    weights: list[list[float]]
    precision: dict[int, str]
    """Precision by key; full where a key is missing."""
    changed: bool
    """Whether ids or precision differ from the router's."""


class LayerFlow:
    """Policies over a cache, shared by the engine and the simulator: routing is lists of ids, and no expert computes.

    Only the thread that runs the model may call it.

    Args:
        residency: experts in slots and in flight.
        policies: all of one model.
        shape: of the model.
        view: the model's MoE layers; needed by policies that route anew.
        rungs: recall@k, where it is known, by name of each way to forecast: a governor chooses between them in decode
            steps; None: all forecasts are made; empty: only executed forecasts are.
    """

    def __init__(
        self, residency: ExpertCache, policies: PolicySet, shape: ModelShape, *, view: MoEView | None = None,
        rungs: Mapping[str, float | None] | None = None,
    ) -> None:  # fmt: skip
        self.residency, self.policies = residency, policies
        self._view = view
        self._experts = shape.experts
        self._last = shape.layers - 1
        self._pre_evicted: set[int] = set()
        """Layers of the running forward for which a forecast freed slots."""
        self._reroutes = not isinstance(policies.routing, Standard)
        self.decides = self._reroutes or policies.miss.lossy
        """Whether :meth:`decide` can change the routing: then it must be called, with host copies of the routing."""
        self.reads_scores = policies.eviction.reads_scores
        """Whether :meth:`see` must be called."""
        link = residency.link
        self._readback = None if link.driver is None else Readback(link.driver, link.progress)
        """On CUDA."""
        self._streams = link.overlaps and not isinstance(policies.prefetch, NoPrefetch)
        self.most = shape.experts
        """Largest number of a layer's experts that run at once: smaller calls of the kernel need less memory."""
        self.splits = True
        """Whether experts that fit the slots may run in several chunks; False: the kernel runs none in parts."""
        self._few = max(shape.top_k, shape.experts // 8)
        """Experts that are loaded at a time where others take their slots at once."""
        self._executed = 0
        """Experts of the running layer."""
        self._whole = True
        """Whether the running layer runs in one chunk."""
        self._missing, self._found, self._chunks_left = 0, 0, 0
        """Counts of the running layer: experts without a slot, found by forecasts, chunks not requested yet."""
        self._rungs = rungs
        self._pace: Pace | None = None
        if rungs:
            from expertcast.runtime.engine.forecasting import Pace

            self._pace = Pace(residency, shape.layers)
        self._governors: dict[int, ForecastGovernor] = {}
        """By the bits of the number of sequences, on which the cost of forecasts depends."""
        self._latest: ForecastGovernor | None = None
        """Governor of the latest decode step."""
        self.governor: ForecastGovernor | None = None
        """Decides on the forecasts of the running decode step; None: all forecasts that are due are made."""
        self._weighs = False
        """Whether this step makes forecasts: a step without any spends no time on observing layers."""
        self.host: HostExperts | None = None
        """Computes missing experts of decode steps; None: all are copied."""
        self.left: list[int] = []
        """Keys of the running layer that the host computes."""

    def read(self, *tensors: Tensor) -> list[Any]:
        """Return the values of some tensors; on CUDA after all launched work, while the link goes on. There the host
        waits for copies here, as far as compute waits for them."""
        if self._readback is None:
            return [tensor.tolist() for tensor in tensors]
        residency, link, host = self.residency, self.residency.link, self.host
        if host is not None:
            link.progress()  # copies that are there already are not waited for
            host.reads_s = link.clock()
        start = link.clock()
        values = self._readback.values(tensors)
        residency.waited_s += max(0.0, link.awaited_until_s - start)
        return values

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the host, as :meth:`read` returns its values."""
        return tensor if self._readback is None else self._readback.start(tensor).tensor()

    def start_pass(self, fresh: bool) -> None:
        """Start a forward; `fresh`: with new sequences."""
        self.residency.start_pass(fresh)
        self._pre_evicted.clear()
        self.governor, self._weighs = None, False
        if self._pace is not None:
            self._pace.start_pass(fresh)
        if self.host is not None:
            self.host.start_pass()

    def start_step(self, sequences: int) -> None:
        """Mark the forward as a decode step of so many sequences; its first layer has been reached."""
        if not self._rungs or self._pace is None:
            return
        about = sequences.bit_length()
        self.governor = self._governors.get(about)
        if self.governor is None:
            from expertcast.runtime.engine.forecasting import ForecastGovernor

            self.governor = self._governors[about] = ForecastGovernor(self.residency, self._pace, self._rungs)
        self._latest = self.governor
        self.governor.start()
        self._weighs = self.governor.rung is not None

    def coming(self, own: int) -> int | None:
        """Return the expected rung of the next forward's forecasts; None: it makes none.

        Args:
            own: as for :meth:`choose`.
        """
        if self._latest is not None:
            return self._latest.rung
        return own if self._rungs is None or self._rungs else None

    def forecasts_report(self) -> Json:
        """Return `forecasts`: each governor's report by the least number of its sequences (1, 2, 4 ...); empty where no
        governor decided."""
        found = {str(1 << about >> 1): own.report() for about, own in self._governors.items()}
        return {"forecasts": found} if found else {}

    def see(self, layer: int, logits_TE: Tensor) -> None:
        """Pass a router's scores on to the eviction policy, if it reads them."""
        self.policies.eviction.by_layer[layer].see_scores(layer, self._mean_probability(logits_TE))

    def _mean_probability(self, logits_TE: Tensor) -> list[float]:
        probability_E: list[float] = self.read(logits_TE.float().softmax(dim=-1).mean(dim=0))[0]
        return probability_E

    def decide(
        self, layer: int, logits_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor, *, routed: bool = True
    ) -> Decision:
        """Apply routing and miss policies to a layer's routing.

        Args:
            layer, logits_TE: MoE layer, and the scores of its router.
            ids_TK, weights_TK: routing to change.
            routed: whether the router chose `ids_TK`; a forecast's experts are not chosen again.
        """
        held = self.residency.held(layer)
        chosen = self._rerouted(layer, held, logits_TE, ids_TK, weights_TK) if self._reroutes and routed else None
        given, *own = self.read(ids_TK, *(chosen or (weights_TK,)))
        weights = own[-1]
        ids = given if chosen is None else named(own[0], weights)
        verdict = self._verdict(layer, logits_TE, ids, weights, held)
        if chosen is None and verdict is None:
            return Decision(ids, weights, {}, changed=False)
        if verdict is not None and (verdict.dropped or verdict.substitute):
            ids, weights = rewritten(ids, weights, verdict)
        left_out = {expert for row in given for expert in row}.difference(expert for row in ids for expert in row)
        self.residency.stats.layers[layer].skipped += len(left_out)
        first = layer * self._experts
        precision = {} if verdict is None else {first + expert: name for expert, name in verdict.precision.items()}
        self._check(layer, ids, precision)
        return Decision(ids, weights, precision, changed=True)

    def _check(self, layer: int, ids: list[list[int]], precision: Mapping[int, str]) -> None:
        """Raise :class:`ExpertcastError` for experts that a layer lacks, or precisions that the store may lack."""
        wrong = [expert for row in ids for expert in row if not 0 <= expert < self._experts]
        unknown = set(precision.values()).difference((FULL, *self.policies.miss.precisions))
        if wrong or unknown:
            raise ExpertcastError(
                f"routing policy {self.policies.routing.name!r} or miss policy {self.policies.miss.name!r} chose "
                f"{', '.join(map(str, (*wrong, *unknown)))} at layer {layer}: give experts from 0 to "
                f"{self._experts - 1} and precisions that the policy declares"
            )

    def _rerouted(
        self, layer: int, held: Mapping[int, str], logits_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        assert self._view is not None, "policies that route need the model's own routers"
        unserved = self.policies.pre_eviction.active and layer not in self._pre_evicted
        return self.policies.routing.route(
            RouterOutput(
                layer=self._view[layer], logits_TE=logits_TE, ids_TK=ids_TK, weights_TK=weights_TK,
                cached=held, read=self.read,
                available=self._experts if unserved else self.residency.free(layer),
            )
        )  # fmt: skip

    def _verdict(
        self, layer: int, logits_TE: Tensor, ids: list[list[int]], weights: list[list[float]], held: Mapping[int, str]
    ) -> MissDecision | None:
        if not self.policies.miss.lossy or all(held.get(expert) == FULL for row in ids for expert in row):
            return None
        return self.policies.miss.decide(
            Lookup(
                layer=layer, ids=ids, weights=weights, held=held, free=self.residency.free(layer),
                probabilities=lambda: self.read(logits_TE.float().softmax(dim=-1))[0],
            )
        )  # fmt: skip

    def begin(
        self, layer: int, keys: list[int], precision: Mapping[int, str] | None = None, *, decodes: bool = False
    ) -> list[list[int]]:
        """Request the distinct keys that a layer executes; return them in chunks that fit the slots.

        The first chunk is requested; the caller requests chunk i + 1 before it waits for chunk i (:meth:`request`), or
        with a single slot after it has released chunk i. In steps that decode the host may compute some (:attr:`left`).
        """
        if self.residency.observer is not None:
            self.residency.observer.needed(layer, keys)
        self.residency.start_layer(layer, keys)
        if self._pace is not None and self._weighs:
            self._pace.reached(layer)
        self._executed = len(keys)
        self.left = []
        if self.host is not None and decodes and len(keys) <= min(self.residency.limit(layer), self.most):
            self.left = self.host.choose(keys)
        chunks = [[key for key in keys if key not in self.left]] if self.left else self._chunked(layer, keys)
        self._whole = len(chunks) == 1
        self._missing, self._found, self._chunks_left = len(self.left), 0, len(chunks)
        self.request(layer, chunks[0], precision)
        return chunks

    def request(self, layer: int, keys: list[int], precision: Mapping[int, str] | None = None) -> None:
        """Request a chunk of the running layer."""
        misses, found = self.residency.request(keys, precision) if keys else (0, 0)
        self._missing += misses
        self._found += found
        self._chunks_left -= 1
        if self.governor is not None and not self._chunks_left:
            self.governor.requested(layer, self._missing, self._found)

    def _chunked(self, layer: int, keys: list[int]) -> list[list[int]]:
        """Split a layer's keys into chunks of at most half the slots: one loads while another computes.

        Experts that are there come first. In a scan without free slots for the others, these take turns in a few.
        """
        limit = min(self.residency.limit(layer), self.most)
        scans = self.splits and self.policies.eviction.by_layer[layer].scans
        if len(keys) <= limit and not scans:
            return [keys]
        ready = [key for key in sorted(keys) if self.residency.is_ready(key)]
        others = sorted(set(keys).difference(ready))
        size = few = max(1, limit // 2)
        if scans and len(others) > max(self._few, self.residency.free(layer)):
            few = min(size, self._few)
        elif len(keys) <= limit:
            return [keys]
        return [*_pieces(ready, size), *_pieces(others, few)]

    def hint(self, forecast: Forecast, ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> None:
        """Act on a forecast for a later layer, with its ids and weights (T rows of K) on the host."""
        wanted = Candidates(forecast, ids, weights, self.to_host)
        layer, policies = forecast.layer, self.policies
        if policies.eviction.reads_forecasts:
            policies.eviction.by_layer[layer].see_forecast(layer, self._mean_probability(forecast.logits_TE))
        if policies.pre_eviction.active:
            self._pre_evict(wanted)
        experts = policies.prefetch.experts(wanted)
        if experts and not 0 <= min(experts) <= max(experts) < self._experts:
            raise ExpertcastError(
                f"prefetch policy {policies.prefetch.name!r} chose experts {list(experts)} of layer {layer}: give "
                f"numbers from 0 to {self._experts - 1}"
            )
        self.prefetch(layer, experts)

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Prefetch a later layer's experts (0..E-1), most needed first."""
        first = layer * self._experts
        keys = [first + expert for expert in experts]
        if self.host is not None and (room := self.host.room()) is not None:
            lacking = [key for key in keys if not self.residency.holds(key)]
            keys = keys[: keys.index(lacking[room])] if room < len(lacking) else keys
        self.residency.prefetch(keys)

    def _pre_evict(self, wanted: Candidates) -> None:
        first = wanted.layer * self._experts
        predicted = {expert for row in wanted.ids for expert in row}
        resident = sum(self.residency.holds(first + expert) for expert in predicted)
        probability_E = self._mean_probability(wanted.forecast.logits_TE)
        target = self.policies.pre_eviction.release_target(probability_E, predicted, resident)
        self.residency.free_up(wanted.layer, target, {first + expert for expert in predicted})
        self._pre_evicted.add(wanted.layer)

    def stream(self, layer: int) -> None:
        """Load a chunk of the next layer's experts after the last chunk of a layer that runs most of its experts, as in
        prefills: the next layer runs most of its own, too."""
        following = layer + 1
        if not self._streams or self._executed < MOST * self._experts or layer == self._last:
            return
        if self.residency.is_prefetched_for(following):
            return
        keys = list(range(following * self._experts, (following + 1) * self._experts))
        chunks = self._chunked(following, keys)
        missing = (chunk for chunk in chunks if not self.residency.holds(chunk[-1]))
        self.residency.prefetch(next(missing, chunks[0]), streamed=True)

    def choose(self, target: int, own: int, *, executes: bool = False) -> int | None:
        """Return the rung for the forecast of a layer; None: no forecast is made.

        Args:
            target: the layer.
            own: the predictor itself, which makes the forecasts where there is no governor.
            executes: whether the layer executes a forecast by `own`.
        """
        if self.governor is not None:
            return self.governor.choose(target)
        return own if executes or self._rungs is None or self._rungs else None

    def forecast(self, target: int, rung: int, seconds: float, *, compared: bool = False) -> None:
        """Count a rung's forecast for a layer, which took the model's thread so long, prefetching included; `compared`:
        the step has traced blocks of early attention."""
        if self._pace is not None:
            self._pace.forecast(seconds)
        if self.governor is not None:
            self.governor.made(target, rung, seconds, compared=compared)

    def finish(self, layer: int) -> None:
        """End a layer's forecasts: loads without a forecast follow their prefetches."""
        if self._whole:
            self.stream(layer)
        if self.host is not None:
            self.host.end()


# Engines


class Kernel(Protocol):
    """Computes experts whose parameters are the pool's views [S, ...]."""

    def run(
        self,
        experts: nn.Module,
        hidden_TD: Tensor,
        slots_TK: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        slots: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the experts' output [T, D].

        Args:
            experts: of the layer.
            hidden_TD, weights_TK: arguments of the experts.
            slots_TK, ids_TK: slots and ids of each token's experts.
            slots: `slots_TK` (flat) on the host, if it is known there.
        """

    def run_pairs(self, experts: nn.Module, hidden_TD: Tensor, top_k: int, pairs: Tensor, slots: Tensor) -> Tensor:
        """Return the unweighted expert output [pairs, D] of some pairs, for a step in chunks.

        Args:
            experts, hidden_TD, top_k: of the whole step, whose P = T x K pairs are numbered token by token.
            pairs: numbers of pairs, in :func:`expertcast.runtime.engine.engine.row_order`.
            slots: of the pairs' experts.
        """


class Stage(Protocol):
    """Runs a model's MoE layers in an engine's place for some forwards, such as drafts."""

    def on_start(self, fresh: bool) -> None:
        """See :meth:`Engine.on_start`."""

    def on_router(self, call: RouterCall) -> tuple[Tensor, Tensor] | None:
        """See :meth:`Engine.on_router`."""

    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """See :meth:`Engine.run`."""


_FEW_IDS = 512
"""Largest number of ids for which a list is faster than a table of all experts."""
_FEW_TOKENS = 16
"""Largest number of tokens of a sequence in steps whose missing experts the host may compute: those of drafts too."""


class Engine:
    """Runs a model's MoE layers from slots. The host reads every layer's routing back.

    Args:
        link: attached to the pool.
        pool: the slots.
        speculator: makes forecasts.
        policies: of eviction, prefetches, misses and routing.
        kernel: computes experts in slots.
        keep: whether experts stay in slots; False frees an expert's slot as soon as its layer has run.
        forecasts: forecasts to make: all (always), none (never), or those that save more waiting than they cost (auto).
        recall: recall@k of the ways to forecast by name, where it is known.
        residency: cache that is shared with another engine of the model; None: a cache of its own.
    """

    stage: Stage | None = None
    """Runs the layers in this engine's place, while there is one."""
    ahead: Schedule | None = None
    """Loads experts ahead, while there is something to verify."""

    def __init__(
        self, *, link: Link, pool: SlotPool, speculator: Speculator, policies: PolicySet, kernel: Kernel,
        keep: bool = True, forecasts: str = ALWAYS, recall: Mapping[str, float] | None = None,
        residency: ExpertCache | None = None,
    ) -> None:  # fmt: skip
        shape = speculator.view.shape
        self.speculator, self.kernel, self.pool, self.view = speculator, kernel, pool, speculator.view
        self._enter: Callable[[State, int], object] = dict[State, object]().get
        """Reports the compute stream's new state and layer to the observer; without one, it does nothing, in C."""
        if link.observer is not None:
            self._enter = link.observer.enter
        self._experts = shape.experts
        self._pointers = [
            {name: view.data_ptr() for name, view in pool.views_of(layer.index).items()} for layer in self.view
        ]
        self._inconsistent = False
        """Whether a call that moves experts began and did not end: records and slots may not agree."""
        self._complete = False
        """Whether the last forward reached its last layer."""
        self._drafts = False
        """Whether forwards are drafts: they execute all forecasts, and a governor learns nothing from them."""
        if residency is None:
            stats = RunStatistics(shape.layers)
            residency = ExpertCache(pool, link, policies.eviction, stats, experts=shape.experts, keep=keep)
        self.residency = residency
        self._forecasts = speculator.predictor is not None
        rungs = self._rungs(forecasts, recall or {}, policies)
        self.flow = LayerFlow(residency, policies, shape, view=speculator.view, rungs=rungs)
        self._last = shape.layers - 1
        self._known: dict[int, list[int]] = {}
        """Ids (flat) of forecasts to execute, by target layer, where the host has them."""
        self._plan: Plan | None = None
        if policies.prefetch.first is not None and not policies.evicts_by_forecasts:
            speculator.hint_only(policies.prefetch.first)

    @property
    def stats(self) -> RunStatistics:
        """Counters of the cache."""
        return self.residency.stats

    @contextmanager
    def drafting(self, stage: Stage | None) -> Iterator[None]:
        """Run forwards as drafts in the context, in `stage` unless it is None; they may end before the last layer."""
        self.stage, self._drafts = stage, True
        try:
            yield
        except BaseException:
            self._inconsistent = True  # whatever was cut short
            raise
        finally:
            self.stage, self._drafts = None, False
        self._complete = True

    @property
    def is_inconsistent(self) -> bool:
        """Whether a call that moves experts was interrupted: records and slots may not agree."""
        return self._inconsistent

    def go_on(self) -> None:
        """Continue in the next forward where another engine of the model stopped."""
        self._complete, self._inconsistent = True, False

    def attach(self, layer: MoELayer) -> None:
        """Put the slot views in the place of a layer's parameters."""
        for name, view in self.pool.views_of(layer.index).items():
            layer.experts._parameters[name] = nn.Parameter(view, requires_grad=False)

    def on_start(self, fresh: bool) -> None:
        """Start a forward, with new sequences if `fresh`, and clear the state of an interrupted one."""
        if self.stage is not None:
            self.stage.on_start(fresh)
            return
        self.residency.link.follow()
        self._plan = None
        self._known.clear()
        halfway, self._inconsistent = self._inconsistent, True
        complete, self._complete = self._complete, False
        if halfway:
            self.residency.reset()
        elif fresh or not complete:
            self.residency.abandon()
        self.flow.start_pass(fresh)
        self._inconsistent = False
        if self._forecasts:
            self.speculator.start(fresh, self.flow.coming(len(self.speculator.rungs) - 1))

    def on_router(self, call: RouterCall) -> tuple[Tensor, Tensor] | None:
        """Request a routed layer's misses, then forecast a later layer and prefetch.

        Returns:
            (ids, weights) to execute in place of the router's, or None.
        """
        if self.stage is not None:
            return self.stage.on_router(call)
        self._inconsistent = True
        if self.ahead is not None:
            self.ahead.routed(call)
        layer, flow = call.layer, self.flow
        self._enter("policy", layer)
        if layer == 0 and call.tokens == 1 and not self._drafts:
            flow.start_step(call.sequences)
        if self.residency.observer is not None:
            self.residency.observer.routed(layer, call.residual_TD, call.logits_TE)
        executed = self.speculator.executed(call) if self._forecasts else None
        ids_TK = call.ids_TK if executed is None else executed[0]
        known, precision = self._known.pop(layer, None), None
        ids = None if executed is None else known
        if flow.reads_scores:
            flow.see(layer, self.speculator.executed_logits(call, executed))
        if call.tokens > 1 and flow.policies.eviction.reads_routing:
            (rows,) = self.flow.read(ids_TK[-PROMPT_ROWS:])
            flow.policies.eviction.by_layer[layer].see_routing(layer, rows)
        if flow.decides:
            executed, ids, precision = self._decide(call, executed)
            ids_TK = call.ids_TK if executed is None else executed[0]
        self._begin(layer, ids_TK, ids, precision, decodes=call.tokens <= _FEW_TOKENS)
        if self._forecasts:
            self._forecast(call, executed)
        flow.finish(layer)
        self._enter("compute", layer)
        self._inconsistent = False
        return executed

    def _rungs(
        self, forecasts: str, recall: Mapping[str, float], policies: PolicySet
    ) -> Mapping[str, float | None] | None:
        """Return recall@k by name of the ways to forecast; None: all forecasts that are due are made; empty: only
        executed forecasts are."""
        if forecasts == ALWAYS or (forecasts == AUTO and policies.evicts_by_forecasts):
            return None
        useful = self.residency.link.overlaps and not isinstance(policies.prefetch, NoPrefetch)
        names = [rung.predictor.name for rung in self.speculator.rungs] if forecasts == AUTO and useful else []
        found = {name: recall.get(name) for name in names}
        executed = names[-1:] if self.speculator.layers else ()
        return found | dict.fromkeys(executed, 1.0)

    def _decide(
        self, call: RouterCall, executed: tuple[Tensor, Tensor] | None
    ) -> tuple[tuple[Tensor, Tensor] | None, list[int], dict[int, str]]:
        """Return the routing after routing and miss policies (None: unchanged), its ids, flat, and their precision."""
        ids_TK, weights_TK = (call.ids_TK, call.weights_TK) if executed is None else executed
        logits_TE = self.speculator.executed_logits(call, executed)
        decision = self.flow.decide(call.layer, logits_TE, ids_TK, weights_TK, routed=executed is None)
        if decision.changed:
            executed = (
                torch.tensor(decision.ids, dtype=ids_TK.dtype, device=ids_TK.device),
                torch.tensor(decision.weights, dtype=weights_TK.dtype, device=weights_TK.device),
            )
        return executed, list(chain.from_iterable(decision.ids)), decision.precision

    def _forecast(self, call: RouterCall, executed: tuple[Tensor, Tensor] | None) -> None:
        """Make the forecast that is due at a layer.

        On CUDA the host waits for a forecast before it launches the layer's experts, so that the link has prefetches
        queued when it ends the layer's own copies.
        """
        speculator, flow = self.speculator, self.flow
        target = speculator.due(call, executed)
        if target is None:
            return
        own = len(speculator.rungs) - 1
        rung = flow.choose(target, own, executes=target in speculator.layers)
        if rung is None:
            return
        clock = self.residency.link.clock
        start = clock()
        self._enter("forecast", call.layer)
        ids_TN = speculator.hint(call, rung)
        forecast = speculator.forecast(call, rung) if ids_TN is None else None
        self._enter("policy", call.layer)
        if ids_TN is not None:
            (rows,) = flow.read(ids_TN)
            flow.prefetch(target, by_rank(rows))
        elif forecast is not None:
            ids, weights = flow.read(forecast.topk_ids_TK, forecast.topk_weights_TK)
            if target in speculator.layers:
                self._known[target] = list(chain.from_iterable(ids))
            flow.hint(forecast, ids, weights)
        else:
            return
        early = speculator.early
        flow.forecast(target, rung, clock() - start, compared=early is not None and early.compared)

    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the output of a layer's experts, computed from slots.

        Args:
            layer: an attached layer.
            hidden_TD, ids_TK, weights_TK: arguments of its experts.

        Raises:
            ExpertcastError: the layer's parameters are not the slots any more.
        """
        self._inconsistent = True
        self._enter("policy", layer.index)
        self._check_untouched(layer)
        plan = self._plan
        if plan is None or plan.layer != layer.index or not (plan.ids_TK is ids_TK or torch.equal(plan.ids_TK, ids_TK)):
            plan = self._begin(layer.index, ids_TK)
        self._plan = None
        count = self.residency.stats.layers[layer.index]
        count.steps += 1
        count.chunks += len(plan.chunks)
        if plan.on_host:
            output_TD = self._run_beside(layer, plan, hidden_TD, weights_TK)
        elif self.residency.link.driver is None and (late := self._late(layer, plan)):
            output_TD = self._run_late_last(layer, plan, hidden_TD, weights_TK, late)
        elif len(plan.chunks) == 1:
            output_TD = self._run_whole(layer, plan, hidden_TD, ids_TK, weights_TK)
        else:
            output_TD = self._run_chunks(layer, hidden_TD, weights_TK, self._chunks(plan, ids_TK.reshape(-1)))
        self._complete = layer.index == self._last
        if self._complete and self.flow.governor is not None:
            self.flow.governor.end()
        self._enter("compute", layer.index + 1)
        self._inconsistent = False
        return output_TD

    def _begin(
        self, layer: int, ids_TK: Tensor, ids: list[int] | None = None, precision: dict[int, str] | None = None, *,
        decodes: bool = False,
    ) -> Plan:  # fmt: skip
        """Request the experts that a layer executes.

        Args:
            layer, ids_TK: its experts.
            ids: `ids_TK`, flat, where the host has them already.
            precision: by key, where it may be less than full.
            decodes: whether the step has few tokens of each sequence.
        """
        first = layer * self._experts
        if ids_TK.numel() <= _FEW_IDS:
            pairs = None
            if ids is None:
                (rows,) = self.flow.read(ids_TK)
                ids = list(chain.from_iterable(rows))
            distinct = [first + expert for expert in dict.fromkeys(ids)]
        else:
            ids_P = ids_TK.reshape(-1).long()
            counts_E = ids_P.new_zeros(self._experts).scatter_add_(0, ids_P, torch.ones_like(ids_P))
            (counts,) = self.flow.read(counts_E)  # torch.unique would keep the host from the link
            pairs = {first + expert: count for expert, count in enumerate(counts) if count}
            distinct = list(pairs)
        if self.ahead is not None:
            self.ahead.reached(layer, distinct)
        chunks = self.flow.begin(layer, distinct, precision, decodes=decodes and pairs is None)
        plan = self._plan = Plan(layer, ids_TK, ids, pairs, chunks, precision)
        if len(chunks) == 1:
            self._send_slots(plan)
        if self.ahead is not None:
            self.ahead.load()
        return plan

    def _send_slots(self, plan: Plan) -> None:
        """Send slot numbers to the device before prefetches are submitted: they would wait for those copies."""
        if plan.pairs is not None:
            plan.sent = self._send_table(plan.layer, plan.chunks[0])
        else:
            assert plan.ids is not None
            slot_of, first = self.pool.slots, plan.layer * self._experts
            if self.flow.left:
                self._send_pairs(plan, first)
                return
            plan.slots = [slot_of[first + expert] for expert in plan.ids]
            plan.sent = self.residency.link.send(plan.slots)

    def _send_pairs(self, plan: Plan, first: int) -> None:
        """Divide the pairs between device and host, each part in :func:`row_order`, and send them."""
        ids, left = plan.ids or [], set(self.flow.left)
        order = (
            range(len(ids)) if len(plan.ids_TK) == 1 else row_order(torch.tensor(ids, dtype=plan.ids_TK.dtype)).tolist()
        )
        plan.on_host = [pair for pair in order if first + ids[pair] in left]
        here = [pair for pair in order if first + ids[pair] not in left]
        slots = [self.pool.slots[first + ids[pair]] for pair in here]
        plan.sent = self.residency.link.send([*here, *slots, *plan.on_host])

    def _run_beside(self, layer: MoELayer, plan: Plan, hidden_TD: Tensor, weights_TK: Tensor) -> Tensor:
        """Run a layer while the host computes some of its experts; the sums are those of :meth:`_run_chunks`."""
        (keys,) = plan.chunks
        host, (tokens, top_k), residency = self.flow.host, weights_TK.shape, self.residency
        assert host is not None
        assert plan.ids is not None
        assert plan.sent is not None
        there = host.start(layer, hidden_TD, top_k, plan.on_host, [plan.ids[pair] for pair in plan.on_host])
        sent, here = plan.sent.take(), tokens * top_k - len(plan.on_host)
        output_PD = hidden_TD.new_empty(tokens * top_k, hidden_TD.shape[1])
        if keys:
            self._wait(layer.index, keys)
            start, pairs = residency.link.clock(), sent[:here]
            output_PD[pairs] = self.kernel.run_pairs(layer.experts, hidden_TD, top_k, pairs, sent[here : 2 * here])
            host.computed_in_slots(len(keys), residency.link.clock() - start)
            self._enter("policy", layer.index)
            residency.release(keys)
        self._enter("wait", layer.index)
        start = residency.link.clock()
        output_PD[sent[2 * here :]] = there()
        residency.count_wait(layer.index, residency.link.clock() - start)
        self._enter("compute", layer.index)
        return combine(output_PD, weights_TK, hidden_TD.dtype)

    def _run_whole(self, layer: MoELayer, plan: Plan, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        (keys,) = plan.chunks
        assert plan.sent is not None
        self._enter("wait", layer.index)
        sent = plan.sent.take()  # on CUDA the wait for it is one for all copies before it
        self.residency.wait(keys)
        self._enter("compute", layer.index)
        slots_TK = sent[ids_TK] if plan.slots is None else sent.view_as(ids_TK)
        start = self.residency.link.clock()
        output_TD = self.kernel.run(layer.experts, hidden_TD, slots_TK, weights_TK, ids_TK, plan.slots)
        if self.flow.host is not None and plan.slots is not None:
            self.flow.host.computed_in_slots(len(keys), self.residency.link.clock() - start)
        self._enter("policy", layer.index)
        self.residency.release(keys)
        return output_TD

    def _late(self, layer: MoELayer, plan: Plan) -> list[int]:
        """Return the pairs of one token whose experts are still being read, if packed experts can run without them."""
        copies, ids, first = self.residency.copies, plan.ids, layer.index * self._experts
        if not copies or plan.slots is None or ids is None:
            return []
        if len(plan.ids_TK) > 1 or self.flow.host is not None or not is_packed(layer.experts):
            return []
        found = [(pair, copies.get(first + expert)) for pair, expert in enumerate(ids)]
        late = [pair for pair, copy in found if copy is not None and not self.residency.link.poll(copy)]
        return late if len(late) < len(ids) else []

    def _run_late_last(
        self, layer: MoELayer, plan: Plan, hidden_TD: Tensor, weights_TK: Tensor, late: list[int]
    ) -> Tensor:
        """Run the experts that are in slots, and the late pairs once theirs are read; sum them in their order."""
        (keys,), slots = plan.chunks, plan.slots or []
        rows = dict[int, Tensor]()
        for some in ([pair for pair in range(len(slots)) if pair not in late], late):
            self._enter("compute", layer.index)
            own = [slots[pair] for pair in some]
            made = of_few(layer.experts, hidden_TD, torch.tensor([own]), own)
            assert made is not None
            rows.update(zip(some, (made if some is late else made.clone()).unbind(), strict=True))
            if some is not late:
                self._wait(layer.index, keys)
        output_TD = combine(torch.stack([rows[pair] for pair in range(len(slots))]), weights_TK, hidden_TD.dtype)
        self._enter("policy", layer.index)
        self.residency.release(keys)
        return output_TD

    def _chunks(self, plan: Plan, ids_P: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each chunk's pairs with their slots, after its copies have arrived.

        The next chunk loads meanwhile, unless there is only one slot.
        """
        order_P, first = self._chunk_order(plan, ids_P), plan.layer * self._experts
        count = plan.pairs or Counter(first + expert for expert in plan.ids or ())
        beside = self.residency.limit(plan.layer) > 1
        start = 0
        for keys, following in zip(plan.chunks, [*plan.chunks[1:], None], strict=True):
            sent = self._send_table(plan.layer, keys)  # before the next copies, for which it would have to wait
            if following is None:
                self.flow.stream(plan.layer)
            elif beside:
                self.flow.request(plan.layer, following, plan.precision)
            end = start + sum(count[key] for key in keys)
            pairs = order_P[start:end]
            slots = sent.take()[ids_P[pairs]]
            self._wait(plan.layer, keys)
            yield pairs, slots
            self.residency.release(keys)
            if following is not None and not beside:
                self.flow.request(plan.layer, following, plan.precision)
            start = end

    def _chunk_order(self, plan: Plan, ids_P: Tensor) -> Tensor:
        """Return all pairs, chunk by chunk, each chunk in :func:`row_order`, without reading from the device."""
        first, number_E = plan.layer * self._experts, [0] * self._experts
        for number, keys in enumerate(plan.chunks):
            for key in keys:
                number_E[key - first] = number
        order_P = row_order(ids_P)
        number_P = self.residency.link.send(number_E).take()[ids_P[order_P]]
        return order_P[number_P.sort(stable=True).indices]

    def _wait(self, layer: int, keys: list[int]) -> None:
        self._enter("wait", layer)
        self.residency.wait(keys)
        self._enter("compute", layer)

    def _send_table(self, layer: int, keys: list[int]) -> Sent:
        """Send the slot of each expert [E], -1 outside the chunk."""
        table = [-1] * self._experts
        first = layer * self._experts
        for key in keys:
            table[key - first] = self.pool.slots[key]
        return self.residency.link.send(table)

    def _run_chunks(
        self, layer: MoELayer, hidden_TD: Tensor, weights_TK: Tensor, chunks: Iterable[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the experts' output by several kernel calls, with the same products and one reduction at the end.

        Args:
            layer, hidden_TD, weights_TK: as for :meth:`run`.
            chunks: pairs (0..P-1), in the order of computing, with their slots. A chunk is computed before the
                iterator advances.
        """
        tokens, top_k = weights_TK.shape
        output_PD = hidden_TD.new_empty(tokens * top_k, hidden_TD.shape[1])
        for pairs, slots in chunks:
            output_PD[pairs] = self.kernel.run_pairs(layer.experts, hidden_TD, top_k, pairs, slots)
            self._enter("policy", layer.index)
        return combine(output_PD, weights_TK, hidden_TD.dtype)

    def _check_untouched(self, layer: MoELayer) -> None:
        parameters = layer.experts._parameters
        for name, pointer in self._pointers[layer.index].items():
            if parameters[name].data_ptr() != pointer:  # type: ignore[union-attr]
                raise ExpertcastError(
                    f"{layer.experts_name}.{name} was changed or moved while the model is offloaded: close the offload "
                    "first, then move or change the model"
                )
