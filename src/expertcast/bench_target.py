"""What `expertcast bench` and `advise` run, from their options: model, routing, forecasts, link, prompt."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.discovery import find_moe_layers
from expertcast.data.models import REFERENCE, load_model, load_tokenizer
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, MoEView, Predictor
from expertcast.predictors.plain import Json
from expertcast.runtime.benchmarking.bench import COPY_OVER_COMPUTE, layer_seconds
from expertcast.runtime.benchmarking.lent_store import LentStore, without_experts_to
from expertcast.runtime.benchmarking.routing_process import RoutingProcess
from expertcast.runtime.benchmarking.routing_tables import RoutingOptions, drawn, replayed
from expertcast.runtime.benchmarking.shapes import SHAPES, build_shape, check_shape
from expertcast.runtime.config import OffloadConfig

DEFAULT_PREDICTOR = "next_norm"
"""For models with routers of their own: it needs no training."""


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What `bench` and `advise` both need to run something offloaded.

    Raises:
        ExpertcastError: options that rule each other out, or out of range; before anything is built or loaded.
    """

    target: str
    layers: int | None = None
    """cut a shape to N MoE layers"""
    slots: int | None = None
    """experts that fit on the device"""
    memory: str | None = None
    """device memory for experts instead of --slots, such as 2GB"""
    bandwidth: float | None = None
    copy_over_compute: float | None = None
    """emulate a link on which K copies take R layers' time (default: 5)"""
    latency: float = 0.0
    """of the emulated link, per copy"""
    link: str = "auto"
    """instant, emulated, cuda or kernel (default: emulated, or cuda on a GPU)"""
    predictor: str | None = None
    """for a model's own routing (default: next_norm)"""
    persistence: float | None = None
    """chance that an expert stays (default: 0.3)"""
    skew: float | None = None
    """Zipf exponent of experts' popularity (default: 0.8)"""
    accuracy: float | None = None
    """chance of a right forecast (default: 0.9)"""
    replay: Path | None = None
    """route as recorded in a traces folder"""
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.layers is not None and not self.random:
            raise ExpertcastError(f"--layers cuts shapes, not models: {self.target!r} is none of {', '.join(SHAPES)}")
        if self.bandwidth is not None and self.copy_over_compute is not None:
            raise ExpertcastError("--bandwidth and --copy-over-compute both set the link's speed: give one of them")
        speed_given = self.bandwidth is not None or self.copy_over_compute is not None or self.latency
        if speed_given and not self.emulated:
            raise ExpertcastError(f"the emulated link is for the CPU and --link auto or emulated, not {self.link!r}")
        if self.random:
            check_shape(self.target, layers=self.layers, dtype=self.dtype)
        if self.replay is not None:
            TraceDataset.open(self.replay)
        if self.routing is not None and self.predictor is not None:
            raise ExpertcastError(
                "--predictor reads hidden states, which tell nothing of routing that is drawn or replayed: leave it "
                "out; forecasts come with --accuracy"
            )
        if self.replay is not None and (self.persistence is not None or self.skew is not None):
            raise ExpertcastError("--replay takes its routing from traces: leave --persistence and --skew out")

    @property
    def random(self) -> bool:
        """Whether the target is a shape; `reference` is the bundled model unless `layers` cuts it."""
        name = self.target
        return name in SHAPES and not Path(name).exists() and (name != REFERENCE or self.layers is not None)

    @property
    def emulated(self) -> bool:
        """Whether the link is emulated."""
        return torch.device(self.device).type == "cpu" and self.link in ("auto", "emulated")

    @property
    def routing(self) -> RoutingOptions | None:
        """What a routing process is asked for; None where the model routes by itself.

        Raises:
            ExpertcastError: a number out of range.
        """
        given = {"persistence": self.persistence, "skew": self.skew, "accuracy": self.accuracy}
        chosen = {name: value for name, value in given.items() if value is not None}
        if not self.random and not chosen and self.replay is None:
            return None
        return RoutingOptions(**chosen, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class LinkSetting:
    """The link of all runs. None is what a link has not, or nobody measured."""

    link: str
    latency: float | None = None
    bandwidth: float | None = None
    copy_over_compute: float | None = None
    """K copies take so many layers' time: that is where the bandwidth comes from."""
    layer_compute_s: float | None = None
    """What a layer was measured to take."""

    def as_dict(self) -> Json:
        """What there is, for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Target:
    """What is measured."""

    options: TargetOptions
    model: PreTrainedModel
    view: MoEView
    store: LentStore
    """Of all runs."""

    @classmethod
    def load(cls, options: TargetOptions) -> Self:
        """The model or shape that the options name.

        Raises:
            ExpertcastError: neither, or no room for it.
        """
        name, device = options.target, torch.device(options.device)
        if options.random:
            say(f"building {name} with random weights")
            model = build_shape(name, layers=options.layers, dtype=options.dtype, seed=options.seed)
        else:
            model = _load_model(name, options.dtype)
        view = find_moe_layers(model)
        return cls(options, without_experts_to(model, device), view, LentStore(view, device))

    def prompt(self, tokens: int) -> Tensor:
        """Token ids [1, T]: the bundled text for a model, random ids where weights are random.

        Raises:
            ExpertcastError: the bundled text is shorter.
        """
        if self.options.random:
            generator = torch.Generator().manual_seed(self.options.seed)
            ids = torch.randint(self.model.config.vocab_size, (1, tokens), generator=generator)
            return ids.to(self.store.device)
        tokenizer = load_tokenizer(self.options.target)
        ids_list: list[int] = []
        for document in load_documents(REFERENCE):
            ids_list += tokenizer(document.text)["input_ids"]
            if len(ids_list) >= tokens:
                return torch.tensor([ids_list[:tokens]], device=self.store.device)
        raise ExpertcastError(f"--prompt-tokens {tokens}: the bundled text has {len(ids_list)} tokens; give fewer")

    def routing_process(self, prompt: int, new_tokens: int) -> RoutingProcess | None:
        """The process that routes in place of the model, where weights are random or an option asks for one.

        Raises:
            ExpertcastError: traces of another model, or too few.
        """
        options, shape, replay = self.options.routing, self.view.shape, self.options.replay
        if options is None:
            return None
        if replay is None:
            tables = drawn(shape, prompt=prompt, new_tokens=new_tokens, options=options)
        else:
            tables = replayed(replay, shape, prompt=prompt, new_tokens=new_tokens, options=options)
        return RoutingProcess(self.model, self.view, tables)

    def forecaster(self, process: RoutingProcess | None, ahead: int = 1) -> str | Predictor:
        """The predictor of all runs that have one."""
        return self.options.predictor or DEFAULT_PREDICTOR if process is None else process.predictor((ahead,))

    def link(self, prompt_ids: Tensor, new_tokens: int) -> LinkSetting:
        """The link that is asked for; an emulated one is as fast as is asked for, or by a layer's measured time.

        On CUDA `auto` is the copy engine's link here: it times every copy, which the kernel's link cannot.
        """
        options = self.options
        if not options.emulated:
            return LinkSetting(link="cuda" if options.link == "auto" else options.link)
        if options.bandwidth is not None:
            return LinkSetting(link="emulated", latency=options.latency, bandwidth=options.bandwidth)
        ratio = COPY_OVER_COMPUTE if options.copy_over_compute is None else options.copy_over_compute
        say("measuring a layer's computation, for the link's speed")
        layer_s = layer_seconds(self.model, prompt_ids, new_tokens, self.store)
        return LinkSetting(
            link="emulated",
            latency=options.latency,
            bandwidth=self.view.shape.top_k * self.store.layout.block_bytes / (layer_s * ratio),
            copy_over_compute=ratio,
            layer_compute_s=layer_s,
        )

    def config(self, link: LinkSetting) -> OffloadConfig:
        """What all runs have in common."""
        return OffloadConfig(
            slots=self.options.slots,
            memory=self.options.memory,
            store=self.store,
            link=link.link,
            bandwidth=link.bandwidth,
            latency=link.latency or 0.0,
        )


def routing_source(process: RoutingProcess | None) -> str:
    """Who routes, for people."""
    return "the model's own routers" if process is None else process.tables.source


def _load_model(name: str, dtype: str) -> PreTrainedModel:
    try:
        return load_model(name, dtype=dtype)
    except ExpertcastError as error:
        if "/" in name or Path(name).exists():
            raise
        raise ExpertcastError(f"{name!r} is no shape ({', '.join(SHAPES)}) and {error}") from error


def say(text: str) -> None:
    """A line of progress, apart from the output."""
    print(text, file=sys.stderr, flush=True)
