"""What :func:`expertcast.runtime.advising.absent.advise_absent` gives back: plain numbers, and a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from expertcast.predictors.plain import Json, aligned
from expertcast.runtime.advising.advice import milliseconds
from expertcast.runtime.config import OffloadConfig

CAVEAT = "no GPU was asked: these are figures of a model of one (docs/timed-device.md), which a GPU may refute"
_TRAIN = (
    "prefetching needs a predictor that is so often right: train one (expertcast train), and give its folder as "
    "--predictor to be told with its own recall"
)
_GRAPH = (
    "for the graph, decode with expertcast.runtime.GraphDecoder(offloaded, max_length); its figures leave the host out"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to decode, and what it takes per token."""

    link: str
    """`cuda`, or `kernel`: a step is one CUDA graph."""
    prefetch: bool
    tpot_s: float
    """Median."""
    bound_s: float
    """No schedule is faster: the slowest of link, device and host."""
    limit: str
    """Which of them that is."""
    misses: float
    """Experts that were not there when their layer asked."""
    copies: float
    """Misses, and what forecasts asked for."""

    @property
    def name(self) -> str:
        """For a sentence."""
        what = "prefetch" if self.prefetch else "load on demand"
        return f"{what}, a step as one CUDA graph" if self.link == "kernel" else what

    @property
    def time(self) -> str:
        """For a sentence."""
        over = self.tpot_s / self.bound_s
        return f"{milliseconds(self.tpot_s)} per token, {over:.2f} times the bound of {milliseconds(self.bound_s)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentAdvice:
    """What to do on a GPU that is not there, what its model expects, and why."""

    chosen: Way
    ways: list[Way]
    """Over each link, on demand first."""
    levers: dict[str, float]
    """Seconds per token of what is advised with one thing different."""
    reasons: list[str]
    bandwidth: float
    """Bytes per second."""
    host: str
    accuracy: float
    """Recall@k of the forecasts."""
    predictor: str | None
    """The checkpoint of which that is the recall."""
    cache: bool
    slots: int
    experts: int
    """Of all layers together."""
    block_bytes: int
    """Of one expert, in bf16."""

    def config(self) -> OffloadConfig:
        """What is advised, as a configuration to run with; without a checkpoint it names no predictor."""
        return OffloadConfig(
            link=self.chosen.link,
            cache=self.cache,
            slots=self.slots if self.cache else None,
            predictor=self.predictor if self.chosen.prefetch else None,
        )

    def as_dict(self) -> Json:
        """Plain values, for JSON."""
        return {**asdict(self), "caveat": CAVEAT}

    def text(self) -> str:
        """For the terminal."""
        room = f"{self.slots} of {self.experts} experts in {self.slots * self.block_bytes / 1e9:.3g} GB"
        copy = milliseconds(self.block_bytes / self.bandwidth)
        steps = [_TRAIN] if self.chosen.prefetch and self.predictor is None else []
        steps += [_GRAPH] if self.chosen.link == "kernel" else []
        return "\n".join(
            [
                f"advice: {self.chosen.name}; expect {milliseconds(self.chosen.tpot_s)} per token",
                "",
                *(f"- {reason}" for reason in [*self.reasons, *steps]),
                "",
                _table(self.ways),
                "",
                f"link {self.bandwidth / 1e9:.3g} GB/s, {copy} per expert; {room if self.cache else 'no cache'}; "
                f"host {self.host}; {self.accuracy:.0%} of experts forecast right",
                CAVEAT,
            ]
        )


def _table(ways: Sequence[Way]) -> str:
    rows = [["experts", "link", "as a graph", "ms/token", "over the bound", "limit", "misses", "copies"]]
    for way in ways:
        rows.append(
            [
                "prefetched" if way.prefetch else "on demand",
                way.link,
                "yes" if way.link == "kernel" else "no",
                f"{1e3 * way.tpot_s:.2f}",
                f"{way.tpot_s / way.bound_s:.2f}",
                way.limit,
                f"{way.misses:.4g}",
                f"{way.copies:.4g}",
            ]
        )
    return aligned(rows, left=3)
