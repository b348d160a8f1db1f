"""What a model is offloaded with, once its options have been understood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expertcast.predictors import NextToken
from expertcast.runtime.drafts.names import NONE
from expertcast.runtime.engine.drift import DriftMonitor
from expertcast.runtime.engine.kernels import SlotKernel
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.links.base import Link
from expertcast.runtime.policies import Policies
from expertcast.runtime.recording.observer import Observer
from expertcast.runtime.storage.store import ExpertStore


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadParts:
    """What a model is offloaded with; :func:`expertcast.offload` makes them from its options."""

    store: ExpertStore
    slots: int
    """How many experts fit on the device."""
    link: Link | None
    """None: the one that measures fastest on this CUDA device."""
    policies: Policies
    speculator: Speculator
    """Which knows the model's MoE layers."""
    next_token: NextToken | None
    """Forecasts the next tokens' routing."""
    kernel: SlotKernel
    cache: bool
    """False frees an expert's slot as soon as its layer has run."""
    likely: float
    """The least probability by `next_token` at which an expert is loaded when a token begins."""
    gated: bool = False
    """With a cache, make only forecasts that are expected to save more waiting than they cost."""
    drift: DriftMonitor | None = None
    """Follows the forecasts' recall."""
    draft: str = NONE
    """What `generate` drafts with unless it is told otherwise."""
    observers: Sequence[Observer] = ()
