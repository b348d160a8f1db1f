"""Names to policy classes, one registry per kind; all registrations are visible in the kinds' `__init__.py`."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.fields import check_finite, parse_settings, written


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What a policy rules over."""

    layers: int
    """L"""
    experts: int
    """E, per layer."""
    top_k: int
    """K, per token."""
    slots: int
    """Slots that the policy's experts share: all of them, or one layer's share."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Base of every policy's configuration; subclasses add fields with a docstring line each."""


class Policy(Protocol):
    """What every kind of policy has: a name, a configuration, and both given to it when it is made."""

    name: ClassVar[str]
    config_class: ClassVar[type[PolicyConfig]]

    def __init__(self, config: Any, shape: CacheShape) -> None: ...


P = TypeVar("P", bound=Policy)


@dataclass(frozen=True)
class Choice(Generic[P]):
    """A policy with its options, as written `name` or `name:option=value,option=value`."""

    cls: type[P]
    config: PolicyConfig

    def __post_init__(self) -> None:
        check_finite(self.config)

    @property
    def name(self) -> str:
        return self.cls.name

    def __str__(self) -> str:
        """The shortest text that names it: options at their default are left out."""
        default = self.cls.config_class()
        given = [
            f"{field.name}={written(getattr(self.config, field.name))}"
            for field in dataclasses.fields(self.config)
            if getattr(self.config, field.name) != getattr(default, field.name)
        ]
        return self.name + (":" + ",".join(given) if given else "")

    def make(self, shape: CacheShape) -> P:
        return self.cls(self.config, shape)


class Registry(Generic[P]):
    """The policies of one kind, in order of registration."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[P]] = {}

    def register(self, cls: type[P]) -> type[P]:
        """
        Raises:
            ExpertcastError: the name is taken by another class.
        """
        if self._classes.setdefault(cls.name, cls) is not cls:
            raise ExpertcastError(
                f"{self.kind} policy {cls.name!r} is taken by {self._classes[cls.name].__name__}: choose another name"
            )
        return cls

    def names(self) -> list[str]:
        return list(self._classes)

    def choose(self, given: str | Choice[P] | PolicyConfig) -> Choice[P]:
        """The policy that a text, or a configuration of one, asks for.

        Raises:
            ExpertcastError: unknown name or option, or a value that does not fit.
        """
        if isinstance(given, Choice):
            return given
        if isinstance(given, PolicyConfig):
            for cls in self._classes.values():
                if cls.config_class is type(given):
                    return Choice(cls, given)
            raise ExpertcastError(f"{type(given).__name__} configures no {self.kind} policy: {self._allowed()}")
        name, _, options = given.partition(":")
        if name not in self._classes:
            raise ExpertcastError(f"unknown {self.kind} policy {name!r}: {self._allowed()}")
        cls = self._classes[name]
        words = filter(None, re.split(r",(?=\w+=)", options))
        return Choice(cls, parse_settings(words, cls.config_class, f"{self.kind} policy {name!r}"))

    def _allowed(self) -> str:
        return f"choose from {', '.join(self._classes)}"
