"""Where drafts of each length stand between what computing and what copying allows (rows C3 and C6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePoint:
    """A draft of one length, under its two roofs."""

    length: int
    """n"""
    tokens: float
    """E[N(n)]"""
    bytes_waited: float
    """What came over the link in a cycle while nothing else could go on: synchronous I/O."""
    rate: float
    """P(n): tokens per second."""
    compute_roof: float
    """Tokens per second if no copy were ever waited for; it depends on n, as drafting and verifying do."""

    @property
    def intensity(self) -> float | None:
        """I(n): tokens per byte of synchronous I/O; None where there is none, and nothing is under the slope."""
        return self.tokens / self.bytes_waited if self.bytes_waited else None

    def io_roof(self, bandwidth: float) -> float | None:
        """Tokens per second if computing took no time: the slope, at this intensity; None where nothing is copied."""
        return None if self.intensity is None else self.intensity * bandwidth

    def as_dict(self) -> Json:
        """All of it as plain values."""
        return {**asdict(self), "intensity": self.intensity}


def roofline(
    tokens: Sequence[float], compute_s: Sequence[float], cycle_s: Sequence[float], bandwidth: float
) -> list[RooflinePoint]:
    """Points of the picture, one for each length.

    Computing and waiting for copies exclude each other, so 1 / P = 1 / (compute roof) + 1 / (I/O roof): a point reaches
    neither of its roofs unless it lies far under the other.

    Args:
        tokens: [N] E[N(n)] of n = 0, 1, ...: the bonus token included, n = 0 is a plain step with 1.
        compute_s: [N] seconds of drafting and verifying, without waiting.
        cycle_s: [N] seconds of the whole cycle; what is beyond computing was waited for the link.
        bandwidth: of the link, bytes per second.

    Raises:
        ExpertcastError: no bandwidth, or a cycle that computes for no time.
    """
    if not bandwidth > 0 or not all(seconds > 0 for seconds in compute_s):
        raise ExpertcastError(f"bandwidth={bandwidth}, compute_s={list(compute_s)}: give numbers above 0")
    return [
        RooflinePoint(
            length=n, tokens=own, bytes_waited=max(0.0, whole_s - busy_s) * bandwidth,
            rate=own / max(whole_s, busy_s), compute_roof=own / busy_s,
        )
        for n, (own, busy_s, whole_s) in enumerate(zip(tokens, compute_s, cycle_s, strict=True))
    ]  # fmt: skip
