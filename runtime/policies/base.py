"""What every kind of policy has in common: its configuration, how it is written, and one registry per kind.

All registrations are visible in the kinds' `__init__.py`.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

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


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Base of every policy's configuration; subclasses add fields with a docstring line each."""


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
