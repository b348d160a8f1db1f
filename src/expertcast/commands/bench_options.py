"""The options that `expertcast bench` and `advise` share: what is run, over which link, with which routing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from expertcast.commands.options import Fields, Option, bandwidth, not_negative, positive, positive_number
from expertcast.commands.shared import BANDWIDTH_HELP, MODEL_HELP, ModelOptions
from expertcast.data.models import REFERENCE
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError
from expertcast.runtime.benchmarking.routing_tables import RoutingOptions
from expertcast.runtime.benchmarking.shapes import SHAPES, check_shape
from expertcast.runtime.config import OffloadConfig

TARGET_HELP = f"{MODEL_HELP}; or a shape with random weights: {', '.join(SHAPES)}"
_OFFLOAD = Fields(
    slots=Option(metavar="S", read=positive),
    memory=Option(metavar="BYTES"),
    bandwidth=Option(metavar="BYTES/S", read=bandwidth, help=BANDWIDTH_HELP),
    latency=Option(metavar="S", read=not_negative),
    link=Option(metavar="NAME", help="here auto is emulated, on a GPU cuda"),
)


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """The options of a routing process, as far as they are given."""

    persistence: float | None = None
    """Chance that an expert stays (default: 0.3)."""
    skew: float | None = None
    """Zipf exponent of experts' popularity (default: 0.8)."""
    accuracy: float | None = None
    """Chance of a right forecast (default: 0.9)."""
    replay: Path | None = None
    """Route as recorded in a traces folder."""


_PROCESS = Fields(
    persistence=Option(metavar="P"), skew=Option(metavar="Z"), accuracy=Option(metavar="A"),
    replay=Option(metavar="TRACES"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TargetOptions(ModelOptions):
    """What `bench` and `advise` both need to run something offloaded.

    Raises:
        ExpertcastError: options that rule each other out, or out of range; before anything is built or loaded.
    """

    target: Annotated[str, Option(positional=True, metavar="MODEL|SHAPE", help=TARGET_HELP)]
    layers: Annotated[int | None, Option(metavar="N", read=positive)] = None
    """Cut a shape to N MoE layers."""
    offload: Annotated[OffloadConfig, _OFFLOAD]
    """How the experts are offloaded."""
    copy_over_compute: Annotated[float | None, Option(metavar="R", read=positive_number)] = None
    """Emulate a link on which K copies take R layers' time (default: 5)."""
    predictor: Annotated[str | None, Option(metavar="NAME|CKPT")] = None
    """For a model's own routing (default: next_norm)."""
    process: Annotated[ProcessOptions, _PROCESS]
    """Random weights route at random: a process routes a shape instead, and a model where it is asked for."""
    seed: int = 0
    """Of random weights, routing and prompts."""

    def __post_init__(self) -> None:
        if self.layers is not None and not self.random:
            raise ExpertcastError(f"--layers cuts shapes, not models: {self.target!r} is none of {', '.join(SHAPES)}")
        config, process = self.offload, self.process
        if config.bandwidth is not None and self.copy_over_compute is not None:
            raise ExpertcastError("--bandwidth and --copy-over-compute both set the link's speed: give one of them")
        speed_given = config.bandwidth is not None or self.copy_over_compute is not None or config.latency
        if speed_given and not self.emulated:
            raise ExpertcastError(f"the emulated link is for the CPU and --link auto or emulated, not {config.link!r}")
        if self.random:
            check_shape(self.target, layers=self.layers, dtype=self.dtype)
        if process.replay is not None:
            TraceDataset.open(process.replay)
        if self.routing is not None and self.predictor is not None:
            raise ExpertcastError(
                "--predictor reads hidden states, which tell nothing of routing that is drawn or replayed: leave it "
                "out; forecasts come with --accuracy"
            )
        if process.replay is not None and (process.persistence is not None or process.skew is not None):
            raise ExpertcastError("--replay takes its routing from traces: leave --persistence and --skew out")

    @property
    def random(self) -> bool:
        """Whether the target is a shape; `reference` is the bundled model unless `layers` cuts it."""
        name = self.target
        return name in SHAPES and not Path(name).exists() and (name != REFERENCE or self.layers is not None)

    @property
    def emulated(self) -> bool:
        """Whether the link is emulated."""
        return torch.device(self.device_name).type == "cpu" and self.offload.link in ("auto", "emulated")

    @property
    def routing(self) -> RoutingOptions | None:
        """What a routing process is asked for; None where the model routes by itself.

        Raises:
            ExpertcastError: a number out of range.
        """
        given = {name: value for name, value in vars(self.process).items() if value is not None}
        if not self.random and not given:
            return None
        given.pop("replay", None)
        return RoutingOptions(**given, seed=self.seed)
