"""Choice of the draft and its length, from the measured cycles of a run. Source: the governor of MoE-SpeQ."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from expertcast.predictors.messages import Json
from expertcast.runtime.drafts.costs import KEEP_SECONDS, Choice, Cycle, DraftModel, VerificationTimes
from expertcast.runtime.drafts.names import NONE
from expertcast.runtime.drafts.prefetch import LookaheadBuffer
from expertcast.runtime.recording.learning import HOPE, OUTLIER, RunningMean, Trials
from expertcast.runtime.recording.recorder import share

_MIN_SECONDS = 1e-9


@dataclass(slots=True)
class DraftCount:
    """Counts of one draft, over all sequences."""

    cycles: int = 0
    drafted: int = 0
    """Number of drafted tokens that were verified, without those that were settled before."""
    accepted: int = 0
    """Number of drafted tokens that were accepted."""
    needed: int = 0
    """Number of experts that the layers of verifications needed."""
    covered: int = 0
    """Number of these that had a slot when their layer was reached, arrived or on their way."""
    waited_bytes: int = 0
    """Bytes of the others, whose copies began only then."""
    matches: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Routing of draft and verification: pairs of a position and a layer with the same experts in the same order, with
    the same set, and all."""

    def observe(self, cycle: Cycle) -> None:
        """Count a cycle of this draft."""
        self.cycles += 1
        self.needed += cycle.needed
        self.covered += cycle.covered
        self.waited_bytes += cycle.waited_bytes
        self.matches = [a + b for a, b in zip(self.matches, cycle.matches, strict=True)]
        for known, kept in cycle.judged:
            self.drafted += cycle.drafted - known
            self.accepted += kept - known

    def as_dict(self) -> Json:
        """Return the counts with `acceptance`, `coverage` (covered / needed) and `accepted_per_waited_byte`.

        `hard`, `soft` and `mismatch` are shares of the routing: the same experts in the same order, in another order,
        and other experts (MoE-SpeQ). Shares of nothing are None.
        """
        hard, exact, pairs = self.matches
        return {
            "cycles": self.cycles,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance": share(self.accepted, self.drafted),
            "coverage": share(self.covered, self.needed),
            "accepted_per_waited_byte": share(self.accepted, self.waited_bytes),
            "hard": share(hard, pairs),
            "soft": share(exact - hard, pairs),
            "mismatch": share(pairs - exact, pairs),
        }


PLAIN_STEPS, FIRST_CYCLES, FIRST_LENGTH = 3, 2, 2
"""Initial measurements: number of plain steps, and number and length of the cycles of each draft."""
_SURE = 1.0
"""Standard errors by which another draft must lead to become the best."""
_OLD = 8.0
"""Maximum weight, in cycles, of the earlier measurements of a draft that is tried again."""
_SHOWN = 4096
_CHANGES = 64


