"""Names to predictor classes; all registrations are visible in `expertcast/predictors/__init__.py`."""

from __future__ import annotations

from expertcast.predictors.base import Predictor
from expertcast.predictors.errors import ExpertcastError

_CLASSES: dict[str, type[Predictor]] = {}


def register(cls: type[Predictor]) -> type[Predictor]:
    """Register a predictor class under its `name`.

    Raises:
        ExpertcastError: the name is taken by another class.
    """
    if _CLASSES.setdefault(cls.name, cls) is not cls:
        raise ExpertcastError(f"predictor name {cls.name!r} is taken by {_CLASSES[cls.name].__name__}: choose another")
    return cls


def predictor_class(name: str) -> type[Predictor]:
    """The class registered under `name`.

    Raises:
        ExpertcastError: unknown name; the message lists the known ones.
    """
    if name not in _CLASSES:
        raise ExpertcastError(f"unknown predictor {name!r}: choose from {', '.join(names())}")
    return _CLASSES[name]


def names() -> list[str]:
    """Registered names, in order of registration."""
    return list(_CLASSES)
