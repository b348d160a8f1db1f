"""Advice for a GPU that is not there: the CUDA path in virtual time, from a model's configuration alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from expertcast.checkpoints.checkpoint import PredictorCheckpoint
from expertcast.data.models import load_config, meta_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.source import ModelSource
from expertcast.predictors import ExpertcastError, MoEView
from expertcast.predictors.messages import Json, aligned
from expertcast.runtime.advising.advise import WORTH, milliseconds
from expertcast.runtime.benchmarking.routing import RoutingOptions
from expertcast.runtime.benchmarking.shapes import SHAPES, Shape, is_shape
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.offloading import recall_per_layer, slot_count
from expertcast.runtime.storage.layout import BlockLayout
from expertcast.runtime.timed.compare import as_graph, compare
from expertcast.runtime.timed.costs import step_costs
from expertcast.runtime.timed.run import TimedCase, TimedRun, decode_timed

# What :func:`expertcast.runtime.advising.absent.advise_absent` gives back: plain numbers, and a text.

CAVEAT = "no GPU was asked: these are figures of a model of one (docs/timed-device.md), which a GPU may refute"
_TRAIN = (
    "prefetching needs a predictor that is so often right: train one (expertcast train), and give its folder as "
    "--predictor to be told with its own recall"
)
_GRAPH = (
    "for the graph, decode with expertcast.runtime.GraphDecoder(offloaded, max_length); its figures leave the host out"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to decode, and what it takes per token."""

    link: str
    """`cuda`, or `kernel`: a step is one CUDA graph."""
    prefetch: bool
    tpot_s: float
    """Median."""
    bound_s: float
    """No schedule is faster: the slowest of link, device and host."""
    limit: str
    """Which of them that is."""
    misses: float
    """Experts that were not there when their layer asked."""
    copies: float
    """Misses, and what forecasts asked for."""

    @property
    def name(self) -> str:
        """For a sentence."""
        what = "prefetch" if self.prefetch else "load on demand"
        return f"{what}, a step as one CUDA graph" if self.link == "kernel" else what

    @property
    def time(self) -> str:
        """For a sentence."""
        over = self.tpot_s / self.bound_s
        return f"{milliseconds(self.tpot_s)} per token, {over:.2f} times the bound of {milliseconds(self.bound_s)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentAdvice:
    """What to do on a GPU that is not there, what its model expects, and why."""

    chosen: Way
    ways: list[Way]
    """Over each link, on demand first."""
    levers: dict[str, float]
    """Seconds per token of what is advised with one thing different."""
    reasons: list[str]
    bandwidth: float
    """Bytes per second."""
    host: str
    accuracy: float
    """Recall@k of the forecasts."""
    predictor: str | None
    """The checkpoint of which that is the recall."""
    cache: bool
    slots: int
    experts: int
    """Of all layers together."""
    block_bytes: int
    """Of one expert, in bf16."""

    def config(self) -> OffloadConfig:
        """What is advised, as a configuration to run with; without a checkpoint it names no predictor."""
        return OffloadConfig(
            link=self.chosen.link,
            cache=self.cache,
            slots=self.slots if self.cache else None,
            predictor=self.predictor if self.chosen.prefetch else None,
        )

    def as_dict(self) -> Json:
        """Plain values, for JSON."""
        return {**asdict(self), "caveat": CAVEAT}

    def text(self) -> str:
        """For the terminal."""
        room = f"{self.slots} of {self.experts} experts in {self.slots * self.block_bytes / 1e9:.3g} GB"
        copy = milliseconds(self.block_bytes / self.bandwidth)
        steps = [_TRAIN] if self.chosen.prefetch and self.predictor is None else []
        steps += [_GRAPH] if self.chosen.link == "kernel" else []
        return "\n".join(
            [
                f"advice: {self.chosen.name}; expect {milliseconds(self.chosen.tpot_s)} per token",
                "",
                *(f"- {reason}" for reason in [*self.reasons, *steps]),
                "",
                _table(self.ways),
                "",
                f"link {self.bandwidth / 1e9:.3g} GB/s, {copy} per expert; {room if self.cache else 'no cache'}; "
                f"host {self.host}; {self.accuracy:.0%} of experts forecast right",
                CAVEAT,
            ]
        )


