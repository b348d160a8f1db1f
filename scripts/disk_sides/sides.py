"""Who is compared: our ways to read experts from a disk, and what others do."""

from __future__ import annotations

from dataclasses import dataclass

from expertcast.predictors.messages import Json

OWN, PROCESS = "own", "process"
"""Workloads: the model's own routing of a text, and routing drawn by a process, which alone can be forecast as well as
real models' is."""
DISK, DIRECT, LLAMA, ACCELERATE = "disk", "direct", "llama.cpp", "accelerate"


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to run the model; several workloads may share a name."""

    name: str
    kind: str = "ours"
    """ours, accelerate, llama.cpp, or disk: no model, but the disk's own rate."""
    workload: str = OWN
    codec: str = "raw"
    link: str = "disk"
    pools: bool = False
    """What the planner says of the memory keeps experts compressed, the rest is slots."""
    forecasts: bool = False
    about: str = ""
    """For people."""

    @property
    def key(self) -> str:
        """Name and workload."""
        return f"{self.name}, {self.workload}"

    def options(self, memory: int) -> Json:
        """What an :class:`OffloadConfig` takes, for so many bytes of experts."""
        options: Json = {"store": "disk", "codec": self.codec, "link": self.link, "memory": memory}
        if self.forecasts:
            options["policies"] = {"prefetch": "value"}  # a disk has no time for copies that may be wrong
        return options


SIDES = (
    Side(name=DISK, kind=DISK, about="the disk alone: direct reads of 2 MB, 4 under way"),
    Side(name="mapped", link="instant", about="our mapped store: pages come as they are touched"),
    Side(name=DIRECT, about="our disk link: direct reads into the slots"),
    Side(name="bitsplit", codec="bitsplit", about="the same over experts compressed without loss"),
    Side(
        name="pools",
        codec="bitsplit",
        pools=True,
        about="bitsplit, and as planned experts compressed in memory",
    ),
    Side(name=LLAMA, kind=LLAMA, about="llama.cpp, a mapped GGUF in bf16, two threads, no repacking"),
    Side(name=ACCELERATE, kind=ACCELERATE, about="accelerate's disk_offload over the checkpoint's own file"),
    Side(name=DIRECT, workload=PROCESS, about="our disk link, on demand"),
    Side(name="bitsplit", workload=PROCESS, codec="bitsplit", about="compressed, on demand"),
    Side(name="forecasts", workload=PROCESS, forecasts=True, about="our disk link, the forecasts that are worth it"),
    Side(name="both", workload=PROCESS, codec="bitsplit", forecasts=True, about="compressed, the same forecasts"),
    Side(name="pools", workload=PROCESS, codec="bitsplit", pools=True, about="compressed, pools, on demand"),
    Side(
        name="all", workload=PROCESS, codec="bitsplit", pools=True, forecasts=True, about="compressed, pools, forecasts"
    ),
)
