"""What :func:`expertcast.runtime.advising.disk.advise_disk` gives back: plain numbers, and a text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from expertcast.predictors.plain import Json, aligned
from expertcast.runtime.advising.advice import milliseconds
from expertcast.runtime.config import OffloadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOption:
    """One way to keep the experts, and what is expected of it on demand. Times are medians over decode steps."""

    store: str
    """`disk` or `memory`."""
    codec: str = "raw"
    pools: str = ""
    """Bytes beside the slots, as `C=2000000,E=300000`."""
    slots: int
    tpot_s: float
    wait_s: float
    """Waiting for experts, per token."""
    hit_rate: float
    """Of the slots."""
    read_per_token: float
    """Bytes from the disk."""

    @property
    def name(self) -> str:
        """For a sentence."""
        if self.store == "memory":
            return "experts in memory"
        return f"codec {self.codec}" + (f" with pools {self.pools}" if self.pools else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskAdvice:
    """How to keep the experts, what to expect, and why."""

    chosen: DiskOption
    options: list[DiskOption]
    """All that was considered, raw on disk first."""
    reasons: list[str]
    disk_rate: float
    """Bytes per second."""
    disk_source: str
    """`given`, or what was measured."""
    decode_rate: float | None
    """Bytes of weights per second and thread; None: nothing was compressed."""
    decoders: int
    stored_share: float | None
    """Of the bytes, that the codec stores."""
    block_bytes: int
    experts: int
    """Of all layers together."""
    memory_bytes: int
    """For slots and pools."""
    routing: str
    """What was replayed."""
    tokens: int
    layer_compute_s: list[float] = field(default_factory=list)
    """Per layer, measured."""
    unexplained_s: float = 0.0
    """Added to the event model's time per token: what it missed of the short run from the store that is there."""

    def config(self, given: OffloadConfig, folder: Path) -> OffloadConfig:
        """What is advised, as a configuration to run with; other options stay as they are in what was given."""
        chosen = self.chosen
        sized = replace(given, slots=chosen.slots, memory=None, predictor=None, bandwidth=None, link="auto")
        if chosen.store == "memory":
            return replace(sized, store="memory", store_folder=None, codec="raw", pools="")
        return replace(sized, store="disk", store_folder=str(folder), codec=chosen.codec, pools=chosen.pools)

    def as_dict(self) -> Json:
        """Plain values, for JSON."""
        return asdict(self)

    def text(self) -> str:
        """For the terminal."""
        decoder = ""
        if self.decode_rate is not None:
            decoder = f"; {self.decoders} x {self.decode_rate / 1e9:.3g} GB/s decoded, {self.stored_share:.3f} stored"
        late = ""
        if self.unexplained_s:
            late = f"\nthe event model misses the short run by {milliseconds(self.unexplained_s)} per token"
        return "\n".join(
            [
                f"advice: {self.chosen.name}; expect {milliseconds(self.chosen.tpot_s)} per token on demand",
                "",
                *(f"- {reason}" for reason in self.reasons),
                "",
                _table(self.options),
                "",
                f"disk {self.disk_rate / 1e9:.3g} GB/s ({self.disk_source}){decoder}; an expert is "
                f"{self.block_bytes:,} bytes, {self.memory_bytes / 1e6:.4g} MB for some of {self.experts}; "
                f"{self.tokens} tokens replayed, routing: {self.routing}{late}",
            ]
        )


def _table(options: Sequence[DiskOption]) -> str:
    rows = [["store", "codec", "pools", "slots", "ms/token", "waiting", "hit rate", "MB read"]]
    for option in options:
        rows.append(
            [
                option.store,
                option.codec,
                option.pools or "-",
                str(option.slots),
                f"{1e3 * option.tpot_s:.2f}",
                f"{1e3 * option.wait_s:.2f}",
                f"{option.hit_rate:.3f}",
                f"{option.read_per_token / 1e6:.2f}",
            ]
        )
    return aligned(rows, left=3)