class Governor:
    """Selects the draft and length n with the highest rate E[N(n)] / T(n); n = 0 is a plain exact step.

    A governor learns from observed cycles and serves one number of sequences, since times depend on it. It first
    measures every draft. Later it repeats measurements of drafts that are not the best, as long as these trials lose
    less than 1% of the time; a draft that may be as good as the best within the error is tried at once.

    Args:
        layers: number of MoE layers.
        copy_s: seconds to copy one expert; may be changed at any time.
        longest: maximum length of a draft.
        limit_s: maximum seconds for drafting and verifying in a cycle, which limits the pause between bursts of tokens;
            does not limit drafts of one token; None: no limit.

    Source: MoE-SpeQ; n = 0 and the trials are this project's.
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
        """During a trial: its key, and the choice expected for its draft before."""
        self._ratios: deque[float] = deque(maxlen=_SHOWN)
        self._lengths: Counter[tuple[str, int]] = Counter()
        self._changes: deque[Json] = deque(maxlen=_CHANGES)
        self._cycle = self._drafted = 0
        """Number of cycles, and number of cycles with a draft."""
        self._emitted = 0.0
        """Number of tokens of the cycles with a draft, mean over sequences."""

    def limit(self, longest: int, limit_s: float | None) -> None:
        """Set `longest` and `limit_s` for later cycles."""
        self.longest, self.limit_s = longest, limit_s
        self._verify_s = self._verify.values(longest + 1)
        """Estimated seconds to verify 0 to `longest` + 1 positions."""

    def choose(self, candidates: Sequence[str], longest: int | None = None) -> Choice:
        """Return the choice for the next cycle.

        Args:
            candidates: names of usable drafts; a plain step is always possible.
            longest: maximum length this time, such as the number of tokens left; None: the governor's own limit.
        """
        longest = self.longest if longest is None else min(longest, self.longest)
        self._trying, candidates = None, [name for name in candidates if name != NONE]
        choice = self._first_choice(candidates, longest) or self._learned_choice(candidates, longest)
        if self._now is None or (choice.draft, choice.trial) != (self._now.draft, self._now.trial):
            self._changes.append({"cycle": self._cycle, "reason": choice.reason})
        self._now = choice
        return choice

    def should_continue(self, now: Choice, buffer: LookaheadBuffer) -> bool:
        """Return whether to draft another token, given the new experts so far.

        The worth of a length is E[N] minus the tokens that the run yields in T seconds at its best rate. Drafting
        continues if a longer draft is worth more than verifying now. Plain E[N] / T would draft on in a cycle with
        unexpectedly many new experts, to spread its costs, and lose time.

        Args:
            now: choice of this cycle.
            buffer: experts of this cycle; its positions are the tokens drafted so far.
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
        """Learn from a cycle."""
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
        """Return the measurements and choices as plain values.

        - `drafts`: :meth:`DraftModel.report` by name
        - `plain_s`: seconds of a plain step; `verify_s`: seconds of verifying, by number of positions
        - `predicted_over_actual`: median ratio of predicted to measured cycle time; `median_error`: median deviation
          of this ratio from 1; `within_tenth`: share of cycles with a deviation of at most 0.1
        - `tokens_per_cycle`: mean over cycles with a draft; `lengths`: number of cycles by draft and length
        - `seconds`: total time; `lost_s`: time lost by trials
        - `reasons`: one line for every change of draft
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
        """Return the choice of an initial measurement, or None if all are done."""
        if longest < 1 or not candidates:
            return Choice(reason=f"{NONE}: no token can be drafted")
        if self._plain_steps < PLAIN_STEPS:
            return Choice(reason=f"trying {NONE}: too few measurements", trial=True)
        length = min(FIRST_LENGTH, longest)
        for name in candidates:
            if self._model(name).cycles < FIRST_CYCLES:
                reason = f"trying {name}, {length} ahead: too few measurements"
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
        if plan.rate_within(HOPE) <= best.rate and plan.draft != best.draft:  # its measurements are outdated
            known = self._plain_s if plan.draft is None else self._models[plan.draft]
            known.limit(_OLD)
        return replace(plan, longest=plan.length, reason=f"trying {plan}; {best.name}: {best.rate:.3g}/s", trial=True)

    def _best_of(self, plans: Sequence[Choice]) -> Choice:
        """Return the plan with the highest rate; the previous best stays until another leads by `_SURE` errors."""
        best = max(plans, key=lambda plan: plan.rate)
        before = next((plan for plan in plans if self._best is not None and plan.draft == self._best.draft), best)
        surest = max(plans, key=lambda plan: plan.rate_within(-_SURE))
        return before if surest.rate_within(-_SURE) <= before.rate else surest

    def _plan(self, draft: str | None, longest: int, length: int | None = None) -> Choice:
        """Return a cycle of a draft at `length`, by default the length of 1 or more with the best rate."""
        if draft is None:
            return Choice(seconds=max(_MIN_SECONDS, self._plain_s.value or 0.0))
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
        """Return the seconds expected for a cycle when its verification started; None before enough measurements."""
        if cycle.draft is None:
            return self._plain_s.value if self._plain_steps >= PLAIN_STEPS else None
        model = self._model(cycle.draft)
        if model.cycles < FIRST_CYCLES:
            return None
        n, verify_s = cycle.drafted, self._verify.values(cycle.drafted + 1)
        return model.seconds(n, verify_s, self.copy_s, cycle.growth)[n]

    def _model(self, draft: str) -> DraftModel:
        return self._models.setdefault(draft, DraftModel(self._layers))
