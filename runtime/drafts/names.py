"""What a draft is called: names with options, as users write them."""

from __future__ import annotations

from dataclasses import dataclass

from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.options import parse_options
from expertcast.runtime.policies import Policies, PolicyConfig
from expertcast.runtime.policies.base import number
from expertcast.runtime.policies.miss import MISS
from expertcast.runtime.policies.routing import ROUTING

NONE, AUTO = "none", "auto"
QUANTISED = ("int4", "int4:calibrated", "int8")
RESIDENT = Policies(prefetch="none", miss="substitute:tolerance=1.0")
"""Any held expert in place of a missing one: nothing is loaded while there is one."""
EARLY_EXIT, SPECULATE, PROMPT_LOOKUP, MTP = "early_exit", "speculate", "prompt_lookup", "mtp"


@dataclass(frozen=True, kw_only=True)
class EarlyExitOptions:
    """Options of `early_exit`."""

    layers: int = 0
    """Blocks that run; 0: half of them."""


@dataclass(frozen=True, kw_only=True)
class AutoOptions(PolicyConfig):
    """Options of `auto`."""

    longest: int = number(16, "[1, inf)")
    """Tokens drafted in a cycle at most."""
    limit_s: float | None = number(0.5, "(0, inf)")
    """Seconds of a cycle's drafting and verifying at most, a draft of one token excepted; none: no limit."""


def lossy_names() -> dict[str, str]:
    """Names of lossy policies, with their kind."""
    found = {cls.name: "miss" for cls in MISS.classes() if cls.lossy}
    return found | {cls.name: "routing" for cls in ROUTING.classes() if cls.lossy}


def draft_names() -> list[str]:
    """All that a draft can be called."""
    return [NONE, AUTO, *QUANTISED, "resident", *lossy_names(), SPECULATE, EARLY_EXIT, PROMPT_LOOKUP, MTP]


def check_draft(name: str, packed: bool = False) -> None:
    """Refuse an unknown draft, and one in few bits of a model whose experts are packed already.

    Args:
        name: the draft, with its options.
        packed: whether the model's experts are packed in 4 or 8 bits.

    Raises:
        ExpertcastError: unknown name or option; the message lists the known ones. Or the draft is no cheaper.
    """
    base, _, options = name.partition(":")
    if packed and name in QUANTISED:
        raise ExpertcastError(f"draft {name!r} is no cheaper than experts in 4 or 8 bits: give another draft")
    if name in QUANTISED or (not options and base in draft_names()):
        return
    if base in lossy_names():
        policies_of(name)
    elif base == EARLY_EXIT:
        early_exit_options(name)
    elif base == AUTO:
        auto_options(name)
    else:
        raise ExpertcastError(f"unknown draft {name!r}: choose from {', '.join(draft_names())}")


def policies_of(name: str) -> Policies:
    """The policies that a lossy policy's name stands for.

    Raises:
        ExpertcastError: an unknown option, or one out of range.
    """
    if name == "resident":
        return RESIDENT
    kind = lossy_names()[name.partition(":")[0]]
    return Policies(prefetch="none", **{kind: name})  # type: ignore[arg-type]


def early_exit_options(name: str) -> EarlyExitOptions:
    """The options in `early_exit:layers=4`.

    Raises:
        ExpertcastError: an unknown option, or one out of range.
    """
    return parse_options(name.partition(":")[2], EarlyExitOptions, f"draft {EARLY_EXIT!r}")


def auto_options(name: str) -> AutoOptions:
    """The options in `auto:longest=8,limit_s=0.2`.

    Raises:
        ExpertcastError: an unknown option, or one out of range.
    """
    return parse_options(name.partition(":")[2], AutoOptions, f"draft {AUTO!r}")
