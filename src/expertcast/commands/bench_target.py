"""Model that `expertcast bench` and `advise` run, from their shared options."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.checkpoints.provenance import provenance
from expertcast.commands.numbers import not_negative, positive_number
from expertcast.commands.options import (
    BANDWIDTH,
    COUNT,
    PREDICTOR,
    Fields,
    Model,
    ModelOptions,
    Option,
)
from expertcast.commands.output import say
from expertcast.commands.predictors import learned_documents
from expertcast.data.machine import usable_processors
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.packed_experts import weight_bits
from expertcast.data.text import bundled_ids
from expertcast.predictors import ExpertcastError, MoEView
from expertcast.predictors.messages import Json, TooLargeError

if TYPE_CHECKING:
    from expertcast.runtime.benchmarking.bench import BorrowedStore
    from expertcast.runtime.config import EXPERTS, MISSES, OffloadConfig

_EXPANDED = "expanded"
"""Default form of the experts."""
_IN_MEMORY = (
    "bench and advise hold all experts in memory: compare `generate` with and without --predictor for a larger model"
)
DEFAULT_PREDICTOR = "next_norm"
"""It needs no training."""


@dataclass(frozen=True, kw_only=True)
class TargetOptions(ModelOptions):
    """Options that `bench` and `advise` share.

    Raises:
        ExpertcastError: options that contradict each other or are out of range; before a model is loaded.
    """

    target: Model
    experts: Annotated[str | None, Option(choices=EXPERTS)] = None
    """Form of the experts, as in `expertcast generate` (default: bench expanded, advise auto)."""
    offload: Annotated[
        OffloadConfig,
        Fields(
            slots=COUNT,
            memory=Option(metavar="BYTES", help="bench and advise: bytes of the slots alone"),
            bandwidth=BANDWIDTH,
            latency=Option(metavar="S", read=not_negative),
            misses=Option(choices=MISSES),
            link=Option(metavar="NAME", help="on the CPU auto is emulated in bench, and in advise if a speed is given"),
        ),
    ]
    """Offloading of the experts."""
    copy_over_compute: Annotated[float | None, Option(metavar="R", read=positive_number)] = None
    """Speed of the emulated link: K copies take R layers' time (default: bench 5, advise the real link)."""
    predictor: Annotated[str | None, PREDICTOR] = None
    """Predictor (default: next_norm)."""

    def __post_init__(self) -> None:
        config = self.offload
        if config.bandwidth is not None and self.copy_over_compute is not None:
            raise ExpertcastError("--bandwidth and --copy-over-compute both set the link's speed: give one of them")
        if config.link == "cuda" and self.device_name == "cpu":
            raise ExpertcastError("--link cuda needs a model on CUDA: give --device cuda, or another link")
        speed_given = config.bandwidth is not None or self.copy_over_compute is not None or config.latency
        if speed_given and not self.emulated:
            raise ExpertcastError(
                f"link {config.link!r} has its own speed: leave out --bandwidth, --latency and --copy-over-compute, or "
                "give --link emulated on the CPU"
            )

    @property
    def experts_form(self) -> str:
        """Form of the experts."""
        return self.experts or _EXPANDED

    @property
    def emulated(self) -> bool:
        """Whether the link is emulated."""
        return self.device_name == "cpu" and self.offload.link in ("auto", "emulated")


@dataclass(frozen=True, slots=True)
class Target:
    """Model to measure."""

    options: TargetOptions
    model: PreTrainedModel
    view: MoEView
    store: BorrowedStore
    """Store of all runs."""

    @classmethod
    def load(cls, options: TargetOptions) -> Self:
        """Load the model, with its experts in the form of --experts in memory.

        Raises:
            ExpertcastError: no such model, a form that it does not have, or too little memory.
        """
        from expertcast.runtime.benchmarking.bench import BorrowedStore, loaded_model, without_experts_to
        from expertcast.runtime.config import OffloadConfig

        name, form = options.target, options.experts_form
        try:
            if form == _EXPANDED:
                model = load_model(name, dtype=options.dtype, **options.passed_on(name))
            else:
                link = "instant" if options.device_name == "cpu" else "auto"  # a link to memory: nothing stays in files
                model = loaded_model(options.offloaded(name, OffloadConfig(experts=form, cache=False, link=link)))
        except TooLargeError as error:
            raise ExpertcastError(f"{error}; {_IN_MEMORY}") from error
        view = find_moe_layers(model)
        device = torch.device(options.device_name)
        return cls(options, without_experts_to(model, device), view, BorrowedStore(view, device))

    def prompt(self, tokens: int) -> Tensor:
        """Return token ids [1, T] of bundled text.

        The text leaves out documents that the predictor learned from.

        Raises:
            ExpertcastError: the bundled text is shorter.
        """
        known = learned_documents([self.options.predictor])
        tokenizer = load_tokenizer(self.options.target, **self.options.passed_on(self.options.target))
        return torch.tensor([bundled_ids(tokenizer, tokens, known)], device=self.store.device)

    def link(self, prompt_ids: Tensor, new_tokens: int) -> Json:
        """Return name and speed of the link; measure a layer's time for an emulated link without --bandwidth.

        On CUDA `auto` is the link `cuda`, which times every copy. On the CPU it is `instant`
        where no link is emulated.

        Returns:
            `link`, its name, and if known `latency` in seconds, `bandwidth` in bytes per second, `copy_over_compute`
            (time of K copies in layers' times, which sets the bandwidth) and `layer_compute_s` (measured).
        """
        from expertcast.runtime.benchmarking.bench import COPY_OVER_COMPUTE, layer_seconds

        config = self.options.offload
        if not self.options.emulated:
            real = "instant" if self.options.device_name == "cpu" else "cuda"
            name = real if config.link == "auto" else str(config.link)
            found = {"link": name, "latency": config.latency or None, "bandwidth": config.bandwidth}
            return {name: value for name, value in found.items() if value is not None}
        link = {"link": "emulated", "latency": config.latency, "bandwidth": config.bandwidth}
        if config.bandwidth is None:
            ratio = self.options.copy_over_compute or COPY_OVER_COMPUTE
            say("measuring a layer's computation, for the link's speed")
            layer_s = layer_seconds(self.model, prompt_ids, new_tokens, self.store)
            speed = self.view.shape.top_k * self.store.layout.block_bytes / (layer_s * ratio)
            link |= {"bandwidth": speed, "copy_over_compute": ratio, "layer_compute_s": layer_s}
        return link

    def config(self, link: Json) -> OffloadConfig:
        """Return the configuration that all runs over a link share; the experts are packed already."""
        from expertcast.runtime.config import slots_for

        config = replace(self.options.offload, store=self.store, link=link["link"], bandwidth=link.get("bandwidth"))
        return config if config.memory is None else replace(config, slots=slots_for(config, self.store), memory=None)

    def heading(self) -> Json:
        """Describe the target and the hardware."""
        from expertcast.data.machine import hardware

        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "hardware": hardware(),
            **provenance(),
            "target": self.options.target,
            "shape": self.view.shape.as_dict(),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "experts_form": self.options.experts_form,
            "weight_bits": weight_bits(self.view),
            "block_bytes": self.store.layout.block_bytes,
        }


def say_if_busy() -> None:
    """Warn if other programs use the machine, since measured times are then too long."""
    load, processors = os.getloadavg()[0], usable_processors()
    if load > processors:
        say(
            f"warning: the machine is busy (load {load:.1f}, {processors} processors for this program): times will be "
            "too long"
        )
