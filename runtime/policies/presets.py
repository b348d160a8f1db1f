"""Published systems as sets of policies, by name.

Each preset says which predictor the system forecasts with, for whoever runs it: a parameter-free one, or none.
"""

from __future__ import annotations

from dataclasses import dataclass

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.prefetch.top_k import MOST_OVERFETCH
from expertcast.runtime.policies.settings import Policies


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A system's policies with the forecast they rest on, and what it was measured with where its paper says so."""

    policies: Policies
    source: str
    """Where the configuration comes from."""
    predictor: str | None = "router_input"
    capacity: float | None = None
    """Share of all experts that fit on the device in the published runs."""
    bandwidth: float | None = None
    """Bytes per second of the link there."""
    base_precision: str | None = None
    """What experts are stored and copied in there."""


def preset(name: str) -> Preset:
    """A preset by its name.

    Raises:
        ExpertcastError: unknown name; the message lists the known ones.
    """
    if name not in PRESETS:
        raise ExpertcastError(f"unknown preset {name!r}: choose from {', '.join(PRESETS)}")
    return PRESETS[name]


def published(name: str) -> tuple[float, float, str]:
    """Capacity, bandwidth and base precision that a preset was published with (row A25).

    Raises:
        ExpertcastError: unknown name, or its paper gives no such numbers.
    """
    found = preset(name)
    if found.capacity is None or found.bandwidth is None or found.base_precision is None:
        known = ", ".join(each for each, made in PRESETS.items() if made.capacity is not None)
        raise ExpertcastError(
            f"preset {name!r} was published without capacity, bandwidth and precision: {known} have them"
        )
    return found.capacity, found.bandwidth, found.base_precision


def _specmd(source: str, policies: Policies, predictor: str | None = "router_input") -> Preset:
    """A row of SpecMD's Table 1: 5% of the experts, 4-bit experts, 5 GB/s (row A25)."""
    return Preset(
        policies=policies, source=f"SpecMD Table 1, {source}", predictor=predictor,
        capacity=0.05, bandwidth=5e9, base_precision="int4",
    )  # fmt: skip


def _activeevict(source: str, eviction: str = "importance", **changes: str) -> Preset:
    chosen = {"prefetch": "none", "pre_eviction": "gap", "routing": "budget", "scope": "layer"} | changes
    return Preset(policies=Policies(eviction=eviction, **chosen), source=source)


PRESETS: dict[str, Preset] = {
    "on_demand": Preset(policies=Policies(prefetch="none"), predictor=None, source="row D13: lru, nothing forecast"),
    "moe_offloading": Preset(policies=Policies(scope="layer"), source="row D13: Eliseev and Mazur, per-layer lru"),
    "moe_apex": Preset(
        policies=Policies(prefetch="top_k:overfetch=1.5", scope="layer"),
        source="row D13: more of the router's experts; the paper gives no number, 1.5 K are ours",
    ),
    "zero_infinity": Preset(
        policies=Policies(eviction="fifo", prefetch=f"top_k:overfetch={MOST_OVERFETCH}"),
        source="row E21: the next layer's experts whole, whatever is forecast; no router is waited for",
    ),
    "specmd_1": _specmd("Eliseev and Mazur", Policies()),
    "specmd_2": _specmd("Zhu et al.", Policies(eviction="score", prefetch="percentile", miss="substitute")),
    "specmd_3": _specmd("HOBBIT", Policies(eviction="lhu", miss="cascade")),
    "specmd_4": _specmd(
        "mixture of cache-conditional experts", Policies(prefetch="none", routing="cache_aware"), predictor=None
    ),
    "specmd_5": _specmd("the paper's own", Policies(eviction="least_stale", prefetch="percentile")),
    "activeevict": _activeevict("ActiveEvict, rows D5 to D10"),
    "activeevict_prediction_only": _activeevict("row D12: alpha 0", "importance:alpha=0.0"),
    "activeevict_hotness_only": _activeevict("row D12: alpha 1", "importance:alpha=1.0"),
    "activeevict_lru": _activeevict("row D12: lru decides what is released", "lru"),
    "activeevict_fixed_top_k": _activeevict("row D12: pre-eviction without a routing budget", routing="standard"),
}
