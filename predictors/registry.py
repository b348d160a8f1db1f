"""Names to classes: of predictors here, of policies in :mod:`expertcast.runtime.policies`.

All registrations are visible in the `__init__.py` of their folder.
"""

from __future__ import annotations

import reprlib
from typing import ClassVar, Generic, Protocol, TypeVar

from expertcast.predictors.base import Predictor
from expertcast.predictors.errors import ExpertcastError


class Registered(Protocol):
    """What has a name, and a dataclass that configures it."""

    name: ClassVar[str]


R = TypeVar("R", bound=Registered)


class Registry(Generic[R]):
    """Classes of one kind by name, in order of registration."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[R]] = {}

    def register(self, cls: type[R]) -> type[R]:
        """Take a class under its `name`; returns it.

        Raises:
            ExpertcastError: the name is taken by another class.
        """
        if self._classes.setdefault(cls.name, cls) is not cls:
            raise ExpertcastError(
                f"{self.kind} {cls.name!r} is taken by {self._classes[cls.name].__name__}: choose another name"
            )
        return cls

    def get(self, name: str) -> type[R]:
        """The class of a name.

        Raises:
            ExpertcastError: unknown name; the message lists the known ones.
        """
        if name not in self._classes:
            raise ExpertcastError(f"unknown {self.kind} {reprlib.repr(name)}: {self.allowed()}")
        return self._classes[name]

    def classes(self) -> list[type[R]]:
        """All classes, in order of registration."""
        return list(self._classes.values())

    def names(self) -> list[str]:
        """All names, in order of registration."""
        return list(self._classes)

    def allowed(self) -> str:
        """The names, as the remedy in a message."""
        return f"choose from {', '.join(self._classes)}"


PREDICTORS: Registry[Predictor] = Registry("predictor")
register = PREDICTORS.register
predictor_class = PREDICTORS.get


def names(looks: str = "layers") -> list[str]:
    """Registered names of the predictors that look ahead by `layers` or by `tokens`, in order of registration."""
    return [cls.name for cls in PREDICTORS.classes() if cls.looks == looks]
