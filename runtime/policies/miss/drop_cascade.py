"""Skip missing experts of low rank, and load the others in the precision that they deserve (row A10: A8 and A9)."""

from __future__ import annotations

from dataclasses import dataclass

from expertcast.runtime.policies.miss.base import Lookup, Verdict
from expertcast.runtime.policies.miss.cascade import Cascade, CascadeConfig
from expertcast.runtime.policies.miss.drop import DropConfig, low_ranked


@dataclass(frozen=True, kw_only=True)
class DropCascadeConfig(CascadeConfig, DropConfig):
    """What is never dropped, and the precisions of what is fetched."""

    def __post_init__(self) -> None:
        CascadeConfig.__post_init__(self)
        DropConfig.__post_init__(self)


class DropCascade(Cascade):
    """What is not dropped is left to the cascade."""

    name = "drop_cascade"
    config_class = DropCascadeConfig
    config: DropCascadeConfig

    def decide(self, lookup: Lookup) -> Verdict:
        verdict = super().decide(lookup)
        verdict.dropped = low_ranked(lookup, self.config.fetched)
        for expert in verdict.dropped:
            del verdict.precision[expert]
        return verdict
