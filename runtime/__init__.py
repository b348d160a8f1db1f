"""Offloaded and speculative execution of `transformers` MoE models."""

from expertcast.runtime.benchmarking.bench import benchmark
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.engine.speculate import speculate
from expertcast.runtime.graph import GraphDecoder
from expertcast.runtime.links.base import InstantLink, Link
from expertcast.runtime.links.cuda import CudaLink
from expertcast.runtime.links.emulated import EmulatedLink
from expertcast.runtime.links.kernel import KernelLink
from expertcast.runtime.loading import load_offloaded
from expertcast.runtime.offloaded import OffloadedModel
from expertcast.runtime.offloading import offload
from expertcast.runtime.quality.forecasts import QualityRun, measure_quality, text_windows

__all__ = [
    "CudaLink",
    "EmulatedLink",
    "GraphDecoder",
    "InstantLink",
    "KernelLink",
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
