"""What :func:`expertcast.runtime.advising.advise.advise` gives back: plain numbers, and a text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from expertcast.predictors.plain import Json, aligned
from expertcast.runtime.config import OffloadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run the model, and what is expected of it. Times are medians over decode steps."""

    mode: str
    """`on_demand`, `exact` or `speculate`."""
    predictor: str | None
    ahead: int | None
    tpot_s: float
    wait_s: float
    """Waiting for copies, per token."""
    forecast_s: float
    """Making forecasts, per token."""
    unexplained_s: float
    """Added to the event model's time per token: what it missed of the short run that the layer times come from."""
    hit_rate: float
    bytes_per_token: float
    recall: float | None
    """Mean over layers."""
    recall_source: str | None
    """`metrics.json` or `measured`."""

    @property
    def name(self) -> str:
        """For a sentence."""
        return "on demand" if self.predictor is None else f"{self.predictor} {self.ahead} ahead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do, what to expect, and why."""

    prefetch: bool
    predictor: str | None
    ahead: int | None
    tpot_s: float
    """Expected of what is advised."""
    options: list[Option]
    """All that was considered, on demand first."""
    most_to_gain: float
    """Share of the on-demand time that prefetching could hide at best (row B11)."""
    levers: dict[str, float]
    """Expected seconds per token of what is advised, if one thing were different."""
    reasons: list[str]
    slots: int
    experts: int
    """Of all layers together."""
    memory_bytes: int
    """Of the slots."""
    link_rate: float
    """Bytes per second, measured."""
    copy_s: float
    """One expert's copy."""
    layer_compute_s: list[float]
    """Per layer, on demand, measured."""
    measured_on_demand_s: float
    """Seconds per token of the survey's own on-demand run."""

    def config(self, given: OffloadConfig) -> OffloadConfig:
        """What is advised, as a configuration to run with; a predictor that was given as an object is only named.
        Slots, cache, link, store and so on stay as they are in what the advice was asked for.
        """
        return replace(given, predictor=self.predictor, ahead=self.ahead or 1, mode="exact", layers=None)

    def as_dict(self) -> Json:
        """Plain values, for JSON."""
        return asdict(self)

    def text(self) -> str:
        """For the terminal."""
        what = "load on demand"
        if self.prefetch:
            what = f"prefetch with {self.predictor}, {self.ahead} layer{'s' * (self.ahead != 1)} ahead"
        return "\n".join(
            [
                f"advice: {what}; expect {milliseconds(self.tpot_s)} per token",
                "",
                *(f"- {reason}" for reason in self.reasons),
                "",
                _table(self.options),
                "",
                f"link {self.link_rate / 1e9:.3g} GB/s, {milliseconds(self.copy_s)} per expert; {self.slots} of "
                f"{self.experts} experts in {self.memory_bytes / 1e6:.4g} MB",
                f"measured on demand: {milliseconds(self.measured_on_demand_s)} per token, which the event model "
                f"misses by {milliseconds(self.options[0].unexplained_s)}",
            ]
        )


def milliseconds(seconds: float) -> str:
    """For a sentence."""
    return f"{1e3 * seconds:.3g} ms"


def _table(options: Sequence[Option]) -> str:
    rows = [["mode", "predictor", "ahead", "ms/token", "waiting", "forecasts", "hit rate", "MB/token", "recall"]]
    for option in options:
        rows.append(
            [
                option.mode,
                option.predictor or "-",
                str(option.ahead or "-"),
                f"{1e3 * option.tpot_s:.2f}",
                f"{1e3 * option.wait_s:.2f}",
                f"{1e3 * option.forecast_s:.2f}",
                f"{option.hit_rate:.3f}",
                f"{option.bytes_per_token / 1e6:.2f}",
                "-" if option.recall is None else f"{option.recall:.3f}",
            ]
        )
    return aligned(rows, left=len(rows[0]))
