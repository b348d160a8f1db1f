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
        raise ExpertcastError(f"unknown predictor {name!r}: choose from {', '.join(_CLASSES)}")
    return _CLASSES[name]


def names(looks: str = "layers") -> list[str]:
    """Registered names of the predictors that look ahead by `layers` or by `tokens`, in order of registration."""
    return [name for name, cls in _CLASSES.items() if cls.looks == looks]
