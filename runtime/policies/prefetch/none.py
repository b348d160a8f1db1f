"""Nothing is prefetched: forecasts serve eviction alone."""

from __future__ import annotations

from expertcast.runtime.policies.prefetch.base import PrefetchPolicy, Transfer, Wanted


class NoPrefetch(PrefetchPolicy):
    """Asks for nothing."""

    name = "none"

    def experts(self, wanted: Wanted, transfer: Transfer | None) -> list[int]:
        return []