def _table(ways: Sequence[Way]) -> str:
    rows = [["experts", "link", "as a graph", "ms/token", "over the bound", "limit", "misses", "copies"]]
    for way in ways:
        rows.append(
            [
                "prefetched" if way.prefetch else "on demand",
                way.link,
                "yes" if way.link == "kernel" else "no",
                f"{1e3 * way.tpot_s:.2f}",
                f"{way.tpot_s / way.bound_s:.2f}",
                way.limit,
                f"{way.misses:.4g}",
                f"{way.copies:.4g}",
            ]
        )
    return aligned(rows, left=3)


_QUARTER = 0.25


@dataclass(frozen=True, slots=True)
class AbsentModel:
    """A model of which the configuration is known. Experts are in bf16."""

    name: str
    shape: Shape
    view: MoEView
    """Without weights."""

    @classmethod
    def of(cls, name: str, layers: int | None = None, options: Mapping[str, object] | None = None) -> AbsentModel:
        """A name in `SHAPES`, a folder or a hub id, cut to its first `layers`.

        Args:
            name: which.
            layers: how many MoE layers; None for all.
            options: of `from_pretrained`, for a folder or a hub id.

        Raises:
            ExpertcastError: no config there, a family whose launches were not counted, layers without experts, or not
                so many layers; or a shape's name that is a model's folder here, too.
        """
        shape = SHAPES[name] if is_shape(name) else Shape.of(load_config(ModelSource.of(name, options)))
        step_costs(shape)  # which refuses a family
        most = shape.layers
        if layers is not None and not 1 <= layers <= most:
            raise ExpertcastError(f"--layers {layers}: {name} has 1 to {most} MoE layers")
        view = find_moe_layers(meta_model(shape.config(layers), torch.bfloat16))
        if len(view) != (layers or most):
            raise ExpertcastError(f"{name!r} has layers without experts, whose launches nobody counted: not supported")
        return cls(name, shape, view)

    @property
    def experts(self) -> int:
        """Of all layers together."""
        return self.view.shape.layers * self.view.shape.experts

    @property
    def block_bytes(self) -> int:
        """Of one expert."""
        return BlockLayout.of(self.view).block_bytes

    def sized(self, config: OffloadConfig, capacity: float | None = None) -> OffloadConfig:
        """A configuration in slots, of those that it says or of a share of all experts; 0: no cache.

        Raises:
            ExpertcastError: no share, or too few slots for a token.
        """
        if capacity is not None:
            if not 0 <= capacity <= 1:
                raise ExpertcastError(f"--capacity {capacity}: give the share of experts that fits, 0 (no cache) to 1")
            slots = round(capacity * self.experts) if capacity else None
            config = replace(config, cache=bool(capacity), slots=slots, memory=None)
        return replace(config, slots=slot_count(config, self.view), memory=None)


def known_recall(folder: str, model: AbsentModel) -> float:
    """Mean recall@k of a checkpoint on validation, one layer ahead; its weights are not read.

    Args:
        folder: of the checkpoint.
        model: that it must be of, as far as layers, experts and sizes say.

    Raises:
        ExpertcastError: no checkpoint there, one of another model or distance, or one that was not validated.
    """
    checkpoint = PredictorCheckpoint.open(folder)
    found, wanted = checkpoint.config["shape"], model.view.shape.as_dict()
    if found != wanted:
        raise ExpertcastError(f"{folder} was trained for a model of {found}, {model.name} has {wanted}")
    recall, ahead = recall_per_layer(checkpoint), checkpoint.metrics.get("ahead", 1)
    if not recall or ahead != 1:
        raise ExpertcastError(f"{folder} does not say its recall one layer ahead: give --accuracy instead")
    return statistics.fmean(recall.values())


