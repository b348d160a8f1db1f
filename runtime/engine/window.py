"""What a verification to come will need: experts that were seen to be routed to while its tokens were drafted (row C8).

L MoE layers, E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Container


class Window:
    """Keys that are kept for their layer's turn: the nearer the layer, the surer (row C10, trap 3).

    Args:
        layers: L.
        experts: E.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._experts = experts
        self._by_layer: list[set[int]] = [set() for _ in range(layers)]
        self.keys: set[int] = set()
        """All of them; read only."""

    def add(self, key: int) -> None:
        """The expert will be needed."""
        self.keys.add(key)
        self._by_layer[key // self._experts].add(key)

    def pop(self, layer: int) -> set[int]:
        """The layer's turn has come: what was kept for it is as any other expert from now on."""
        keys, self._by_layer[layer] = self._by_layer[layer], set()
        self.keys -= keys
        return keys

    def clear(self) -> None:
        """Nothing is kept any more."""
        if self.keys:
            for keys in self._by_layer:
                keys.clear()
            self.keys.clear()

    def farthest(self, beyond: int, held: Container[int], but: Container[int]) -> int | None:
        """A held expert of the last layer beyond that one, none of `but`: the one that is needed last."""
        if not self.keys:
            return None
        for keys in reversed(self._by_layer[beyond + 1 :]):
            for key in keys:
                if key in held and key not in but:
                    return key
        return None
