"""Offloaded and speculative execution of `transformers` MoE models."""

from expertcast.runtime.bench import benchmark
from expertcast.runtime.device_graph import GraphDecoder
from expertcast.runtime.device_link import KernelLink
from expertcast.runtime.link_cuda import CudaLink
from expertcast.runtime.link_emulated import EmulatedLink
from expertcast.runtime.links import InstantLink, Link
from expertcast.runtime.loading import load_offloaded
from expertcast.runtime.offloaded import OffloadedModel, offload
from expertcast.runtime.quality import QualityRun, measure_quality, text_windows
from expertcast.runtime.speculation import speculate
from expertcast.runtime.statistics import LayerStatistics, RunStatistics

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