def advise_absent(
    model: AbsentModel,
    config: OffloadConfig,
    *,
    bandwidth: float,
    routing: RoutingOptions | None = None,
    host: str = "fast",
    predictor: str | None = None,
) -> AbsentAdvice:
    """Decode a few tokens in virtual time on demand and with forecasts, over the copy engine and as one CUDA graph.

    Args:
        model: whose experts are offloaded.
        config: cache, and with one slots or memory, count; the rest is what the advice is about.
        bandwidth: of the link, bytes per second.
        routing: what experts the tokens take, and how often forecasts are right.
        host: one of `timed.costs.HOSTS`.
        predictor: the checkpoint that is so often right, where it is one's.

    Raises:
        ExpertcastError: too few slots for a token, or an unknown host.
    """
    routing, slots = routing or RoutingOptions(), slot_count(config, model.view)
    case = _sized(
        TimedCase(
            shape=model.shape,
            layers=len(model.view),
            bandwidth=bandwidth,
            accuracy=routing.accuracy,
            step=step_costs(model.shape, host=host),
            routing=routing,
        ),
        slots / model.experts if config.cache else 0.0,
    )
    ways = [*_compared(case), *_compared(as_graph(case))]
    chosen = _better(_best(case, *ways[:2]), _best(case, *ways[2:]))
    levers = {name: decode_timed(changed).tpot_s for name, changed in _changed(case, chosen, host).items()}
    return AbsentAdvice(
        chosen=chosen,
        ways=ways,
        levers=levers,
        reasons=_reasons(case, ways, chosen, levers),
        bandwidth=bandwidth,
        host=host,
        accuracy=routing.accuracy,
        predictor=predictor,
        cache=config.cache,
        slots=slots,
        experts=model.experts,
        block_bytes=model.block_bytes,
    )


def _sized(case: TimedCase, capacity: float) -> TimedCase:
    """The same with room for a share of the experts, and as many tokens before as fill it."""
    if not capacity:
        return replace(case, capacity=0.0, prompt=8, warm_up=1, steps=2)
    return replace(case, capacity=min(1.0, capacity), prompt=384 if capacity >= 1 else 128, warm_up=4, steps=3)


def _compared(case: TimedCase) -> tuple[Way, Way]:
    """On demand, and with forecasts."""
    found = compare(case)

    def way(run: TimedRun) -> Way:
        return Way(
            link="kernel" if case.kernel_link else "cuda",
            prefetch=run is found.run,
            tpot_s=run.tpot_s,
            bound_s=found.bound_s,
            limit=found.limit,
            misses=run.misses,
            copies=run.copies,
        )

    return way(found.on_demand), way(found.run)


def _better(simple: Way, other: Way) -> Way:
    return other if other.tpot_s < (1 - WORTH) * simple.tpot_s else simple


def _best(case: TimedCase, on_demand: Way, prefetched: Way) -> Way:
    """Over one link. Where all experts fit, those that are yet to be copied in these few tokens say nothing."""
    return on_demand if case.capacity >= 1 else _better(on_demand, prefetched)


def _changed(case: TimedCase, chosen: Way, host: str) -> dict[str, TimedCase]:
    """What is advised, with one thing different; nothing where all experts fit."""
    if case.capacity >= 1:
        return {}
    own = replace(case, accuracy=case.accuracy if chosen.prefetch else None)
    more = (
        ("twice the slots", 2 * case.capacity) if case.capacity else ("a cache of a quarter of the experts", _QUARTER)
    )
    changed = {more[0]: _sized(own, more[1]), "a link of twice the speed": replace(own, bandwidth=2 * case.bandwidth)}
    if chosen.link == "kernel":
        return {name: as_graph(each) for name, each in changed.items()}
    step = step_costs(case.shape, host=host, captured=("forecast", "attention"))
    return {**changed, "attention as CUDA graphs (torch.compile)": replace(own, step=step)}


def _reasons(case: TimedCase, ways: Sequence[Way], chosen: Way, levers: Mapping[str, float]) -> list[str]:
    on_demand, prefetched, *graphs = ways
    reasons = [f"on demand takes {on_demand.time}: the {on_demand.limit} is what limits"]
    if case.capacity >= 1:
        reasons.append("all experts fit the slots: each is copied once, then there is nothing to prefetch")
    else:
        change = prefetched.tpot_s / on_demand.tpot_s - 1
        reasons.append(f"prefetching takes {prefetched.time}: {change:+.0%}")
    graph = _best(case, *graphs)
    change = graph.tpot_s / _best(case, on_demand, prefetched).tpot_s - 1
    what = "prefetching" if graph.prefetch else "on demand"
    reasons.append(f"a step as one CUDA graph over the kernel link, {what}, takes {graph.time}: {change:+.0%}")
    lever = min(levers, key=lambda name: levers[name], default=None)
    if lever is not None and levers[lever] < (1 - WORTH) * chosen.tpot_s:
        gain = 1 - levers[lever] / chosen.tpot_s
        reasons.append(f"{lever} would help most: {milliseconds(levers[lever])} per token, {gain:.0%} less")
    return reasons
