"""All claims of the study, and their judgement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.study import claims_eviction, claims_forecast, claims_prefetching, claims_systems
from benchmarks.study.found import Claim, Found

_FILES = (claims_eviction, claims_prefetching, claims_forecast, claims_systems)
CLAIMS = [value for file in _FILES for value in vars(file).values() if isinstance(value, Claim)]
"""In the order of the files and of the claims in them."""


def claims(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """Each claim with where it is from, what was measured here and the verdict."""
    found = Found(result)
    return [claim.judged(found) for claim in CLAIMS]
