"""What one run of a layer needs.

T tokens, E routed experts per layer, K experts per token. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from expertcast.runtime.links.exchange import Sent


@dataclass(slots=True)
class Plan:
    """What one run of a layer needs."""

    layer: int
    ids_TK: Tensor
    keys: list[int] | None
    """Key of each of the T x K ids, when they are few."""
    pairs: Mapping[int, int] | None
    """By key, how many of the T x K ids name it, when they are many."""
    chunks: list[list[int]]
    """Distinct keys, chunk by chunk; one chunk when all fit the slots."""
    precision: dict[int, str] | None
    """Of the keys that need not come in full."""
    ids: list[int] | None
    """The T x K ids, when the host has them."""
    slots: list[int] | None = None
    """Slot of each of the T x K ids, when they are few and one chunk."""
    sent: Sent | None = None
    """On its way to the device: slots of the T x K ids, or of all experts when the ids are many; for one chunk."""
