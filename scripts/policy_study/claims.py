"""All claims of the study, and their judgement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policy_study.claims_caching import CACHING
from policy_study.claims_systems import SYSTEMS
from policy_study.found import Found

CLAIMS = CACHING + SYSTEMS


def claims(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """Each claim with where it is from, what was measured here and the verdict."""
    found = Found(result)
    return [claim.judged(found) for claim in CLAIMS]
