"""Chooses the draft and its length, none included, from what a run's own cycles took and gave (rows C3 to C7)."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.runtime.drafts.costs import (
    KEEP_SECONDS,
    OUTLIER,
    Choice,
    Cycle,
    DraftModel,
    RooflinePoint,
    RunningMean,
    VerificationTimes,
    roofline,
)
from expertcast.runtime.drafts.prefetch import LookaheadBuffer

# What a draft, or none, is expected to do in a cycle.

NONE = "none"
"""How plain exact steps are called where a name is shown."""
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class Plan:
    """A cycle of one draft at one length."""

    draft: str | None
    """None: a plain exact step."""
    length: int
    longest: int
    """n_max: no draft of it is longer."""
    tokens: float
    """E[N]"""
    doubt: float
    """How much less that is with acceptance a standard error below what was measured: where little was, it may be
    luck."""
    seconds: float

    @property
    def name(self) -> str:
        """The draft's, or `none`."""
        return self.draft or NONE

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def rate_within(self, errors: float) -> float:
        """Tokens per second with so many times the doubt, above or below 0."""
        return (self.tokens + errors * self.doubt) / self.seconds

    def __str__(self) -> str:
        ahead = f", {self.length} ahead" if self.draft else ""
        return f"{self.name}{ahead}: {self.tokens:.1f} tokens in {1e3 * self.seconds:.3g} ms ({self.rate:.3g}/s)"


def plain_plan(seconds: float) -> Plan:
    """A plain exact step, which gives one token."""
    return Plan(None, 0, 0, 1.0, 0.0, max(_LEAST_S, seconds))


def draft_plan(
    draft: str, model: DraftModel, verify_s: Sequence[float], copy_s: float, *, longest: int,
    limit_s: float | None = None, length: int | None = None,
) -> Plan:  # fmt: skip
    """The length at which a draft is expected to give the most tokens per second, 1 at least (row C7).

    Args:
        draft: its name.
        model: what is known of it.
        verify_s: of a verification of 0 to `longest` + 1 tokens.
        copy_s: seconds of one expert's copy.
        longest: no draft is longer.
        limit_s: nor is one whose drafting and verifying take longer than that, but one of a single token.
        length: what is asked about, in place of the best one.
    """
    most = longest
    if limit_s is not None:
        draft_s = model.draft_seconds(longest)
        most = max((n for n in range(1, longest + 1) if draft_s[n] + verify_s[n + 1] <= limit_s), default=1)
    tokens, seconds = model.tokens(most), model.seconds(most, verify_s, copy_s)
    if length is None:
        length = max(range(1, most + 1), key=lambda n: tokens[n] / seconds[n])
    doubt = tokens[length] - model.tokens(length, doubt=1.0)[length]
    return Plan(draft, length, most, tokens[length], doubt, seconds[length])


# Which of those that are not the best is tried again, and when.

LOSS = 0.0075
"""Share of all seconds that trying again may lose; the first cycles, when nothing is known, are not counted."""
FIRST_PAUSE = 8
"""Cycles from one trial to the next; twice as many after every trial that found nothing better than was known."""
BETTER = 1.1
"""A trial that finds so much more than was known is followed by another soon."""
NEAR = 0.1
"""Another draft that may be better than the best, and loses this share of its seconds at most, costs nothing."""


class Candidate(NamedTuple):
    """One that is not the best."""

    name: str
    seconds: float
    """Expected, of a trial."""
    loss_s: float
    """How many of these are lost."""
    hopeful: bool
    """Whether it may be better than the best for all that is known: then it waits for no pause."""
    another: bool = True
    """Whether it is another draft than the best, not another length of it."""


class Trials:
    """Keeps account of what trials cost; those that are tried go by name."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Of all cycles so far."""
        self.lost_s = 0.0
        """What trials took beyond what the best would have taken for the same tokens."""
        self._cycle = 0
        self._pauses: dict[str, int] = {}
        self._due: dict[str, int] = {}

    def spent(self, seconds: float) -> None:
        """A cycle was run, of whatever kind."""
        self.seconds += seconds
        self._cycle += 1

    def lost(self, seconds: float) -> None:
        """A trial took so much more than the best would have; less, if it was better."""
        self.lost_s = max(0.0, self.lost_s + seconds)

    def next(self, others: Iterable[Candidate]) -> str | None:
        """Who is tried now; None: nobody. What is expected to gain needs no means, nor does what is as good as the best
        for all that is known: bad luck with the little that was seen of it must not keep the better one out.

        Args:
            others: all that are not the best.
        """
        for own in sorted(others, key=lambda other: other.loss_s):
            if own.name not in self._due:
                self._due[own.name] = self._cycle + self._pauses.setdefault(own.name, FIRST_PAUSE)
            due = own.hopeful or self._cycle >= self._due[own.name]
            free = own.loss_s < 0 or (own.hopeful and own.another and own.loss_s <= NEAR * own.seconds)
            if due and (free or self.lost_s + own.loss_s <= LOSS * (self.seconds + own.seconds)):
                return own.name
        return None

    def tried(self, name: str, gain: float) -> None:
        """A trial is over.

        Args:
            name: who was tried.
            gain: tokens per second that it is believed to give now, over what it was believed to give before.
        """
        pause = FIRST_PAUSE if gain >= BETTER else 2 * self._pauses.get(name, FIRST_PAUSE)
        self._pauses[name], self._due[name] = pause, self._cycle + pause

    def won(self, name: str) -> None:
        """It is the best: when it no longer is, its pause begins anew."""
        self._pauses.pop(name, None)
        self._due.pop(name, None)


