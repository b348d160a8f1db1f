"""A cache of keys alone: what a policy would have missed, had it decided."""

from __future__ import annotations

from collections.abc import Sequence

from expertcast.runtime.policies.eviction.base import EvictionPolicy


class Shadow:
    """Books of a cache that loads on demand, without weights.

    Args:
        policy: decides; nobody else tells it of slots.
        slots: experts that fit.
    """

    def __init__(self, policy: EvictionPolicy, slots: int) -> None:
        self.policy, self._slots = policy, slots
        self._keys: set[int] = set()

    def run(self, layer: int, keys: Sequence[int]) -> int:
        """A layer needs these keys (distinct); returns its misses. Of more than fit, the last ones stay."""
        policy, held = self.policy, self._keys
        policy.start_layer(layer, keys)
        missing = [key for key in keys if key not in held]
        fitting = keys[-self._slots :]
        protected = set(fitting)
        for key in fitting:
            if key in held:
                continue
            if len(held) == self._slots:
                victim = policy.victim(protected)
                assert victim is not None, "the protected keys fit"
                policy.remove(victim)
                held.remove(victim)
            policy.insert(key)
            held.add(key)
        policy.use(fitting)
        return len(missing)
