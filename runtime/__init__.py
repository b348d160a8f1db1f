"""Offloaded and speculative execution of `transformers` MoE models."""

from expertcast.runtime.benchmarking.bench import benchmark
from expertcast.runtime.device.graph import GraphDecoder
from expertcast.runtime.device.link import KernelLink
from expertcast.runtime.link_cuda import CudaLink
from expertcast.runtime.link_emulated import EmulatedLink
from expertcast.runtime.links import InstantLink, Link
from expertcast.runtime.offloaded import OffloadedModel, offload
from expertcast.runtime.quality import QualityRun, measure_quality, text_windows
from expertcast.runtime.speculation import speculate
from expertcast.runtime.statistics import LayerStatistics, RunStatistics
from expertcast.runtime.storage.loading import load_offloaded

__all__ = [
    "CudaLink",
    "EmulatedLink",
    "GraphDecoder",
    "InstantLink",
    "KernelLink",
    "LayerStatistics",
    "Link",
    "OffloadedModel",
    "QualityRun",
    "RunStatistics",
    "benchmark",
    "load_offloaded",
    "measure_quality",
    "offload",
    "speculate",
    "text_windows",
]
