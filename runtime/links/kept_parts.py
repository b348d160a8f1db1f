"""What the disk link keeps of experts beside the slots: coded parts in memory, in the states that their pools say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.pools.costs import Costs
from expertcast.runtime.pools.pools import Pools
from expertcast.runtime.pools.schedule import schedule
from expertcast.runtime.pools.simulate import Task, simulate
from expertcast.runtime.pools.states import ExpertBytes, State
from expertcast.runtime.storage.coded_reader import CodedReader
from expertcast.runtime.storage.coded_store import CodedStore
from expertcast.runtime.storage.part_memory import EVERYTHING, NOTHING, PACKED, PLAIN, Kinds
from expertcast.runtime.storage.slots import SlotPool, SlotState

_KINDS: dict[State, Kinds] = {
    State.F: NOTHING, State.C: EVERYTHING, State.S: frozenset({PLAIN}), State.E: frozenset({PACKED}), State.M: NOTHING,
}  # fmt: skip
_STATES = {kinds: state for state, kinds in _KINDS.items() if state is not State.F} | {NOTHING: State.M}


class KeptParts:
    """A reader that keeps parts, and what is done about them as their pools change.

    Calls come from the thread that runs the model.

    Args:
        store: of coded experts.
        slots: whose full experts are the first of the pools.
        memory: bytes of each other pool, of all layers together.
        passing: slots that are no pool, as a multiple of K: the running layer's, and those of its forecasts.
        threads, pace: of the reader.

    Raises:
        ExpertcastError: less memory than one expert takes, or states that the codec does not have.
    """

    def __init__(
        self, store: CodedStore, slots: SlotPool, memory: Mapping[State, int], *, passing: int, threads: int,
        pace: float | None,
    ) -> None:  # fmt: skip
        plain, packed = store.part_nbytes
        self._size = ExpertBytes(plane=plain, exponents=packed)
        self._store, self._slots = store, slots
        if not packed and memory.keys() - {State.C}:
            raise ExpertcastError(f"codec {store.codec.text!r} has no parts that can be kept alone: give pools='C=...'")
        room = {state: nbytes // self._size.held(state) for state, nbytes in memory.items()}
        for state, count in room.items():
            if not count:
                raise ExpertcastError(
                    f"pool {state.name} of {memory[state]} bytes holds no expert of {self._size.held(state)}: "
                    "give more, or leave it out"
                )
        self.pools = Pools(
            layers=store.layers,
            experts=store.experts,
            size=self._size,
            room=room | {State.F: max(0, slots.count - passing * store.top_k)},
        )
        self._threads, self._pace = threads, pace
        self.reader = self._open()
        self._leaving: dict[int, int] = {}
        """Full experts that are to be taken apart before their slot is given away, by slot."""

    def restart(self) -> None:
        """Drop what is queued and kept; the pools are told by others."""
        self.reader.close()
        self._leaving.clear()
        self.reader = self._open()

    def _open(self) -> CodedReader:
        kept = self.pools.room
        return self._store.reader(
            self._threads,
            self._pace,
            kept=(kept[State.C] + kept[State.S], kept[State.C] + kept[State.E]),
            wanted=lambda key: _KINDS[self.pools.state(key)],
        )

    def settle(self) -> None:
        """Do what the pools have decided since the last call: forget parts, and note what is to be taken apart."""
        for key, state in dict(self.pools.changes()).items():
            slot = self._slots.slots.get(key)
            comes = slot is None or self._slots.state(slot) is SlotState.LOADING
            if key in self.pools.running and comes:
                continue  # what is held of it is about to be used; its end is the reader's
            self.reader.drop(key, _KINDS[state])
            if slot is not None and state is State.S:
                self._leaving[slot] = key

    def take_apart(self) -> None:
        """Keep the plain parts of full experts that leave: the model's thread has nothing better to do."""
        for slot, key in self._leaving.items():
            arrived = self._slots.slots.get(key) == slot and self._slots.state(slot) is not SlotState.LOADING
            if arrived and self.pools.state(key) is State.S:
                self.reader.keep_plain(key, self._slots.block(slot))
        self._leaving.clear()

    def fills(self, slot: int) -> None:
        """A slot is filled with another expert: it is too late for the one that was in it."""
        self.settle()
        self._leaving.pop(slot, None)

    def in_order(self, keys: Sequence[int]) -> Sequence[int]:
        """The order in which a layer's misses keep disk and processors busy (row E7)."""
        if len(keys) < 2:
            return keys
        self.settle()
        states = {key: _STATES[self.reader.held(key)] for key in keys}
        if len(set(states.values())) < 2:
            return keys
        tasks = [Task(expert=key, state=state) for key, state in states.items()]
        order = schedule(tasks, self._costs())
        return [tasks[task].expert for task in order.decodes]

    def seconds(self, key: int) -> float:
        """Until an expert would be ready if nothing else were read or decoded."""
        tasks, costs = [Task(expert=key, state=_STATES[self.reader.held(key)])], self._costs()
        return simulate(tasks, schedule(tasks, costs), costs).makespan

    def _costs(self) -> Costs:
        rates, codec = self.reader.rates(), self._store.codec
        shards = sum(codec.planes[shard.plane].compressed for shard in codec.shards)
        return Costs(
            read_s=self._size.plane / rates.disk,
            ratio=self._size.exponents / self._size.plane,
            decode_s=self._store.layout.block_bytes / max(1, shards) / rates.decoding,
            shards=max(1, shards),
            threads=rates.threads,
        )