# What became of the tokens that drafts wrote, counted by draft from the first cycle on.


@dataclass(slots=True)
class DraftCount:
    """Of one draft; tokens are those of all sequences together."""

    cycles: int = 0
    drafted: int = 0
    """Tokens that were verified; those that were certain before are none."""
    accepted: int = 0
    """Of these, those that stand."""


class Tally:
    """Counts cycles; what it counted is never set back."""

    def __init__(self) -> None:
        self.by_draft: dict[str, DraftCount] = {}
        """Those that were run."""

    def observe(self, cycle: Cycle) -> None:
        """A cycle was run; plain steps count for nothing."""
        if cycle.draft is None:
            return
        count = self.by_draft.setdefault(cycle.draft, DraftCount())
        count.cycles += 1
        known = cycle.known or (0,) * len(cycle.accepted)
        for kept, certain in zip(cycle.accepted, known, strict=True):
            count.drafted += cycle.drafted - certain
            count.accepted += kept - certain

    def beside(self, told: Callable[[Cycle], None]) -> Callable[[Cycle], None]:
        """Both are told of a cycle, the other one first."""

        def observe(cycle: Cycle) -> None:
            told(cycle)
            self.observe(cycle)

        return observe


PLAIN_STEPS, FIRST_CYCLES, FIRST_LENGTH = 3, 2, 2
"""How many plain steps, and cycles of each draft of which length, are run to begin with."""
_SURE, _HOPE = 1.0, 0.5
"""Standard errors: another becomes the best when it is so much below what was measured, and is tried at once when it
might be so much above."""
_OLD = 8.0
"""What was learnt long ago of one that is tried again counts as so many cycles at most."""
_SHOWN = 4096
_CHANGES = 64


