"""A governor's lengths against the best ones in hindsight.

Every cycle that a governor ran is replayed with every length, by what cycles of fixed lengths took in the same setting:
the share accepted at each position, seconds of a draft pass, of a verification of so many tokens and of what neither
explains, and the new experts that this cycle is known to have had. The best length is worth most where time is worth
what the fastest fixed length makes of it. n drafted tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from expertcast.predictors.messages import Json
from expertcast.runtime.drafts.costs import Choice, Cycle, expected_tokens, exposed_seconds

ENOUGH = 0.97
"""A length with so much of the best one's tokens per second is as good."""


class Hindsight:
    """What fixed lengths took.

    Args:
        fixed: cycles of several lengths, one draft.
        plain_s: of a plain step.
        copy_s: of one expert's copy.
        layers: MoE layers.
    """

    def __init__(self, fixed: Sequence[Cycle], plain_s: float, copy_s: float, layers: int) -> None:
        self._copy_s, self._layers = copy_s, layers
        by_length: dict[int, list[Cycle]] = {}
        for cycle in fixed:
            if cycle.drafted:
                by_length.setdefault(cycle.drafted, []).append(cycle)
        lengths = sorted(by_length)
        self.longest = lengths[-1]
        self._plain_s = plain_s
        places, cycles = range(self.longest), [cycle for n in lengths for cycle in by_length[n]]
        self._new = [_mean([c.growth[place] for c in cycles if len(c.growth) > place]) for place in places]
        self._pass_s = [_mean([c.passes_s[place] for c in cycles if len(c.passes_s) > place]) for place in places]
        judged = [[c.accepted[0] > place for c in cycles if c.drafted > place <= c.accepted[0]] for place in places]
        self.tokens = expected_tokens(_mean(own) for own in judged)
        verify_s = [statistics.median(c.verify_s - c.waited_s for c in by_length[n]) for n in lengths]
        self._verify_s = np.interp(range(self.longest + 1), lengths, verify_s).tolist()
        self._rest_s = [0.0] * (self.longest + 1)
        rest = [_mean([c.total_s - self.seconds(c)[n] for c in by_length[n]]) for n in lengths]
        self._rest_s = np.interp(range(self.longest + 1), lengths, rest).tolist()
        rates = [sum(c.emitted for c in by_length[n]) / sum(c.total_s for c in by_length[n]) for n in lengths]
        self.rate = max(1 / plain_s, *rates)
        """Tokens per second at the best fixed length."""

    def seconds(self, cycle: Cycle) -> list[float]:
        """Of a cycle of 0 to `longest` tokens with the new experts of this one, as far as they are known."""
        new = [*cycle.growth, *self._new[len(cycle.growth) :]]
        drafting = backlog = 0.0
        found = [self._plain_s]
        for n in range(1, self.longest + 1):
            own_s = self._pass_s[n - 1]
            drafting += own_s
            backlog = max(0.0, backlog + new[n - 1] * self._copy_s - own_s)
            verify_s = self._verify_s[n]
            found.append(drafting + verify_s + exposed_seconds(backlog, verify_s, self._layers) + self._rest_s[n])
        return found

    def judge(self, cycles: Sequence[Cycle], choices: Sequence[Choice]) -> Json:
        """`cycles` that were no trials; `agree`, the share of them whose length is the best in hindsight, `as_good`,
        that gives nearly as many tokens per second; `rate_share`, tokens per second of all over those of the best."""
        same = good = 0
        own_s = best_s = own_tokens = best_tokens = 0.0
        count = 0
        for cycle, choice in zip(cycles, choices, strict=True):
            if choice.trial or cycle.drafted > self.longest or cycle.ended or cycle.drafted < min(choice.length, 1):
                continue
            count += 1
            seconds = self.seconds(cycle)
            best = max(range(len(seconds)), key=lambda n: self.tokens[n] - self.rate * seconds[n])
            own = cycle.drafted
            same += own == best
            good += self.tokens[own] / seconds[own] >= ENOUGH * self.tokens[best] / seconds[best]
            own_s, own_tokens = own_s + seconds[own], own_tokens + self.tokens[own]
            best_s, best_tokens = best_s + seconds[best], best_tokens + self.tokens[best]
        if not count:
            return {"cycles": 0, "agree": None, "as_good": None, "rate_share": None}
        share = own_tokens / own_s / (best_tokens / best_s)
        return {"cycles": count, "agree": same / count, "as_good": good / count, "rate_share": share}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
