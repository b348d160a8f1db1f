"""Load whatever is missing, in full (row A5)."""

from __future__ import annotations

from expertcast.runtime.policies.miss.base import Lookup, MissPolicy, Verdict


class Fetch(MissPolicy):
    """Waits for every missing expert: the output is the resident model's."""

    name = "fetch"
    lossy = False

    def decide(self, lookup: Lookup) -> Verdict:
        return Verdict()
