"""What is kept of a run while it goes on: its tokens' times, its cycles, and what drafts foresaw.

T tokens, L MoE layers, K experts per token, n drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from time import perf_counter

from torch import Tensor
from transformers.generation import BaseStreamer

from expertcast.data.batch import RouterCall
from expertcast.predictors.messages import Json
from expertcast.runtime.drafts.costs import Choice, Cycle
from expertcast.runtime.drafts.governor import Governor
from expertcast.runtime.drafts.prefetch import Schedule


class Clock(BaseStreamer):  # type: ignore[misc]
    """Seconds from the first new token to the end.

    Args:
        first: called when that token is there.
    """

    def __init__(self, first: Callable[[], None]) -> None:
        self._first, self._puts, self._start = first, 0, 0.0
        self.seconds = 0.0

    def put(self, value: Tensor) -> None:
        """The prompt, then every new token."""
        del value
        self._puts += 1
        if self._puts == 2:
            self._first()
            self._start = perf_counter()

    def end(self) -> None:
        """There are no more."""
        self.seconds = perf_counter() - self._start


class Kept(Governor):
    """A governor whose cycles and choices are kept, as long as nobody takes them."""

    def __init__(self, layers: int, copy_s: float) -> None:
        super().__init__(layers, copy_s)
        self.cycles: list[Cycle] = []
        self.choices: list[Choice] = []
        """Of each cycle, where the governor chose."""

    def choose(self, candidates: Sequence[str], longest: int | None = None) -> Choice:
        choice = super().choose(candidates, longest)
        self.choices.append(choice)
        return choice

    def observe(self, cycle: Cycle) -> None:
        super().observe(cycle)
        self.cycles.append(cycle)

    def forget(self) -> None:
        """What was kept; what was learnt stays."""
        self.cycles, self.choices = [], []


class Watch:
    """Compares, for one text, a draft's routing with the exact pass's of the same column (rows C2 and C17)."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Nothing is known."""
        self._drafted: dict[int, list[list[int]]] = {}
        """By layer, the experts of each position [n][K]."""
        self._layer = -1
        self.hard = self.soft = self.mismatch = 0
        """Token-layer pairs: the same experts in the same order, in another one, others."""
        self.needed = self.held = 0
        """Experts that layers needed in verifications, and those of them that had a slot when the layer was reached."""

    def follow(self, schedule: Schedule, held: Container[int]) -> None:
        """Watch all routing that a schedule is told of; `held` are the experts that have a slot."""
        routed, reached = schedule.routed, schedule.reached

        def watched(call: RouterCall) -> None:
            if schedule.position is not None or schedule.verifies:
                self.routed(schedule.position, call)
            routed(call)

        def watched_layer(layer: int, keys: Sequence[int]) -> None:
            if schedule.verifies:
                self.reached(layer, keys, held)
            reached(layer, keys)

        schedule.routed, schedule.reached = watched, watched_layer  # type: ignore[method-assign]

    def routed(self, position: int | None, call: RouterCall) -> None:
        """A router has run, in the pass that drafts the token at this position, or (None) in the verification."""
        if position is not None:
            known = self._drafted.setdefault(call.layer, [])
            if not position:
                known.clear()
            known.append(call.ids_TK[-1].tolist())
            return
        drafted = self._drafted.pop(call.layer, [])
        exact = call.ids_TK[len(call.ids_TK) - len(drafted) - 1 :].tolist()
        for own, right in zip(drafted, exact, strict=False):  # the last drafted token was never fed to the draft
            if own == right:
                self.hard += 1
            elif set(own) == set(right):
                self.soft += 1
            else:
                self.mismatch += 1

    def reached(self, layer: int, keys: Sequence[int], held: Container[int]) -> None:
        """The verification is about to request these experts of a layer; a layer that is asked for again in the same
        pass, as one that goes token by token is, counts once."""
        if layer != self._layer:
            self.needed += len(keys)
            self.held += sum(key in held for key in keys)
        self._layer = layer

    def as_dict(self) -> Json:
        """Counts."""
        return {
            "sets": [self.hard, self.soft, self.mismatch],
            "needed": [self.held, self.needed],
        }
