"""Published systems as sets of policies, by name.

Each preset says which predictor the system forecasts with, for whoever runs it: a parameter-free one, or none.
"""

from __future__ import annotations

from dataclasses import dataclass

from expertcast.runtime.policies.settings import Policies


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A system's policies with the forecast they rest on."""

    policies: Policies
    source: str
    """Where the configuration comes from."""
    predictor: str | None = "router_input"


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
    "specmd_1": Preset(policies=Policies(), source="SpecMD Table 1, Eliseev and Mazur"),
    "specmd_2": Preset(
        policies=Policies(eviction="score", prefetch="percentile", miss="substitute"),
        source="SpecMD Table 1, Zhu et al.",
    ),
    "specmd_3": Preset(policies=Policies(eviction="lhu", miss="cascade"), source="SpecMD Table 1, HOBBIT"),
    "specmd_4": Preset(
        policies=Policies(prefetch="none", routing="cache_aware"),
        predictor=None,
        source="SpecMD Table 1, mixture of cache-conditional experts",
    ),
    "specmd_5": Preset(
        policies=Policies(eviction="least_stale", prefetch="percentile"), source="SpecMD Table 1, the paper's own"
    ),
    "activeevict": _activeevict("ActiveEvict, rows D5 to D10"),
    "activeevict_prediction_only": _activeevict("row D12: alpha 0", "importance:alpha=0.0"),
    "activeevict_hotness_only": _activeevict("row D12: alpha 1", "importance:alpha=1.0"),
    "activeevict_lru": _activeevict("row D12: lru decides what is released", "lru"),
    "activeevict_fixed_top_k": _activeevict("row D12: pre-eviction without a routing budget", routing="standard"),
}
