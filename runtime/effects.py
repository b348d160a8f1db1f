"""What options do to the output, or do not do at all: said when a model is offloaded, a line each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.policies import Policies


def remarks(config: OffloadConfig) -> list[str]:
    """What a user should know of options that were taken as they are: which change the output, which have no effect."""
    policies = config.resolved_policies()
    found = list(_lossy(config, policies))
    for condition, names in _idle(config, policies):
        given = list(dict.fromkeys(names))
        if given:
            found.append(f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect {condition}")
    return found


def _lossy(config: OffloadConfig, policies: Policies) -> Iterator[str]:
    """Mode 'exact' says that forecasts change nothing; policies may."""
    if config.mode == "exact" and policies.lossy:
        miss, routing = policies.miss, policies.routing
        found = {f"miss {miss.name!r}": miss.cls.lossy, f"routing {routing.name!r}": routing.cls.lossy}
        named = " and ".join(name for name, lossy in found.items() if lossy)
        where = f" of preset {config.policies!r}" if isinstance(config.policies, str) else ""
        yield f"{named}{where} may change the output, in mode 'exact' too: only lossless policies leave every bit"


def _idle(config: OffloadConfig, policies: Policies) -> Iterator[tuple[str, Iterable[str]]]:
    """When, and which options that are not at their defaults have no effect then."""
    fields = [field.name for field in dataclasses.fields(config) if getattr(config, field.name) != field.default]

    def changed(*names: str) -> list[str]:
        return [name for name in fields if name in names]

    if config.mode == "exact":
        yield "in mode 'exact'", changed("layers", "min_recall", "true_weights", "speculate_prefill")
    elif config.mode == "speculate" or config.layers is not None:
        yield "unless mode 'hybrid' chooses its layers by it", changed("min_recall")
    if config.resolved_predictor() is None:
        of_policies = {"prefetch": policies.prefetch, "pre_eviction": policies.pre_eviction}
        usual = (Policies.prefetch, "none")
        named = [f"{kind} {str(own)!r}" for kind, own in of_policies.items() if str(own) not in usual]
        named = named if config.policies is not None else []  # without, it is `overfetch` that says it
        overfetch = changed("overfetch") if config.cache else []  # else the default number of slots goes by it
        yield "without a predictor", [*changed("ahead", "reach", "forecasts"), *overfetch, *named]
    elif not config.cache:
        yield "without a cache", changed("forecasts")
    if config.next_token is None:
        reads = [f"looking ahead by eviction {str(policies.eviction)!r}"] if policies.eviction.cls.reads_tokens else []
        yield "without next_token", [*changed("likely"), *reads]
