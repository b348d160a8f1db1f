"""What every kind of policy has in common: its configuration, how it is written, and one registry per kind.

All registrations are visible in the kinds' `__init__.py`.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Generic, TypeVar

from expertcast.predictors.base import Registry
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.options import check_finite, options_text, parse_options


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
    sharing: int | None = None
    """Layers whose experts share them; None: all."""


def number(default: float | None, interval: str) -> Any:
    """A field whose value lies in an interval such as `[0, 1)`, or is None."""
    return field(default=default, metadata={"interval": interval})


def one_of(*texts: str) -> Any:
    """A field whose value is one of these texts; the first is the default."""
    return field(default=texts[0], metadata={"texts": texts})


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Base of every policy's configuration; subclasses add fields with a docstring line each.

    Raises:
        ExpertcastError: a value that its field does not allow (:func:`number`, :func:`one_of`).
    """

    def __post_init__(self) -> None:
        for each in fields(self):
            value, texts = getattr(self, each.name), each.metadata.get("texts")
            if texts and value not in texts:
                raise ExpertcastError(f"unknown {each.name}={value!r}: choose from {', '.join(texts)}")
            interval = each.metadata.get("interval")
            if interval and value is not None and not _is_within(value, interval):
                raise ExpertcastError(f"{each.name}={value}: give a number in {interval}")


def _is_within(value: float, interval: str) -> bool:
    least, most = map(float, interval[1:-1].split(","))
    return (least <= value if interval[0] == "[" else least < value) and (
        value <= most if interval[-1] == "]" else value < most
    )


class Policy(ABC):
    """Base of every kind of policy: a name, and what it is made from."""

    name: ClassVar[str]
    config_class: ClassVar[type[PolicyConfig]] = PolicyConfig
    config: PolicyConfig
    """Of `config_class`: a policy that has options declares it so."""

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        self.config, self.shape = config, shape


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
        """The policy's name, without its options."""
        return self.cls.name

    def __str__(self) -> str:
        """The shortest text that names it: options at their default are left out."""
        options = options_text(self.config)
        return f"{self.name}:{options}" if options else self.name

    def make(self, shape: CacheShape) -> P:
        """The policy itself, with nothing learnt."""
        return self.cls(self.config, shape)


class PolicyRegistry(Registry[P]):
    """The policies of one kind, in the order of tables."""

    def __init__(self, kind: str, *classes: type[P]) -> None:
        super().__init__(kind)
        for cls in classes:
            self.register(cls)

    def choose(self, given: str | Choice[P] | PolicyConfig) -> Choice[P]:
        """The policy that a text, or a configuration of one, asks for.

        Raises:
            ExpertcastError: unknown name or option, or a value that does not fit.
        """
        if isinstance(given, Choice):
            return given
        if isinstance(given, PolicyConfig):
            for cls in self.classes():
                if cls.config_class is type(given):
                    return Choice(cls, given)
            raise ExpertcastError(f"{type(given).__name__} configures no {self.kind}: {self.allowed()}")
        name, _, options = given.partition(":")
        cls = self.get(name)
        return Choice(cls, parse_options(options, cls.config_class, f"{self.kind} {name!r}"))
