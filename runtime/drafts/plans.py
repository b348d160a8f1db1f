"""What a draft, or none, is expected to do in a cycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expertcast.runtime.drafts.costs import DraftModel

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
