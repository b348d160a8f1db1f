"""What a run asks of its residency: the experts that each layer needs, and the ones that forecasts want.

L MoE layers, E routed experts per layer, K experts per token. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from expertcast.runtime.advising.event_model import Forecasts, Trace
from expertcast.runtime.engine.residency import Residency


@dataclass(slots=True)
class Forward:
    """One forward, seen from the residency."""

    needed: dict[int, list[int]] = field(default_factory=dict)
    """Keys by layer."""
    forecast: dict[int, list[int]] = field(default_factory=dict)
    """Keys by target layer, most needed first; what is asked for on behalf of the next token is left out."""


@contextmanager
def observe(residency: Residency, experts: int) -> Iterator[list[Forward]]:
    """Collect the forwards that run meanwhile, from the calls that the engine makes (numbers only: no device is read).

    Args:
        experts: E.
    """
    forwards: list[Forward] = []
    settle, prefetch = residency.settle, residency.prefetch

    def on_settle(layer: int, needed: Iterable[int]) -> None:
        if layer == 0:
            forwards.append(Forward())
        forwards[-1].needed[layer] = list(needed)
        settle(layer, forwards[-1].needed[layer])

    def on_prefetch(keys: Sequence[int]) -> None:
        if keys and keys[0] // experts > max(forwards[-1].needed):
            forwards[-1].forecast[keys[0] // experts] = list(keys)
        prefetch(keys)

    residency.__dict__.update(settle=on_settle, prefetch=on_prefetch)  # shadow the methods of this one object
    try:
        yield forwards
    finally:
        del residency.__dict__["settle"], residency.__dict__["prefetch"]


def trace_of(forwards: Sequence[Forward], experts: int) -> Trace:
    """The routing of a decoding: its first forward is the prefill."""
    routings = [[forward.needed[layer] for layer in sorted(forward.needed)] for forward in forwards]
    return Trace(experts=experts, prefill=routings[0], steps=routings[1:])


def measured_recall(trace: Trace, steps: Sequence[Forecasts], top_k: int) -> dict[int, float]:
    """Recall@k by target layer: share of the experts that a layer needed among the k that were forecast for it."""
    shares: dict[int, list[float]] = {}
    for routing, forecasts in zip(trace.steps, steps, strict=True):
        for target, keys in forecasts.items():
            needed = set(routing[target])
            shares.setdefault(target, []).append(len(needed.intersection(keys[:top_k])) / len(needed))
    return {target: sum(values) / len(values) for target, values in sorted(shares.items())}


def with_recall(
    trace: Trace, steps: Sequence[Forecasts], wanted: Mapping[int, float], top_k: int, seed: int = 0
) -> list[Forecasts]:
    """The same forecasts, changed at random so that they are right as often as `wanted` says, by target layer.

    A few steps say little about recall, but much about which experts are forecast wrongly: those that the layer needs
    at other times. A right expert is exchanged for one of these, or a wrong one for a needed one that was left out.
    """
    choose, measured = random.Random(seed), measured_recall(trace, steps, top_k)
    changed: list[Forecasts] = []
    for routing, forecasts in zip(trace.steps, steps, strict=True):
        step: dict[int, list[int]] = {}
        for target, keys in forecasts.items():
            have, want = measured[target], wanted[target]
            popular = sorted({key for other in trace.steps for key in other[target]}.difference(routing[target]))
            step[target] = list(keys)
            for place, key in enumerate(keys[:top_k]):
                right = key in routing[target]
                spoil = right and have > want and choose.random() < 1 - want / have
                mend = not right and have < want and choose.random() < (want - have) / (1 - have)
                others = [other for other in (popular if spoil else routing[target]) if other not in step[target]]
                if (spoil or mend) and others:
                    step[target][place] = choose.choice(others)
        changed.append(step)
    return changed


def executed(trace: Trace, steps: Sequence[Forecasts], layers: Iterable[int], top_k: int) -> Trace:
    """The routing with forecasts in the place of what was needed, at these layers."""
    chosen = frozenset(layers)
    routings = [
        [
            forecasts[layer][:top_k] if layer in chosen and layer in forecasts else keys
            for layer, keys in enumerate(routing)
        ]
        for routing, forecasts in zip(trace.steps, steps, strict=True)
    ]
    return Trace(experts=trace.experts, prefill=trace.prefill, steps=routings)