class Governor:
    """Takes n* = argmax E[N(n)] / T(n) over all drafts and lengths; n = 0 is a plain exact step.

    It learns from the cycles that it is told of, and holds for one number of sequences: what cycles take depends on it.
    Those that were never run are tried first; those that are not the best again and again, as long as these trials
    together lose less than 1% of the time, and those that may be as good as the best at once.

    Args:
        layers: MoE layers of the model.
        copy_s: seconds of one expert's copy; may be set anew at any time.
        longest: no draft is longer.
        limit_s: a cycle's drafting and verifying should take no longer, a draft of one token excepted (tokens come in
            bursts, and a reader waits for the first); None: no limit.

    Raises:
        ExpertcastError: a longest draft below 0, or no layer.
    """

    def __init__(self, layers: int, copy_s: float, *, longest: int = 16, limit_s: float | None = 0.5) -> None:
        if longest < 0 or layers < 1:
            raise ExpertcastError(f"longest={longest}, layers={layers}: give 0 or more, and 1 layer or more")
        self.copy_s = copy_s
        self._layers = layers
        self._verify = VerificationTimes()
        self.limit(longest, limit_s)
        self._models: dict[str, DraftModel] = {}
        self._plain_s = RunningMean(KEEP_SECONDS)
        self._plain_steps = 0
        self._trials = Trials()
        self._now: Choice | None = None
        self._best: Plan | None = None
        self._trying: tuple[str, float] | None = None
        """While one is tried: how trials know it, and the tokens per second that it was believed to give."""
        self._ratios: deque[float] = deque(maxlen=_SHOWN)
        self._lengths: Counter[tuple[str, int]] = Counter()
        self._changes: deque[Json] = deque(maxlen=_CHANGES)
        self._cycle = self._drafted = 0
        """Cycles, and those of them that drafted."""
        self._emitted = 0.0
        """Tokens of these, the mean over sequences."""

    def limit(self, longest: int, limit_s: float | None) -> None:
        """Set `longest` and `limit_s` for the cycles to come."""
        self.longest, self.limit_s = longest, limit_s
        self._verify_s = self._verify.values(longest + 1)
        """Of 0 to `longest` + 1 tokens, as they are known now."""

    def choose(self, candidates: Sequence[str], longest: int | None = None) -> Choice:
        """What the next cycle is to be.

        Args:
            candidates: names of drafts that could be used now; plain steps are always among what is chosen from.
            longest: no draft is longer this time (what is left to write); by default what the governor was made with.
        """
        longest = self.longest if longest is None else min(longest, self.longest)
        self._trying, candidates = None, [name for name in candidates if name != NONE]
        choice = self._first_choice(candidates, longest) or self._learned_choice(candidates, longest)
        if self._now is None or (choice.draft, choice.trial) != (self._now.draft, self._now.trial):
            self._changes.append({"cycle": self._cycle, "reason": choice.reason})
        self._now = choice
        return choice

    def goes_on(self, buffer: LookaheadBuffer, held: Container[int]) -> bool:
        """Whether another token should be drafted, by the experts that the buffer has so far. Asked after each.

        It should where a longer draft is worth more than verifying now: E[N] less what the run gives in T at its best
        rate. With as many new experts as expected that is the argmax of E[N] / T. In a cycle with more of them that
        argmax would draft on to make up for a bad cycle, and lose: what the time is worth elsewhere counts.

        Args:
            buffer: of this cycle; its positions are the tokens drafted so far.
            held: as :meth:`LookaheadBuffer.new_experts` takes it.

        Raises:
            ExpertcastError: no draft was chosen.
        """
        now, drafted = self._now, buffer.positions
        if now is None or now.draft is None:
            raise ExpertcastError("no draft was chosen: call choose() before a cycle, and draft only what it names")
        buffer.new_experts(held)
        if now.trial or drafted >= now.longest:
            return drafted < now.length
        model = self._models[now.draft]
        tokens = model.tokens(now.longest)
        seconds = model.seconds(now.longest, self._verify_s, self.copy_s, buffer.growth)
        worth = [own - now.rate * took for own, took in zip(tokens, seconds, strict=True)]
        return max(worth[drafted + 1 :]) > worth[drafted]

    def observe(self, cycle: Cycle) -> None:
        """Learn from a cycle that was run, chosen or not."""
        predicted_s = self._predicted(cycle)
        seconds = cycle.total_s
        if predicted_s is not None and seconds > 0:
            self._ratios.append(predicted_s / seconds)
        self._verify.observe(cycle.drafted + 1, max(0.0, cycle.verify_s - cycle.waited_s))
        self._verify_s = self._verify.values(max(self.longest, cycle.drafted) + 1)
        if cycle.draft is None:
            self._plain_s.observe(seconds)
            self._plain_steps += 1
        else:
            self._model(cycle.draft).observe(cycle, self._verify_s, self.copy_s)
            self._drafted += 1
            self._emitted += cycle.emitted
        self._cycle += 1
        self._lengths[cycle.draft or NONE, cycle.drafted] += 1
        self._trials.spent(seconds)
        if self._trying is not None:
            self._judge(*self._trying, cycle, seconds if predicted_s is None else min(seconds, OUTLIER * predicted_s))

    def report(self) -> Json:
        """What was learnt and chosen, as plain values: `drafts` by name as :meth:`DraftModel.report` has them;
        `plain_s` of a plain step, `verify_s` by tokens; `predicted_over_actual`, the median over cycles, and
        `median_error`, how far it was off in the median, and `within_tenth`, the share of cycles that took what was
        predicted to 10%; `tokens_per_cycle`, the mean over those that drafted; `lengths`, how often each was run;
        `lost_s` by trials of `seconds`; `reasons`, one line wherever the draft changed.
        """
        most = max((length for _, length in self._lengths), default=0)
        errors = [abs(ratio - 1) for ratio in self._ratios]
        return {
            "drafts": {name: model.report(most) for name, model in self._models.items()},
            "plain_s": self._plain_s.value,
            "verify_s": self._verify_s[1 : most + 2],
            "predicted_over_actual": statistics.median(self._ratios) if self._ratios else None,
            "median_error": statistics.median(errors) if errors else None,
            "within_tenth": sum(error <= 0.1 for error in errors) / len(errors) if errors else None,
            "tokens_per_cycle": self._emitted / self._drafted if self._drafted else None,
            "lengths": {f"{name} {n}": count for (name, n), count in sorted(self._lengths.items())},
            "seconds": self._trials.seconds,
            "lost_s": self._trials.lost_s,
            "reasons": list(self._changes),
        }

    def roofline(self, draft: str, block_bytes: int) -> list[RooflinePoint]:
        """A plain step and drafts of 1 to `longest` tokens between their roofs, by what is known now; `block_bytes` is
        what one copy brings.

        Raises:
            ExpertcastError: a draft, or plain steps, that were not run yet.
        """
        if draft not in self._models or self._plain_s.value is None:
            raise ExpertcastError(f"{draft!r} and plain steps were not both run yet: there is nothing to draw")
        model = self._models[draft]
        drafting_s = model.draft_seconds(self.longest)
        cycle_s = model.seconds(self.longest, self._verify_s, self.copy_s)
        return roofline(
            model.tokens(self.longest),
            [own + self._verify_s[n + 1] for n, own in enumerate(drafting_s)],
            [self._plain_s.value, *cycle_s[1:]],
            block_bytes / self.copy_s,
        )

    def _judge(self, name: str, believed: float, cycle: Cycle, seconds: float) -> None:
        """A trial is over: what it lost, and whether it found more tokens per second than were believed in."""
        self._trying = None
        if self._best is not None and self._now is not None and self._now.draft == cycle.draft:
            self._trials.lost(seconds - cycle.emitted / self._best.rate)
            self._trials.tried(name, self._plan(cycle.draft, self.longest).rate / believed)

    def _first_choice(self, candidates: Sequence[str], longest: int) -> Choice | None:
        """Who was not run often enough to be judged."""
        if longest < 1 or not candidates:
            return Choice(None, 0, 0, 0.0, f"{NONE}: there is nothing to draft")
        if self._plain_steps < PLAIN_STEPS:
            return Choice(None, 0, 0, 0.0, f"trying {NONE}: too few steps to judge it", trial=True)
        length = min(FIRST_LENGTH, longest)
        for name in candidates:
            if self._model(name).cycles < FIRST_CYCLES:
                reason = f"trying {name}, {length} ahead: too few cycles to judge it"
                return Choice(name, length, length, 0.0, reason, trial=True)
        return None

    def _learned_choice(self, candidates: Sequence[str], longest: int) -> Choice:
        plans = [self._plan(name, longest) for name in (None, *candidates)]
        self._best = best = self._best_of(plans)
        others = sorted((plan for plan in plans if plan is not best), key=lambda plan: -plan.rate)
        self._trials.won(best.name)
        trials = {plan.name: plan for plan in others}
        if best.longest > best.length:
            trials[f"{best.name}, longer"] = self._plan(best.draft, longest, min(2 * best.length, best.longest))
        tried = self._trials.next(
            Candidate(
                name,
                plan.seconds,
                plan.seconds - plan.tokens / best.rate,
                plan.rate_within(_HOPE) > best.rate,
                plan.draft != best.draft,
            )
            for name, plan in trials.items()
        )
        if tried is None:
            reason = "; ".join([str(best), *(f"{plan.name}: {plan.rate:.3g}/s" for plan in others)])
            return Choice(best.draft, best.length, best.longest, best.rate, reason)
        plan = trials[tried]
        self._trying = tried, self._plan(plan.draft, longest).rate
        if plan.rate_within(_HOPE) <= best.rate and plan.draft != best.draft:  # what is known of it is of long ago
            known = self._plain_s if plan.draft is None else self._models[plan.draft]
            known.limit(_OLD)
        reason = f"trying {plan}; {best.name}: {best.rate:.3g}/s"
        return Choice(plan.draft, plan.length, plan.length, best.rate, reason, trial=True)

    def _best_of(self, plans: Sequence[Plan]) -> Plan:
        """The best of all, but what was the best stays that until another is better without luck."""
        best = max(plans, key=lambda plan: plan.rate)
        before = next((plan for plan in plans if self._best is not None and plan.draft == self._best.draft), best)
        surest = max(plans, key=lambda plan: plan.rate_within(-_SURE))
        return before if surest.rate_within(-_SURE) <= before.rate else surest

    def _plan(self, draft: str | None, longest: int, length: int | None = None) -> Plan:
        if draft is None:
            return plain_plan(self._plain_s.value or 0.0)
        return draft_plan(
            draft, self._model(draft), self._verify_s, self.copy_s, longest=longest, limit_s=self.limit_s, length=length
        )

    def _predicted(self, cycle: Cycle) -> float | None:
        """Seconds that a cycle was expected to take when its verification began; None before anything is known."""
        if cycle.draft is None:
            return self._plain_s.value if self._plain_steps >= PLAIN_STEPS else None
        model = self._model(cycle.draft)
        if model.cycles < FIRST_CYCLES:
            return None
        n, verify_s = cycle.drafted, self._verify.values(cycle.drafted + 1)
        return model.seconds(n, verify_s, self.copy_s, cycle.growth)[n]

    def _model(self, draft: str) -> DraftModel:
        return self._models.setdefault(draft, DraftModel(self._layers))
