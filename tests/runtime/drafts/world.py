"""A machine with drafts, made of random numbers: copies go over a link one after another, layers wait for theirs.

It shares nothing with the governor's formulas: a verification is walked layer by layer. L layers, E experts per layer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from expertcast.runtime.drafts.costs import Cycle
from expertcast.runtime.drafts.governor import Governor
from expertcast.runtime.drafts.prefetch import LookaheadBuffer


@dataclass(frozen=True)
class Draft:
    """How one draft truly is."""

    acceptance: tuple[float, ...]
    """Of each position; the last also of those after it."""
    pass_s: float
    growth: tuple[float, ...] = (0.0,)
    """Mean new experts by position; the last also of those after it."""
    missed: float = 0.0
    """Mean experts per verified token that it did not foresee: each is copied while its layer waits."""

    def accepted(self, position: int) -> float:
        return self.acceptance[min(position, len(self.acceptance) - 1)]

    def new(self, position: int) -> float:
        return self.growth[min(position, len(self.growth) - 1)]


@dataclass(frozen=True, kw_only=True)
class World:
    """A machine."""

    drafts: dict[str, Draft]
    plain_s: float
    verify_s: float
    token_s: float
    """An exact pass over m tokens takes `verify_s` + m `token_s` without its waiting."""
    copy_s: float = 1e-3
    layers: int = 12
    experts: int = 256
    noise: float = 0.05
    """Relative standard deviation of all seconds."""


class Run:
    """A run of a governor in a world."""

    def __init__(self, world: World, governor: Governor, seed: int = 0, sequences: int = 1) -> None:
        self.world, self.governor, self.sequences = world, governor, sequences
        self.buffer = LookaheadBuffer(world.layers * world.experts)
        self.random = random.Random(seed)
        self.tokens = self.seconds = 0.0
        self.rate = self.steady_rate()
        self.best: list[tuple[str | None, int]] = []
        """Of each cycle by exhaustive replay; what was chosen; whether it was a trial."""
        self.chosen: list[tuple[str | None, int]] = []
        self.trials: list[bool] = []
        self.trial_loss_s = 0.0

    def change(self, world: World) -> None:
        """The machine, or the text, is another one from now on."""
        self.world = world
        self.rate = self.steady_rate()

    def cycle(self) -> Cycle:
        """One cycle as a runtime would run it."""
        world, governor = self.world, self.governor
        fates = {name: self._growth(draft) for name, draft in world.drafts.items()}
        choice = governor.choose(list(world.drafts))
        self.buffer.clear()
        if choice.draft is None:
            seconds = world.plain_s * self._noise()
            cycle = Cycle(draft=None, verify_s=seconds, waited_s=max(0.0, seconds - world.verify_s - world.token_s))
        else:
            cycle = self._drafted(choice.draft, fates[choice.draft])
        best = self.replayed(fates)
        self.best.append(best)
        self.chosen.append((cycle.draft, cycle.drafted))
        self.trials.append(choice.trial)
        self.trial_loss_s += choice.trial * (cycle.total_s - cycle.emitted / self.rate)
        self.tokens, self.seconds = self.tokens + cycle.emitted, self.seconds + cycle.total_s
        governor.observe(cycle)
        return cycle

    def replayed(self, fates: dict[str, list[int]]) -> tuple[str | None, int]:
        """Every draft and length run through this cycle: the one that is worth most, at the rate of the best."""
        worth: dict[tuple[str | None, int], float] = {(None, 0): 1 - self.rate * self.world.plain_s}
        for name, new in fates.items():
            for n in range(1, self.governor.longest + 1):
                worth[name, n] = self.tokens_of(name, n) - self.rate * self.mean_s(name, new, n)
        return max(worth, key=worth.__getitem__)

    def steady_rate(self, samples: int = 400) -> float:
        """Tokens per second of the best draft at the best length, always the same one, or of plain steps."""
        rates = [1 / self.world.plain_s]
        for name, draft in self.world.drafts.items():
            fates = [self._growth(draft) for _ in range(samples)]
            for n in range(1, self.governor.longest + 1):
                mean_s = sum(self.mean_s(name, new, n) for new in fates) / samples
                rates.append(self.tokens_of(name, n) / mean_s)
        return max(rates)

    def tokens_of(self, name: str, n: int) -> float:
        """Expected tokens of a cycle."""
        draft, kept, total = self.world.drafts[name], 1.0, 1.0
        for position in range(n):
            kept *= draft.accepted(position)
            total += kept
        return total

    def mean_s(self, name: str, new: list[int], n: int) -> float:
        """What a cycle of n takes without noise."""
        draft, world = self.world.drafts[name], self.world
        passes = [draft.pass_s] * n
        verify_s, _ = self._verification(passes, new[:n], world.verify_s + (n + 1) * world.token_s)
        return sum(passes) + verify_s + draft.missed * (n + 1) * world.copy_s

    def _drafted(self, name: str, new: list[int]) -> Cycle:
        draft, world = self.world.drafts[name], self.world
        passes: list[float] = []
        fresh = iter(range(world.layers * world.experts))
        while not passes or self.governor.goes_on(self.buffer):
            passes.append(draft.pass_s * self._noise())
            position = len(passes) - 1
            self.buffer.put(position, [next(fresh) for _ in range(new[position])], ())
        n = len(passes)
        verify_s, waited_s = self._verification(
            passes, new[:n], (world.verify_s + (n + 1) * world.token_s) * self._noise()
        )
        missed_s = self._poisson(draft.missed * (n + 1)) * world.copy_s
        accepted = tuple(self._accepted(draft, n) for _ in range(self.sequences))
        return Cycle(
            draft=name, drafted=n, accepted=accepted, passes_s=tuple(passes), verify_s=verify_s + missed_s,
            waited_s=waited_s + missed_s, growth=tuple(self.buffer.growth), emitted=1 + sum(accepted) / len(accepted),
        )  # fmt: skip

    def _verification(self, passes: list[float], new: list[int], compute_s: float) -> tuple[float, float]:
        """Seconds of an exact pass that begins after the draft passes, and those it waits: copies of a position are
        asked for when its pass begins, and copied in the order of their layers as far as they have not begun."""
        world, layers = self.world, self.world.layers
        now, waiting = 0.0, [0.0] * layers
        for own_s, count in zip(passes, new, strict=True):
            for number in range(count):
                waiting[number % layers] += world.copy_s
            left_s = own_s
            for layer in range(layers):
                done_s = min(waiting[layer], left_s)
                waiting[layer] -= done_s
                left_s -= done_s
            now += own_s
        arrived, clock = 0.0, 0.0
        for layer in range(layers):
            arrived += waiting[layer]
            clock = max(clock, arrived) + compute_s / layers
        return clock, clock - compute_s

    def _growth(self, draft: Draft) -> list[int]:
        return [self._poisson(draft.new(position)) for position in range(self.governor.longest)]

    def _accepted(self, draft: Draft, n: int) -> int:
        return next((j for j in range(n) if self.random.random() >= draft.accepted(j)), n)

    def _noise(self) -> float:
        return max(0.2, self.random.gauss(1.0, self.world.noise))

    def _poisson(self, mean: float) -> int:
        count, at = 0, self.random.expovariate(1.0)
        while at < mean:
            count, at = count + 1, at + self.random.expovariate(1.0)
        return count


def changed(world: World, name: str, **changes: object) -> World:
    """The same world with another draft of this name."""
    return replace(world, drafts={**world.drafts, name: replace(world.drafts[name], **changes)})  # type: ignore[arg-type]


def random_world(seed: int) -> World:
    """A machine with one to three drafts."""
    choose = random.Random(seed)
    drafts = {}
    for name in ("int4", "drop", "early")[: choose.randint(1, 3)]:
        first = choose.uniform(0.5, 0.97)
        drafts[name] = Draft(
            acceptance=tuple(first * choose.uniform(0.8, 1.0) ** j for j in range(8)),
            pass_s=choose.uniform(1e-3, 8e-3),
            growth=tuple(choose.uniform(3, 15) * 0.8**j for j in range(8)),
            missed=choose.uniform(0.0, 1.0),
        )
    return World(
        drafts=drafts, plain_s=choose.uniform(20e-3, 40e-3), verify_s=choose.uniform(8e-3, 18e-3),
        token_s=choose.uniform(0.2e-3, 2e-3),
    )  # fmt: skip
