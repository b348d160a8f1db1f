"""Names to policy classes, one registry per kind; all registrations are visible in the kinds' `__init__.py`."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from expertcast.predictors.errors import ExpertcastError


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

    @property
    def name(self) -> str:
        return self.cls.name

    def __str__(self) -> str:
        """The shortest text that names it: options at their default are left out."""
        default = self.cls.config_class()
        given = [
            f"{field.name}={_text(getattr(self.config, field.name))}"
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
        return Choice(cls, cls.config_class(**_parse(options, cls.config_class, f"{self.kind} policy {name!r}")))

    def _allowed(self) -> str:
        return f"choose from {', '.join(self._classes)}"


def _parse(options: str, config_class: type[PolicyConfig], what: str) -> dict[str, Any]:
    hints = typing.get_type_hints(config_class)
    values: dict[str, Any] = {}
    for part in filter(None, re.split(r",(?=\w+=)", options)):
        name, equals, text = part.partition("=")
        if not equals or name not in hints:
            known = f"its options are {', '.join(hints)}, written name=value" if hints else "it has none"
            raise ExpertcastError(f"{what} has no option {part!r}: {known}")
        try:
            values[name] = _value(text, hints[name])
        except ValueError:
            raise ExpertcastError(f"{what}: {name}={text!r} is no {_type_name(hints[name])}") from None
    return values


def _value(text: str, hint: Any) -> Any:
    """A text as the type of a configuration's field."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if text == "none":
            return None
        return _value(text, next(arg for arg in args if arg is not type(None)))
    if origin is tuple:
        return tuple(_value(part, args[0]) for part in text.split("/") if part)
    if hint is bool:
        if text not in ("true", "false"):
            raise ValueError(text)
        return text == "true"
    return hint(text)


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return "/".join(map(_text, value)) if isinstance(value, tuple) else str(value)


def _type_name(hint: Any) -> str:
    return "list such as a/b" if typing.get_origin(hint) is tuple else getattr(hint, "__name__", str(hint))
