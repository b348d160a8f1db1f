"""Offloaded and speculative execution of `transformers` MoE models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from expertcast import UNSUPPORTED

if TYPE_CHECKING:
    from expertcast.runtime.benchmarking.bench import benchmark
    from expertcast.runtime.config import OffloadConfig
    from expertcast.runtime.engine.front import speculate
    from expertcast.runtime.links.base import InstantLink, Link
    from expertcast.runtime.links.cuda import CudaLink
    from expertcast.runtime.links.emulated import EmulatedLink
    from expertcast.runtime.loading import load_offloaded
    from expertcast.runtime.offloading import OffloadedModel, offload
    from expertcast.runtime.quality.forecasts import QualityRun, measure_quality, text_windows

if UNSUPPORTED:
    raise ImportError(UNSUPPORTED)

__all__ = [
    "CudaLink",
    "EmulatedLink",
    "InstantLink",
    "Link",
    "OffloadConfig",
    "OffloadedModel",
    "QualityRun",
    "benchmark",
    "load_offloaded",
    "measure_quality",
    "offload",
    "speculate",
    "text_windows",
]

_LAZY = {
    "CudaLink": "expertcast.runtime.links.cuda",
    "EmulatedLink": "expertcast.runtime.links.emulated",
    "InstantLink": "expertcast.runtime.links.base",
    "Link": "expertcast.runtime.links.base",
    "OffloadConfig": "expertcast.runtime.config",
    "OffloadedModel": "expertcast.runtime.offloading",
    "QualityRun": "expertcast.runtime.quality.forecasts",
    "benchmark": "expertcast.runtime.benchmarking.bench",
    "load_offloaded": "expertcast.runtime.loading",
    "measure_quality": "expertcast.runtime.quality.forecasts",
    "offload": "expertcast.runtime.offloading",
    "speculate": "expertcast.runtime.engine.front",
    "text_windows": "expertcast.runtime.quality.forecasts",
}


def __getattr__(name: str) -> Any:
    """On first use: stores, links and policies need no `transformers`, which most of these do."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'expertcast.runtime' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
