"""Names of drafts and their options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.options import parse_options
from expertcast.runtime.policies import Policies, PolicyConfig
from expertcast.runtime.policies.base import Choice
from expertcast.runtime.policies.miss import MISS, MissPolicy
from expertcast.runtime.policies.routing import ROUTING
from expertcast.runtime.storage.layout import FULL

NONE, AUTO = "none", "auto"
QUANTISED = ("int4", "int8")
RESIDENT = Policies(prefetch="none", miss="substitute:tolerance=1.0")
"""Policies of the draft `resident`: the best resident expert replaces a missing one."""
SPECULATE = "speculate"


@dataclass(frozen=True, kw_only=True)
class AutoOptions(PolicyConfig):
    """Options of `auto`."""

    longest: Annotated[int, Field(ge=1)] = 16
    """Maximum number of tokens drafted per cycle."""
    limit_s: Annotated[float, Field(gt=0)] | None = 0.5
    """Maximum seconds for drafting and verifying in a cycle; does not limit drafts of one token; none: no limit."""


def lossy_names() -> dict[str, str]:
    """Return the kind, `miss` or `routing`, of each lossy policy by name."""
    found = {cls.name: "miss" for cls in MISS.classes() if cls.lossy}
    return found | {cls.name: "routing" for cls in ROUTING.classes() if cls.lossy}


def draft_names() -> list[str]:
    """Return all names of drafts, without options."""
    return [NONE, AUTO, *QUANTISED, "resident", *lossy_names(), SPECULATE]


def keeps_copies(miss: Choice[MissPolicy]) -> bool:
    """Return whether the policy needs lower-precision copies; packed experts have none."""
    return any(level != FULL for level in getattr(miss.config, "levels", ()))


def check_draft(name: str, packed: bool = False) -> None:
    """Check the name of a draft, and that it is cheaper than the experts of the model.

    Args:
        name: the draft, with its options.
        packed: whether the model's experts are packed in 4 or 8 bits.

    Raises:
        ExpertcastError: the name or an option is unknown, or the draft is not cheaper than packed experts.
    """
    base, _, options = name.partition(":")
    if packed and (name in QUANTISED or (base in lossy_names() and keeps_copies(policies_of(name).miss))):
        raise ExpertcastError(f"draft {name!r} is no cheaper than experts in 4 or 8 bits: give another draft")
    if name in QUANTISED or (not options and base in draft_names()):
        return
    if base in lossy_names():
        policies_of(name)
    elif base == AUTO:
        auto_options(name)
    else:
        raise ExpertcastError(f"unknown draft {name!r}: choose from {', '.join(draft_names())}")


def policies_of(name: str) -> Policies:
    """Return the policies of a draft that is a lossy policy or `resident`.

    Raises:
        ExpertcastError: an option is unknown or out of range.
    """
    if name == "resident":
        return RESIDENT
    kind = lossy_names()[name.partition(":")[0]]
    return Policies(prefetch="none", **{kind: name})  # type: ignore[arg-type]


def auto_options(name: str) -> AutoOptions:
    """Return the options of a name such as `auto:longest=8,limit_s=0.2`.

    Raises:
        ExpertcastError: an option is unknown or out of range.
    """
    return parse_options(name.partition(":")[2], AutoOptions, f"draft {AUTO!r}")
