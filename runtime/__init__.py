"""Offloaded and speculative execution of `transformers` MoE models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from expertcast import UNSUPPORTED

if TYPE_CHECKING:
    from expertcast.runtime.benchmarking.bench import benchmark as benchmark
    from expertcast.runtime.config import OffloadConfig as OffloadConfig
    from expertcast.runtime.engine.front import speculate as speculate
    from expertcast.runtime.links.base import InstantLink as InstantLink
    from expertcast.runtime.links.base import Link as Link
    from expertcast.runtime.links.cuda import CudaLink as CudaLink
    from expertcast.runtime.links.emulated import EmulatedLink as EmulatedLink
    from expertcast.runtime.loading import load_offloaded as load_offloaded
    from expertcast.runtime.offloading import OffloadedModel as OffloadedModel
    from expertcast.runtime.offloading import offload as offload
    from expertcast.runtime.quality import QualityRun as QualityRun
    from expertcast.runtime.quality import measure_quality as measure_quality
    from expertcast.runtime.quality import text_windows as text_windows

if UNSUPPORTED:
    raise ImportError(UNSUPPORTED)


_NAMES = {
    "runtime.benchmarking.bench": "benchmark",
    "runtime.config": "OffloadConfig",
    "runtime.engine.front": "speculate",
    "runtime.links.base": "InstantLink Link",
    "runtime.links.cuda": "CudaLink",
    "runtime.links.emulated": "EmulatedLink",
    "runtime.loading": "load_offloaded",
    "runtime.offloading": "OffloadedModel offload",
    "runtime.quality": "QualityRun measure_quality text_windows",
}
"""Public names by module."""
_MODULE = {name: f"expertcast.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULE)


def __getattr__(name: str) -> Any:
    """On first use: stores, links and policies need no `transformers`, which most of these do."""
    if name in _MODULE:
        return getattr(importlib.import_module(_MODULE[name]), name)
    raise AttributeError(f"module 'expertcast.runtime' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
