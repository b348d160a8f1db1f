"""What `expertcast bench` and `advise` run, from their options: model, routing, forecasts, link, prompt."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.checkpoints.provenance import provenance
from expertcast.commands.bench_options import TargetOptions
from expertcast.commands.output import say
from expertcast.data.discovery import find_moe_layers
from expertcast.data.models import REFERENCE, load_model, load_tokenizer
from expertcast.data.text import load_documents
from expertcast.predictors import ExpertcastError, MoEView, Predictor
from expertcast.predictors.plain import Json
from expertcast.runtime.benchmarking.bench import COPY_OVER_COMPUTE, layer_seconds
from expertcast.runtime.benchmarking.hardware import hardware
from expertcast.runtime.benchmarking.lent_store import LentStore, without_experts_to
from expertcast.runtime.benchmarking.routing_process import RoutingProcess
from expertcast.runtime.benchmarking.routing_tables import drawn, replayed
from expertcast.runtime.benchmarking.shapes import SHAPES, build_shape
from expertcast.runtime.config import OffloadConfig

DEFAULT_PREDICTOR = "next_norm"
"""For models with routers of their own: it needs no training."""


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
        name, device = options.target, torch.device(options.device_name)
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
        options, shape, replay = self.options.routing, self.view.shape, self.options.process.replay
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
        ratio, config = self.options.copy_over_compute, self.options.offload
        if not self.options.emulated:
            return LinkSetting(link="cuda" if config.link == "auto" else str(config.link))
        if config.bandwidth is not None:
            return LinkSetting(link="emulated", latency=config.latency, bandwidth=config.bandwidth)
        ratio = COPY_OVER_COMPUTE if ratio is None else ratio
        say("measuring a layer's computation, for the link's speed")
        layer_s = layer_seconds(self.model, prompt_ids, new_tokens, self.store)
        return LinkSetting(
            link="emulated",
            latency=config.latency,
            bandwidth=self.view.shape.top_k * self.store.layout.block_bytes / (layer_s * ratio),
            copy_over_compute=ratio,
            layer_compute_s=layer_s,
        )

    def config(self, link: LinkSetting) -> OffloadConfig:
        """What all runs have in common."""
        return replace(self.options.offload, store=self.store, link=link.link, bandwidth=link.bandwidth)

    def heading(self) -> Json:
        """What is run, on what."""
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "hardware": hardware(),
            **provenance(),
            "target": self.options.target,
            "random_weights": self.options.random,
            "shape": self.view.shape.as_dict(),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "block_bytes": self.store.layout.block_bytes,
        }


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
