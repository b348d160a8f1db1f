"""Published systems with the settings they were published with (row A25)."""

from __future__ import annotations

import pytest

from expertcast.predictors import ExpertcastError
from expertcast.runtime.policies import PRESETS
from expertcast.runtime.policies.settings import preset, published

SPECMD = [f"specmd_{number}" for number in range(1, 6)]


@pytest.mark.parametrize("name", PRESETS)
def test_what_specmd_was_measured_with(name: str) -> None:
    """Table 1: 5% cache capacity, 4-bit quantisation, 5 GB/s; the other papers give no such numbers."""
    made = preset(name)
    if name in SPECMD:
        assert published(name) == (made.capacity, made.bandwidth, made.base_precision) == (0.05, 5e9, "int4")
        return
    assert (made.capacity, made.bandwidth, made.base_precision) == (None, None, None)
    with pytest.raises(ExpertcastError, match=f"{name}.*: {', '.join(SPECMD)} have them"):
        published(name)


def test_specmds_table() -> None:
    """Its five rows: prefetching, eviction, miss handling and routing."""
    rows = {
        name: (each.prefetch.name, each.eviction.name, each.miss.name, each.routing.name)
        for name, each in ((name, PRESETS[name].policies) for name in SPECMD)
    }
    assert list(rows.values()) == [
        ("top_k", "lru", "fetch", "standard"),
        ("percentile", "score", "substitute", "standard"),
        ("top_k", "lhu", "cascade", "standard"),
        ("none", "lru", "fetch", "cache_aware"),
        ("percentile", "least_stale", "fetch", "standard"),
    ]
    assert [PRESETS[name].predictor for name in SPECMD] == ["router_input"] * 3 + [None, "router_input"]


def test_an_unknown_preset() -> None:
    with pytest.raises(ExpertcastError, match="unknown preset 'fastest': choose from on_demand"):
        preset("fastest")
