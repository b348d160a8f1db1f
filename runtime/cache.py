"""Cache policies: which expert gives up its slot. A policy owns no tensor and starts no copy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container


class CachePolicy(ABC):
    """The order in which resident experts are given up, over all layers at once.

    The caller says what happens (`insert`, `use`, `remove`); `victim` only decides.
    """

    name: str

    @abstractmethod
    def insert(self, key: int) -> None:
        """The expert got a slot."""

    @abstractmethod
    def use(self, key: int) -> None:
        """A layer computes with the expert."""

    @abstractmethod
    def remove(self, key: int) -> None:
        """The expert lost its slot."""

    @abstractmethod
    def clear(self) -> None:
        """No expert has a slot any more."""

    @abstractmethod
    def victim(self, protected: Container[int]) -> int | None:
        """The resident expert to give up next, none of the protected ones; None when all are protected."""


class LRUPolicy(CachePolicy):
    """Gives up the expert that was not used for the longest time."""

    name = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def insert(self, key: int) -> None:
        self._order[key] = None

    def use(self, key: int) -> None:
        self._order.move_to_end(key)

    def remove(self, key: int) -> None:
        del self._order[key]

    def clear(self) -> None:
        self._order.clear()

    def victim(self, protected: Container[int]) -> int | None:
        return next((key for key in self._order if key not in protected), None)
