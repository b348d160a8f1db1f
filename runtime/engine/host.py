"""Missing experts of decode steps that the host computes from the store, beside the device's own.

T tokens, D hidden size, K experts per token, P = T x K token-expert pairs. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import ceil

import torch
from torch import Tensor, nn

from expertcast.data.packed_experts import over_parts
from expertcast.predictors.view import MoELayer
from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.links.driver import Pending, Readback
from expertcast.runtime.recording.learning import RunningMean
from expertcast.runtime.storage.store import ExpertStore

_FORGET = 0.998
"""Factor on the estimated time of a way each time that the other way is faster: what was slow once is tried again."""
_STALE = 0.98
"""Factor on the weight of earlier observations of the host each time that it computes nothing: a trial then counts."""
_KEEP = 0.97
"""Weight that an observation leaves to the earlier ones in the mean time of an expert."""
_LEAST_S = 1e-9


class HostExperts:
    """Computes experts on the host, and chooses those of a layer that it computes.

    On the CPU a thread computes while the model's thread computes the experts in slots. On CUDA the model's thread
    computes, once it has launched the kernels of the experts in slots.

    A layer lacks m experts: those without a slot, and those whose copies have not arrived. The host computes all of
    them, or with `auto` the n <= m with the shortest expected time of the layer,

        max(wait for m - n copies + computing in slots, hand-over + n x computing on the host)

    by running means of this run. On CUDA the device waits for copies while the thread launches the next layer: there
    both times last until that layer's routing, and slot numbers wait for copies that have begun. Experts that the host
    computes are copied for later steps where nothing waits for the link, as many as it can begin until the next layer,
    on CUDA as many as it can end.

    Args:
        store: holds all experts in memory.
        run_pairs: as of :class:`expertcast.runtime.engine.engine.Kernel`; computes with parameters on the host.
        residency: experts in slots and in flight.
        auto: choose by time; False: the host computes all experts that a layer lacks.
    """

    def __init__(
        self, store: ExpertStore, run_pairs: Callable[[nn.Module, Tensor, int, Tensor, Tensor], Tensor],
        residency: ExpertCache, *, auto: bool,
    ) -> None:  # fmt: skip
        self.run_pairs = run_pairs
        """Computes; a measurement may replace it."""
        self._store, self._residency, self._link, self._auto = store, residency, residency.link, auto
        self._driver = self._link.driver
        self._readback = Readback(self._driver, self._link.progress)
        self._thread = ThreadPoolExecutor(1, "expertcast-host") if self._driver is None else None
        self._modules: dict[int, nn.Module] = {}
        """Experts modules by layer, with parameters in the store."""
        self._keys: list[int] = []
        """Experts of the running layer that the host computes."""
        self._on_host, self._hand_over = RunningMean(_KEEP), RunningMean(_KEEP)
        """Seconds of an expert on the host, and from its request to the start of computing."""
        self._on_device = RunningMean(_KEEP), RunningMean(_KEEP)
        """Seconds of an expert in slots, alone and beside the host's."""
        self._interval = RunningMean()
        """Seconds from the last request of a layer to the next layer."""
        self._launching, self._trailing = RunningMean(_KEEP), RunningMean(_KEEP)
        """On CUDA, seconds of the model's thread from a choice until it reads the next layer's routing, if the host
        computes nothing; and of the device from a layer's last copy to that routing."""
        self._chosen_s: float | None = None
        self._computed_s, self.reads_s = 0.0, 0.0
        """On CUDA, time of the latest choice, seconds that the host has computed since, and time at which the thread
        began to wait for the latest values of the device."""
        self._ended_s: float | None = None
        self._decodes = False
        """Whether the pass makes choices."""
        self._hope, self._copies = 1.0, 0
        """Factor on the time of copies while there are none, and the link's number of copies at the last choice."""
        residency.paced = True

    def close(self) -> None:
        """Stop the thread, and leave the store."""
        if self._thread is not None:
            self._thread.shutdown()
        self._modules.clear()

    # choice

    def start_pass(self) -> None:
        """Start a forward pass."""
        self._keys, self._ended_s, self._chosen_s, self._decodes = [], None, None, False

    def choose(self, keys: Sequence[int]) -> list[int]:
        """Return those of a layer's distinct experts that the host computes; their queued copies are cancelled."""
        residency, copies = self._residency, self._residency.copies
        now, self._decodes = self._link.clock(), True
        if self._ended_s is not None:
            self._interval.observe(max(_LEAST_S, now - self._ended_s))
        if self._chosen_s is not None and self._chosen_s < self.reads_s:
            self._observe_layer(self.reads_s - self._chosen_s - self._computed_s, now)
        coming = [key for key in keys if key in copies]
        coming.sort(key=lambda key: not copies[key].started)
        lacking = [*coming, *(key for key in keys if not residency.holds(key))]
        count = self._best(len(keys), len(lacking), sum(copies[key].started for key in coming), now) if lacking else 0
        self._keys = lacking[len(lacking) - count :]
        residency.leave(self._keys)
        if self._driver is not None:
            self._chosen_s, self._computed_s = self._link.clock(), 0.0
        return self._keys

    def _observe_layer(self, launching_s: float, now: float) -> None:
        """Learn the times of a layer on CUDA, where the thread launches work and does not wait for copies."""
        if self._link.awaited_until_s > self.reads_s:
            self._trailing.observe(max(_LEAST_S, now - self._link.awaited_until_s))
        if self._keys:
            self._hand_over.observe(max(_LEAST_S, launching_s - (self._launching.value or 0.0)))
        else:
            self._launching.observe(max(_LEAST_S, launching_s))

    def _best(self, keys: int, lacking: int, begun: int, now: float) -> int:
        """Return how many of the experts that a layer lacks the host is to compute.

        Args:
            keys: number of experts of the layer.
            lacking: number of those that it lacks.
            begun: number of those whose copies have begun.
            now: the link's clock.
        """
        if not self._auto:
            return lacking
        link, copies = self._link, self._residency.copies
        self._hope = self._hope * _FORGET if link.copies == self._copies else 1.0
        self._copies = link.copies
        copy_s = self._hope * link.copy_s
        waiting = sum(not copy.started for copy in copies.values())
        under_way_s = max(0.0, self._residency.backlog_s(now) - waiting * link.copy_s)
        host_s, start_s = self._on_host.value or 0.0, self._hand_over.value or 0.0
        alone_s, beside_s = (each.value or 0.0 for each in self._on_device)
        launching_s, trailing_s = self._launching.value or 0.0, self._trailing.value or 0.0
        best, least_s = 0, 0.0
        for count in range(lacking + 1):
            copied = lacking - count
            waited_s = under_way_s + max(0, copied - begun) * copy_s if copied or self._driver is not None else 0.0
            on_host_s = start_s + count * host_s if count else 0.0
            slots_s = (keys - count) * (beside_s if count else alone_s)
            seconds = max(waited_s + slots_s + trailing_s, on_host_s + launching_s)
            if not count or seconds < least_s:
                best, least_s = count, seconds
        if not best:
            for mean in (self._on_host, self._hand_over, self._on_device[1]):
                mean.fade(_STALE)
                mean.total *= _FORGET
        return best

    def room(self, *, ends: bool = False) -> int | None:
        """Return the number of copies that the link can begin until the next layer, or end; None: it need not be
        limited."""
        if not (self._auto and self._decodes):
            return None
        copy_s, interval_s = self._link.copy_s, (self._interval if self._driver is None else self._launching).value
        if not copy_s or interval_s is None:
            return None
        count = max(0.0, (interval_s - self._residency.backlog_s(self._link.clock())) / copy_s)
        return int(count) if ends else ceil(count)

    def end(self) -> None:
        """End the requests of a layer: copy experts that the host computes, unless the layer waits for the link."""
        residency = self._residency
        if self._auto and self._keys and residency.keep and residency.running.isdisjoint(residency.copies):
            for key in self._keys[: self.room(ends=self._driver is not None)]:
                if not residency.holds(key):
                    residency.adopt(key)
        self._ended_s = self._link.clock()

    # computing

    def computed_in_slots(self, experts: int, seconds: float) -> None:
        """Count the time in which the device computed so many experts."""
        if self._driver is None:  # else only launched
            self._on_device[bool(self._keys)].observe(max(_LEAST_S, seconds / experts))

    def computed_on_host(self, start_s: float, seconds: float) -> None:
        """Count the time until the host began, and that of each expert."""
        if self._driver is None:
            self._hand_over.observe(max(_LEAST_S, start_s))
        self._computed_s = seconds * len(self._keys)
        self._on_host.observe(max(_LEAST_S, seconds))

    def start(
        self, layer: MoELayer, hidden_TD: Tensor, top_k: int, pairs: Sequence[int], experts: Sequence[int]
    ) -> Callable[[], Tensor]:
        """Begin to compute some pairs.

        Args:
            layer: an MoE layer.
            hidden_TD, top_k: of the whole step, whose pairs are numbered token by token.
            pairs: numbers of the pairs, those of one expert adjacent.
            experts: the pairs' experts.

        Returns:
            A function that waits for the pairs' unweighted output [pairs, D], and returns it on the device.
        """
        job = partial(self._compute, layer, self._readback.start(hidden_TD), top_k, pairs, experts)
        return partial(self._take, job if self._thread is None else self._thread.submit(job).result, self._link.clock())

    def _compute(
        self, layer: MoELayer, hidden: Pending, top_k: int, pairs: Sequence[int], experts: Sequence[int]
    ) -> tuple[Tensor, float, float]:
        """Return the output, the time at which computing began, and its seconds per expert."""
        hidden_TD, start = hidden.tensor(), self._link.clock()
        module = self._modules.get(layer.index)
        if module is None:
            module = self._modules[layer.index] = over_parts(layer.experts, self._store.views(layer.index))
        with torch.no_grad():
            output = self.run_pairs(module, hidden_TD, top_k, torch.tensor(pairs), torch.tensor(experts))
        return output, start, (self._link.clock() - start) / len(set(experts))

    def _take(self, result: Callable[[], tuple[Tensor, float, float]], asked_s: float) -> Tensor:
        output, start, seconds = result()
        self.computed_on_host(start - asked_s, seconds)
        if self._driver is None:
            return output
        return self._driver.send(output, self._driver.current_stream())
