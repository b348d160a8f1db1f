"""What a run asks of its residency, the experts that layers need and forecasts want; and replays of it in virtual time.

L MoE layers, E routed experts per layer, K experts per token. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from expertcast.predictors.view import ModelShape
from expertcast.runtime.recording.layer_times import LayerTimes
from expertcast.runtime.recording.observer import Observer
from expertcast.runtime.simulation.machine import Case, Simulation, no_times
from expertcast.runtime.simulation.simulator import simulate
from expertcast.runtime.simulation.trace import Asked, Forward, Trace

_ASKED = "asked"


class Watcher(Observer):
    """Collects the forwards of one decoding, the first of which is the prefill (numbers only: no device is read)."""

    def __init__(self) -> None:
        self._needed: list[dict[int, list[int]]] = []
        """Per forward, keys by layer."""
        self._asked: list[dict[int, list[int]]] = []
        """Per forward, keys by target layer; what is asked for on behalf of the next token is left out."""

    def needed(self, layer: int, keys: Sequence[int]) -> None:
        if layer == 0:
            self._needed.append({})
            self._asked.append({})
        self._needed[-1][layer] = list(keys)

    def asked(self, layer: int, keys: Sequence[int]) -> None:
        if layer > max(self._needed[-1]):
            self._asked[-1][layer] = list(keys)

    def trace(self, shape: ModelShape) -> Trace:
        """What each layer needed."""
        forwards = [
            Forward(fresh=index == 0, rows=slice(max(0, index - 1), index), keys=[keys[n] for n in sorted(keys)])
            for index, keys in enumerate(self._needed)
        ]
        return Trace(shape=shape, forwards=forwards)

    def forecasts(self, ahead: int) -> Asked:
        """What forecasts of so many layers ahead asked for in the decode steps."""
        return Asked(ahead=ahead, steps=self._asked[1:])


def measured_recall(trace: Trace, asked: Asked) -> dict[int, float]:
    """Recall@k by target layer: share of the experts that a layer needed among the k that were forecast for it."""
    shares: dict[int, list[float]] = {}
    for forward, forecasts in zip(trace.decode, asked.steps, strict=True):
        for target, keys in forecasts.items():
            needed = set(forward.keys[target])
            shares.setdefault(target, []).append(len(needed.intersection(keys[: trace.shape.top_k])) / len(needed))
    return {target: sum(values) / len(values) for target, values in sorted(shares.items())}


def with_recall(trace: Trace, asked: Asked, wanted: Mapping[int, float], seed: int = 0) -> Asked:
    """The same forecasts, changed at random so that they are right as often as `wanted` says, by target layer.

    A few steps say little about recall, but much about which experts are forecast wrongly: those that the layer needs
    at other times. A right expert is exchanged for one of these, or a wrong one for a needed one that was left out.

    Args:
        trace: what the layers needed.
        asked: what was forecast.
        wanted: recall@k by target layer.
        seed: of the random choices.
    """
    choose, measured, decode = random.Random(seed), measured_recall(trace, asked), trace.decode
    changed: list[dict[int, list[int]]] = []
    for forward, forecasts in zip(decode, asked.steps, strict=True):
        step: dict[int, list[int]] = {}
        for target, keys in forecasts.items():
            have, want, needed = measured[target], wanted[target], forward.keys[target]
            popular = sorted({key for other in decode for key in other.keys[target]}.difference(needed))
            step[target] = list(keys)
            for place, key in enumerate(keys[: trace.shape.top_k]):
                right = key in needed
                spoil = right and have > want and choose.random() < 1 - want / have
                mend = not right and have < want and choose.random() < (want - have) / (1 - have)
                others = [other for other in (popular if spoil else needed) if other not in step[target]]
                if (spoil or mend) and others:
                    step[target][place] = choose.choice(others)
        changed.append(step)
    return replace(asked, steps=changed)


def executed(trace: Trace, asked: Asked, layers: Iterable[int]) -> Trace:
    """A decoding (its first forward is the prefill) that executes forecasts in place of its routing at these layers."""
    chosen, top_k = frozenset(layers), trace.shape.top_k
    forwards = [
        replace(
            forward,
            keys=[
                list(step[layer][:top_k]) if layer in chosen and layer in step else keys
                for layer, keys in enumerate(forward.keys)
            ],
        )
        for forward, step in zip(trace.forwards, [{}, *asked.steps], strict=True)
    ]
    return replace(trace, forwards=forwards)


def replay(trace: Trace, case: Case, asked: Asked | None = None) -> Simulation:
    """Run a recorded decoding in virtual time; its prefill leaves the cache as the decode steps find it. The case has
    the cost of a forecast at layers that make one; without what forecasts asked for, it loads on demand.
    """
    machine = replace(case.machine, prefill=no_times(trace.shape.layers))
    hints = {} if asked is None else {_ASKED: asked}
    case = replace(case, machine=machine, predictor=next(iter(hints), None))
    return simulate(replace(trace, hints=hints), case, waits=True)


def calibrated(tpot_s: float, trace: Trace, case: Case, asked: Asked | None = None) -> LayerTimes:
    """The case's layer times, with what a run took beyond a replay of it as `late_s`: `tpot_s` is what it took per
    token, `trace`, `case` and `asked` are what :func:`replay` takes.
    """
    return replace(case.machine.times, late_s=tpot_s - replay(trace, case, asked).tpot_s)
