"""Simulation of drafts for a model with recorded routing: cycles of every draft length, through the runtime's cache.

Assumptions, since a recorded run has no drafts:

- a drafted token is accepted at random, with the same probability at each position. Rejected tokens need the experts of
  the text's own tokens at their positions;
- a draft pass takes a fixed fraction of an exact token's compute time, copies nothing, and forecasts a fixed fraction
  of the experts correctly; the others are replaced by random experts of the layer;
- an exact pass over several tokens takes, outside its experts, as long as one over one token, and each distinct expert
  of a layer takes the same time, since reading weights limits both.

During the draft, the runtime prefetches the forecast experts, position by position and layer by layer, until all slots
are protected. L MoE layers, E routed experts per layer, n drafted tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from pydantic import Field

from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.options import parse_options, validate
from expertcast.runtime.advising.advice import WORTH, Advice, Option
from expertcast.runtime.drafts.costs import PRIOR_ACCEPTANCE
from expertcast.runtime.simulation.machine import Case, check_slots
from expertcast.runtime.simulation.simulator import VirtualRuntime
from expertcast.runtime.simulation.trace import Forward, Trace, request_order

LONGEST = 8
"""Default maximum of n."""
FEWEST = 4
"""Minimum number of tokens to decode: the first comes from the prompt, and n = 1 needs three decode steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTraits:
    """Assumptions about a draft.

    Raises:
        ExpertcastError: a fraction is not in 0..1, or the cost is below 0.
    """

    name: str = "draft"
    acceptance: Annotated[float, Field(ge=0, le=1)] = PRIOR_ACCEPTANCE
    """Probability that a token is accepted if all tokens before it were."""
    foreseen: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of the experts that the draft forecasts correctly."""
    cost: Annotated[float, Field(ge=0)] = 1.0
    """Time of the draft's pass over one token, as a fraction of an exact token's compute time without copies."""

    def __post_init__(self) -> None:
        validate(self)

    @classmethod
    def parse(cls, text: str) -> DraftTraits:
        """Parse `NAME` or `NAME:acceptance=P,foreseen=P,cost=C`.

        Raises:
            ExpertcastError: an option is unknown or its value invalid.
        """
        name, _, options = text.partition(":")
        return replace(parse_options(options, cls, f"draft {name!r}"), name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOption(Option):
    """Drafts of one length, with the results of the simulation."""

    length: int
    """n; 0: exact steps without drafts."""
    tokens_per_s: float
    tokens_per_cycle: float
    cycle_s: float
    """Mean seconds of a cycle."""
    wait_s: float
    """Mean seconds of waiting for copies per cycle."""
    copies: float
    """Experts copied per token."""


def _advice(draft: DraftTraits, options: Sequence[DraftOption]) -> Advice[DraftOption]:
    """Choose the fastest length; plain steps unless drafts are faster by more than `WORTH`."""
    plain = options[0]
    best = max(options, key=lambda option: option.tokens_per_s)
    given = f"{draft.acceptance:.0%} accepted at {draft.cost:.2g} of a step each"
    if best.tokens_per_s > (1 + WORTH) * plain.tokens_per_s:
        headline = (
            f"{draft.name}, {best.length} ahead ({given}): {best.tokens_per_cycle:.1f} tokens in "
            f"{1e3 * best.cycle_s:.3g} ms, {best.tokens_per_s:.3g} tokens/s; plain steps {plain.tokens_per_s:.3g}"
        )
    else:
        best, other = plain, max(options[1:], key=lambda option: option.tokens_per_s)
        headline = (
            f"{draft.name} ({given}) does not pay: {other.length} ahead gives {other.tokens_per_s:.3g} tokens/s, plain "
            f"steps {plain.tokens_per_s:.3g}"
        )
    facts = {"draft": asdict(draft), "best_length": best.length, "text": headline}
    return Advice(headline=headline, chosen=best, options=options, facts=facts)


def advise_drafts(
    trace: Trace, case: Case, draft: DraftTraits, *, longest: int = LONGEST, repetitions: int = 4
) -> Advice[DraftOption]:
    """Simulate drafts of every length from 0 to `longest`, and choose the fastest.

    Args:
        trace: trace of one text: its prompt, which fills the cache first, and its decode steps.
        case: slots, link, layer times and policies; its predictor is ignored.
        draft: assumptions about the draft.
        longest: maximum of n.
        repetitions: number of simulations with different accepted tokens, the same for all lengths.

    Raises:
        ExpertcastError: the trace has fewer than `longest` + 2 decode steps or several texts, or there are too few
            slots for one token.
    """
    check_slots(case.slots, trace.shape.top_k)
    steps, fresh = trace.decode, trace.forwards[: len(trace.forwards) - trace.steps]
    if longest < 1 or len(steps) < longest + 2 or any(forward.fresh for forward in trace.forwards[len(fresh) :]):
        raise ExpertcastError(
            f"drafts of 1 to {longest} tokens need one prompt and {longest + 2} steps decoded after it, but there are "
            f"{len(steps)}: decode more tokens"
        )
    case = replace(case, predictor=None)
    runs = [_Replay(trace, case, draft, seed) for seed in range(repetitions)]
    return _advice(draft, [_mean(n, [run.cycles(n) for run in runs]) for n in range(longest + 1)])


class _Replay:
    """One text, with random accepted tokens and random forecasts for each token."""

    def __init__(self, trace: Trace, case: Case, draft: DraftTraits, seed: int) -> None:
        choose = random.Random(seed)
        self._trace, self._case = trace, case
        self._steps = [forward.keys for forward in trace.decode]
        self._accepted = [choose.random() < draft.acceptance for _ in self._steps]
        self._pass_s = draft.cost * sum(case.machine.times.compute_s)
        experts = trace.shape.experts
        self._foreseen = [
            [
                [
                    key if choose.random() < draft.foreseen else layer * experts + choose.randrange(experts)
                    for key in keys
                ]
                for layer, keys in enumerate(step)
            ]
            for step in self._steps
        ]

    def cycles(self, length: int) -> tuple[int, int, float, float, int]:
        """Decode the text with `length` drafted tokens per cycle: tokens, cycles, seconds, seconds waited, copies."""
        runtime = VirtualRuntime(self._trace, self._case)
        for forward in self._trace.forwards:
            if forward.fresh:
                runtime.run(forward)
        total = runtime.residency.stats.total
        waited_s, copies = total.waited_s, total.misses + total.prefetched
        at, cycles, seconds = 0, 0, 0.0
        while at + length < len(self._steps):
            start = runtime.link.now
            for step in self._foreseen[at : at + length]:
                for keys in step:
                    runtime.residency.prefetch(request_order(keys))
                runtime.link.spend(self._pass_s)
            drafting_s = runtime.link.now - start
            verified = _union(self._steps[at : at + length + 1])
            seconds += drafting_s + runtime.run(Forward(fresh=False, rows=slice(at, at + length + 1), keys=verified))
            kept = self._accepted[at + 1 : at + length + 1]
            at, cycles = at + 1 + (kept.index(False) if False in kept else length), cycles + 1
        total = runtime.residency.stats.total
        return at, cycles, seconds, total.waited_s - waited_s, total.misses + total.prefetched - copies


def _union(steps: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Return the distinct keys of each layer, [L], for the keys of some tokens, [T][L][K]."""
    return [request_order([key for keys in column for key in keys]) for column in zip(*steps, strict=True)]


def _mean(length: int, runs: Sequence[tuple[int, int, float, float, int]]) -> DraftOption:
    tokens, cycles, seconds, waited_s, copies = map(sum, zip(*runs, strict=True))
    return DraftOption(
        length=length, tokens_per_s=tokens / seconds, tokens_per_cycle=tokens / cycles, cycle_s=seconds / cycles,
        wait_s=waited_s / cycles, copies=copies / tokens,
    )  # fmt: skip
