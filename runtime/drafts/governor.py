"""Chooses the draft and its length, none included, from what a run's own cycles took and gave (rows C3 to C7)."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Container, Sequence

from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.runtime.drafts.costs import KEEP_SECONDS, DraftModel, VerificationTimes
from expertcast.runtime.drafts.cycle import Choice, Cycle
from expertcast.runtime.drafts.lookahead import LookaheadBuffer
from expertcast.runtime.drafts.plans import NONE, Plan, draft_plan, plain_plan
from expertcast.runtime.drafts.roofline import RooflinePoint, roofline
from expertcast.runtime.drafts.running import OUTLIER, RunningMean
from expertcast.runtime.drafts.trials import Candidate, Trials

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
