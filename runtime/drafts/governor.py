"""Choice of the draft and its length, none included, by the costs of the run's own cycles (rows C3 to C7)."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from expertcast.predictors.messages import Json
from expertcast.runtime.drafts.costs import KEEP_SECONDS, Choice, Cycle, DraftModel, VerificationTimes
from expertcast.runtime.drafts.names import NONE
from expertcast.runtime.drafts.prefetch import LookaheadBuffer
from expertcast.runtime.recording.learning import HOPE, OUTLIER, RunningMean, Trials

_LEAST_S = 1e-9


@dataclass(slots=True)
class DraftCount:
    """Of one draft; tokens are those of all sequences together."""

    cycles: int = 0
    drafted: int = 0
    """Tokens that were verified; those that were certain before are none."""
    accepted: int = 0
    """Of these, those that stand."""


class Tally:
    """Counts of cycles by draft, which only grow."""

    def __init__(self) -> None:
        self.by_draft: dict[str, DraftCount] = {}
        """Those that were run."""

    def observe(self, cycle: Cycle) -> None:
        """A cycle was run; plain steps count for nothing."""
        if cycle.draft is None:
            return
        count = self.by_draft.setdefault(cycle.draft, DraftCount())
        count.cycles += 1
        for certain, kept in cycle.judged:
            count.drafted += cycle.drafted - certain
            count.accepted += kept - certain


PLAIN_STEPS, FIRST_CYCLES, FIRST_LENGTH = 3, 2, 2
"""How many plain steps, and cycles of each draft of which length, are run to begin with."""
_SURE = 1.0
"""Standard errors: another draft becomes the best when it still is with so much less than measured."""
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
    """

    def __init__(self, layers: int, copy_s: float, *, longest: int = 16, limit_s: float | None = 0.5) -> None:
        self.copy_s = copy_s
        self._layers = layers
        self._verify = VerificationTimes()
        self.limit(longest, limit_s)
        self._models: dict[str, DraftModel] = {}
        self._plain_s = RunningMean(KEEP_SECONDS)
        self._plain_steps = 0
        self._trials = Trials()
        self._now: Choice | None = None
        self._best: Choice | None = None
        self._trying: tuple[str, Choice] | None = None
        """While one is tried: how trials know it, and what its draft was believed to give."""
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
        """Seconds of verifying 0 to `longest` + 1 tokens, by the present estimate."""

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

    def goes_on(self, now: Choice, buffer: LookaheadBuffer) -> bool:
        """Whether another token should be drafted, by the experts that the buffer has so far. Asked after each.

        It should where a longer draft is worth more than verifying now: E[N] less what the run gives in T at its best
        rate. With as many new experts as expected that is the argmax of E[N] / T. In a cycle with more of them that
        argmax would draft on to make up for a bad cycle, and lose: what the time is worth elsewhere counts.

        Args:
            now: what was chosen.
            buffer: of this cycle; its positions are the tokens drafted so far.
        """
        drafted = buffer.positions
        if now.draft is None or now.trial or drafted >= now.longest:
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
        if self._trying is None or self._best is None:
            return
        key, before = self._trying
        self._trying = None
        if before.draft == cycle.draft:
            took_s = seconds if predicted_s is None else min(seconds, OUTLIER * predicted_s)
            gain = self._plan(cycle.draft, self.longest).rate / before.rate
            self._trials.tried(key, gain, took_s - cycle.emitted / self._best.rate)

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

    def _first_choice(self, candidates: Sequence[str], longest: int) -> Choice | None:
        """Who was not run often enough to be judged."""
        if longest < 1 or not candidates:
            return Choice(reason=f"{NONE}: there is nothing to draft")
        if self._plain_steps < PLAIN_STEPS:
            return Choice(reason=f"trying {NONE}: too few steps to judge it", trial=True)
        length = min(FIRST_LENGTH, longest)
        for name in candidates:
            if self._model(name).cycles < FIRST_CYCLES:
                reason = f"trying {name}, {length} ahead: too few cycles to judge it"
                return Choice(draft=name, length=length, longest=length, reason=reason, trial=True)
        return None

    def _learned_choice(self, candidates: Sequence[str], longest: int) -> Choice:
        plans = [self._plan(name, longest) for name in (None, *candidates)]
        self._best = best = self._best_of(plans)
        others = sorted((plan for plan in plans if plan is not best), key=lambda plan: -plan.rate)
        self._trials.won(best.name)
        trials = {plan.name: plan for plan in others}
        if best.longest > best.length:
            trials[f"{best.name}, longer"] = self._plan(best.draft, longest, min(2 * best.length, best.longest))
        tried = self._trials.next(best, trials)
        if tried is None:
            reason = "; ".join([str(best), *(f"{plan.name}: {plan.rate:.3g}/s" for plan in others)])
            return replace(best, reason=reason)
        plan = trials[tried]
        self._trying = tried, self._plan(plan.draft, longest)
        if plan.rate_within(HOPE) <= best.rate and plan.draft != best.draft:  # what is known of it is of long ago
            known = self._plain_s if plan.draft is None else self._models[plan.draft]
            known.limit(_OLD)
        return replace(plan, longest=plan.length, reason=f"trying {plan}; {best.name}: {best.rate:.3g}/s", trial=True)

    def _best_of(self, plans: Sequence[Choice]) -> Choice:
        """The best of all, but what was the best stays that until another is better without luck."""
        best = max(plans, key=lambda plan: plan.rate)
        before = next((plan for plan in plans if self._best is not None and plan.draft == self._best.draft), best)
        surest = max(plans, key=lambda plan: plan.rate_within(-_SURE))
        return before if surest.rate_within(-_SURE) <= before.rate else surest

    def _plan(self, draft: str | None, longest: int, length: int | None = None) -> Choice:
        """A cycle of a draft at the length that is expected to give the most tokens per second, 1 at least (row C7), or
        at the length given."""
        if draft is None:
            return Choice(seconds=max(_LEAST_S, self._plain_s.value or 0.0))
        model, most = self._model(draft), longest
        if self.limit_s is not None:
            busy_s = [own + self._verify_s[n + 1] for n, own in enumerate(model.draft_seconds(longest))]
            most = max((n for n in range(1, longest + 1) if busy_s[n] <= self.limit_s), default=1)
        tokens, seconds = model.tokens(most), model.seconds(most, self._verify_s, self.copy_s)
        length = length or max(range(1, most + 1), key=lambda n: tokens[n] / seconds[n])
        doubt = tokens[length] - model.tokens(length, doubt=1.0)[length]
        return Choice(
            draft=draft, length=length, longest=most, tokens=tokens[length], doubt=doubt, seconds=seconds[length]
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
