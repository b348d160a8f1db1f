"""Policies as the command line takes them: a preset's name, or one for each kind that is not the default."""

from __future__ import annotations

from collections.abc import Sequence

from expertcast.predictors import ExpertcastError
from expertcast.runtime.policies import Policies

POLICIES_HELP = "eviction, prefetch, miss, routing, pre_eviction or scope, such as eviction=lfu; or a preset's name"


def policies_of(words: Sequence[str]) -> Policies | str:
    """`kind=policy` for each kind that is not the default, or a preset's name.

    Raises:
        ExpertcastError: an unknown kind or policy.
    """
    if len(words) == 1 and "=" not in words[0]:
        return words[0]
    kinds = list(Policies().as_dict())
    given = dict(word.partition("=")[::2] for word in words)
    for kind in given:
        if kind not in kinds:
            raise ExpertcastError(f"--policies {kind}: give a preset alone, or KIND=POLICY of {', '.join(kinds)}")
    return Policies(**given)
