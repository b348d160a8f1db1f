"""Base classes of all policies: configuration, text form and registry."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from expertcast.predictors.base import Registry
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.options import Validated, options_text, parse_options
from expertcast.runtime.storage.layout import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Size of the expert cache that a policy manages."""

    layers: int
    """Number of MoE layers, L."""
    experts: int
    """Routed experts per layer, E."""
    top_k: int
    """Experts per token, K."""
    slots: int
    """Slots that the policy manages: all slots, or the share of one layer."""
    sharing: int | None = None
    """Number of layers that use these slots; None: all layers."""
    regions: tuple[Region, ...] = ()
    """Parts of the slots that some of the layers share; empty: all layers share all."""


def check_slots(slots: int, top_k: int, name: str = "") -> None:
    """Check that the slots hold the experts of one token; `name`: of the model, for the message.

    Raises:
        ExpertcastError: they do not.
    """
    if slots < top_k:
        of_model = f" of {name!r}" if name else ""
        raise ExpertcastError(
            f"slots={slots} is fewer than the {top_k} experts one token{of_model} needs: give slots={top_k} or more"
        )


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(Validated):
    """Base class of policy configurations.

    Subclasses add fields with limits, such as `Annotated[float, Field(ge=0, lt=1)]`. The docstring of a field is its
    help text.

    Raises:
        ExpertcastError: a value is not of its field's type or outside its limits.
    """


class Policy(ABC):
    """Base class of all policies.

    Args:
        config: options of the policy, an instance of `config_class`.
        shape: size of the cache.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[PolicyConfig]] = PolicyConfig
    config: PolicyConfig
    """Options; a subclass with options narrows the type to its `config_class`."""

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        self.config, self.shape = config, shape


P = TypeVar("P", bound=Policy)


@dataclass(frozen=True)
class Choice(Generic[P]):
    """A policy class with its options; its text form is `name` or `name:option=value,option=value`."""

    cls: type[P]
    config: PolicyConfig

    @property
    def name(self) -> str:
        """Name of the policy, without options."""
        return self.cls.name

    def __str__(self) -> str:
        """Return the text form, without options at their default."""
        options = options_text(self.config)
        return f"{self.name}:{options}" if options else self.name

    def make(self, shape: CacheShape) -> P:
        """Return a new policy."""
        return self.cls(self.config, shape)


class PolicyRegistry(Registry[P]):
    """Registry of the policies of one kind, in the order in which tables list them.

    Example:
        >>> from expertcast.runtime.policies import EVICTION, CacheShape
        >>> choice = EVICTION.choose("importance:alpha=0.25")
        >>> choice.name, choice.config.alpha, str(choice)
        ('importance', 0.25, 'importance:alpha=0.25')
        >>> policy = choice.make(CacheShape(layers=12, experts=64, top_k=4, slots=96))
    """

    def __init__(self, kind: str, *classes: type[P]) -> None:
        super().__init__(kind)
        self.base: type[Policy] = next(cls for cls in classes[0].__mro__ if Policy in cls.__bases__)
        """Base class of the policies of this kind."""
        for cls in classes:
            self.register(cls)

    def allowed(self) -> str:
        """Return the end of an error message that lists the names."""
        return f"{super().allowed()}; register your own first, or give MODULE:CLASS on the command line"

    def choose(self, policy: str | Choice[P] | PolicyConfig) -> Choice[P]:
        """Return the policy that a text, a configuration or a choice names.

        Args:
            policy: `name`, `name:option=value,...`, the configuration of a policy, or a choice (returned as it is).

        Raises:
            ExpertcastError: the name or an option is unknown, or a value is not allowed.
        """
        if isinstance(policy, Choice):
            return policy
        if isinstance(policy, PolicyConfig):
            for cls in self.classes():
                if cls.config_class is type(policy):
                    return Choice(cls, policy)
            raise ExpertcastError(f"{type(policy).__name__} does not configure a {self.kind}: {self.allowed()}")
        name, _, options = policy.partition(":")
        cls = self.get(name)
        return Choice(cls, parse_options(options, cls.config_class, f"{self.kind} {name!r}"))
