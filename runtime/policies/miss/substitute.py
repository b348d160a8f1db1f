"""Run a held expert in a missing one's place if the router scored it nearly as high (row A11)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.miss.base import Lookup, MissPolicy, Verdict
from expertcast.runtime.policies.registry import PolicyConfig


@dataclass(frozen=True, kw_only=True)
class SubstituteConfig(PolicyConfig):
    """How much worse a substitute may be."""

    tolerance: float = 0.5
    """Part of the missing expert's router probability that its substitute's may lack."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance <= 1:
            raise ExpertcastError(f"tolerance={self.tolerance:g}: give 0 (no loss of score) to 1 (any held expert)")


class Substitute(MissPolicy):
    """Of the held experts that none of the missing one's tokens uses already, the likeliest; fetched if there is none.

    Scores are router probabilities, their mean over the tokens that chose the missing expert. A substitute stands for
    one expert of a token only; the heaviest missing experts choose first. The paper gives no tolerance: with half of
    the score, about 45 in 100 misses of the reference model at a quarter of its experts find a substitute.
    """

    name = "substitute"
    config_class = SubstituteConfig
    config: SubstituteConfig

    def decide(self, lookup: Lookup) -> Verdict:
        tokens = _tokens_of_missing(lookup)
        if not tokens:
            return Verdict()
        probabilities = lookup.probabilities()
        taken = [set(row) for row in lookup.ids]
        substitute = {}
        for expert in sorted(tokens, key=lambda key: (-max(tokens[key].values()), key)):
            rows = tokens[expert]
            found = self._nearest(expert, set(lookup.held).difference(*(taken[t] for t in rows)), probabilities, rows)
            if found is not None:
                substitute[expert] = found
                for t in rows:
                    taken[t].add(found)
        return Verdict(substitute=substitute)

    def _nearest(
        self, missing: int, candidates: set[int], probabilities: Sequence[Sequence[float]], rows: Collection[int]
    ) -> int | None:
        """The likeliest candidate, if it is likely enough."""

        def score(expert: int) -> float:
            return sum(probabilities[t][expert] for t in rows)

        best = max(candidates, key=lambda expert: (score(expert), -expert), default=None)
        if best is None or score(best) < (1 - self.config.tolerance) * score(missing):
            return None
        return best


def _tokens_of_missing(lookup: Lookup) -> dict[int, dict[int, float]]:
    """The tokens (rows) that chose each missing expert, with the weights that they gave it."""
    tokens: dict[int, dict[int, float]] = {expert: {} for expert in lookup.missing()}
    for t, (row, weights) in enumerate(zip(lookup.ids, lookup.weights, strict=True)):
        for expert, weight in zip(row, weights, strict=True):
            if expert in tokens:
                tokens[expert][t] = weight
    return tokens
