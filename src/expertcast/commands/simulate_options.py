"""What `expertcast simulate` runs, from its options: sets of policies, and machines.

L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from expertcast.commands.numbers import BANDWIDTHS, not_negative, positive_number
from expertcast.commands.options import BANDWIDTH, Count, Option
from expertcast.predictors import ExpertcastError, MoEView
from expertcast.runtime.benchmarking.bench import COPY_OVER_COMPUTE
from expertcast.runtime.config import pool_bytes
from expertcast.runtime.links.virtual import Stored
from expertcast.runtime.policies import EVICTION, CacheShape, Policies
from expertcast.runtime.policies.settings import preset, published
from expertcast.runtime.simulation.machine import Case, Machine, constant_times
from expertcast.runtime.simulation.sweep import BELADY, slots_of
from expertcast.runtime.storage.codecs import check_codec, make_codec
from expertcast.runtime.storage.layout import FULL, BlockLayout
from expertcast.runtime.storage.packed import PackedLayout

# A disk in place of a link to memory.

STORED = 0.68
"""Share of the bytes that bitsplit stores, where nothing says another one."""
DECODE_RATE = 1e9
"""Bytes of weights per second that one thread decodes, where nothing says another rate."""
_CODED = "raw", "bitsplit"


@dataclass(frozen=True, kw_only=True)
class DiskOptions:
    """The disk, whose rate is `--bandwidth`.

    Raises:
        ExpertcastError: options of a disk without a codec, or of coded experts for raw ones.
    """

    codec: Annotated[str | None, Option(metavar="CODEC")] = None
    """Experts lie on a disk, packed so: raw, or bitsplit (default: they lie in memory)."""
    stored: Annotated[float | None, Option(metavar="F", read=positive_number)] = None
    """Of bitsplit, the share of the bytes that it stores (default: 0.68)."""
    decode_rate: Annotated[float | None, Option(metavar="BYTES/S", read=positive_number)] = None
    """Of bitsplit, what one thread decodes (default: 1e9)."""
    decoders: Count = 1
    """Of bitsplit, threads that decode."""
    pools: Annotated[str, Option(metavar="C=BYTES,...")] = ""
    """Of bitsplit, memory beside the slots for compressed experts (C), low bytes (S) and high bytes (E)."""

    def __post_init__(self) -> None:
        bitsplit = {"stored": self.stored, "decode_rate": self.decode_rate, "pools": self.pools}
        given = [name for name, value in bitsplit.items() if value] + ["decoders"] * (self.decoders > 1)
        if self.codec is not None:
            check_codec(self.codec)
            if self._name not in _CODED:
                raise ExpertcastError(f"--codec {self.codec}: choose from {', '.join(_CODED)}")
        if given and self._name != "bitsplit":
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ExpertcastError(f"{flags}: of compressed experts; give --codec bitsplit too, or leave it out")
        if self.stored is not None and not 0.5 < self.stored <= 1:
            raise ExpertcastError(f"--stored {self.stored:g}: half of the bytes are stored as they are; give .5 to 1")
        pool_bytes(self.pools)

    @property
    def _name(self) -> str:
        return (self.codec or "").partition(":")[0]

    def on_disk(self, layout: BlockLayout) -> Stored | None:
        """Sizes and rates of experts of this layout on a disk; None if they lie in memory.

        Raises:
            ExpertcastError: the codec cannot hold them.
        """
        if self.codec is None:
            return None
        block_bytes, codec = layout.block_bytes, make_codec(self.codec, layout)
        if self._name == "raw":
            return Stored(plain=block_bytes)
        plain, shards = block_bytes // 2, sum(codec.planes[shard.plane].compressed for shard in codec.shards)
        return Stored(
            codec=codec.text,
            plain=plain,
            coded=(max(1, round((self.stored or STORED) * block_bytes) - plain),),
            shards=shards,
            decode_s=block_bytes / (self.decode_rate or DECODE_RATE) / shards,
            threads=self.decoders,
            pools=pool_bytes(self.pools),
        )


class Chosen(NamedTuple):
    """Policies, and whose forecasts they get."""

    policies: Policies
    predictor: str | None
    published: tuple[float, float, str] | None = None
    """Capacity, bandwidth and precision of a preset that is run with its own."""


CAPACITY = 0.25
"""Share of all experts that fits, where nothing says another one."""
_Named = Annotated[tuple[str, ...], Option(metavar="P")]


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Which experts are kept, loaded and dropped; several of a kind are all combined."""

    policy: _Named = ()
    """Which expert gives up its slot (default: lru)."""
    prefetch: _Named = ()
    """Which of a forecast's experts are asked for (default: top_k with --predictor)."""
    miss: _Named = ("fetch",)
    """What becomes of missing experts."""
    routing: _Named = ("standard",)
    """Which experts a layer executes."""
    pre_eviction: _Named = ("none",)
    """Slots given up before the routing is known."""
    scope: _Named = ("global",)
    """global, or layer: each has an equal share of the slots."""
    preset: _Named = ()
    """Published systems' policies, by name."""
    published: bool = False
    """Run presets at their published capacity, bandwidth and precision, where --slots, --capacity and --bandwidth do
    not say another one; quality is measured in the model's own precision only."""

    def chosen(self, predictors: tuple[str, ...], otherwise: Sequence[str]) -> Iterator[Chosen]:
        """Presets, then every combination of the policies that are named, with every predictor.

        Args:
            predictors: those that are named; nothing is forecast without one.
            otherwise: the eviction policies when none is named, and no preset.

        Raises:
            ExpertcastError: an unknown preset, policy or option; a preset that was published without settings.
        """
        if self.published and not self.preset:
            raise ExpertcastError("--published is about presets: give --preset")
        for name in self.preset:
            made = preset(name)
            yield Chosen(made.policies, made.predictor, published(name) if self.published else None)
        if self.preset and not self.policy:
            return
        kinds = {
            "eviction": self.policy or otherwise,
            "prefetch": self.prefetch or ("top_k" if predictors else "none",),
            "miss": self.miss,
            "routing": self.routing,
            "pre_eviction": self.pre_eviction,
            "scope": self.scope,
        }
        for *words, predictor in itertools.product(*kinds.values(), predictors or (None,)):
            yield Chosen(Policies(**{kind: str(word) for kind, word in zip(kinds, words, strict=True)}), predictor)


def swept_evictions(next_token: bool) -> list[str]:
    """The eviction policies of a sweep: all but those that must be told the future, or the next tokens.

    Args:
        next_token: whether something forecasts the next tokens.
    """
    return [name for name in EVICTION.names() if name != BELADY and (name != "forecast" or next_token)]


@dataclass(frozen=True, kw_only=True)
class MachineOptions(DiskOptions):
    """Link or disk, and computation.

    Raises:
        ExpertcastError: as the class that it extends.
    """

    bandwidth: Annotated[tuple[float, ...], BANDWIDTH] = ()
    """Bytes per second of the link or disk (default: pcie4)."""
    latency: Annotated[float, Option(metavar="S", read=not_negative)] = 0.0
    """Of the link, per copy."""
    write_back: Annotated[float, Option(metavar="F", read=not_negative)] = 0.0
    """Share of a copy that an eviction takes on the link, for hosts that keep no weights (default: 0)."""
    layer_time: Annotated[tuple[float, ...], Option(metavar="S", read=positive_number)] = ()
    """Compute of all layers, or of each, in seconds."""

    def machines(
        self, view: MoEView, policies: Sequence[Policies], *, bandwidth: float | None = None, base: str = FULL
    ) -> list[Machine]:
        """One per bandwidth.

        Args:
            view: the model's layers, whose experts are copied.
            policies: all that are simulated: they say which precisions there are copies in.
            bandwidth: where none is given.
            base: what experts are stored in; copies in another precision are never larger.

        Raises:
            ExpertcastError: copies in a precision that these experts do not get smaller by, or a codec that cannot
                hold them.
        """
        shape, layout = view.shape, BlockLayout.of(view)
        slots = shape.layers * shape.experts
        cache = CacheShape(layers=shape.layers, experts=shape.experts, top_k=shape.top_k, slots=slots)
        lower = {name for each in policies for name in each.make(cache).miss.precisions}
        whole = layout.block_bytes if base == FULL else PackedLayout.of(layout, base).block_bytes
        block_bytes = {FULL: whole}
        block_bytes |= {name: min(whole, PackedLayout.of(layout, name).block_bytes) for name in sorted(lower)}
        bandwidths = self.bandwidth or (BANDWIDTHS["pcie4"] if bandwidth is None else bandwidth,)
        stored = self.on_disk(layout)
        if stored is not None and base != FULL:
            raise ExpertcastError("--codec is for experts as the model has them: leave it or --published out")
        copies_s = shape.top_k * (self.latency + whole / bandwidths[0])
        times = constant_times(shape.layers, self.layer_time or copies_s / COPY_OVER_COMPUTE)
        return [
            Machine(
                times=times, block_bytes=block_bytes, bandwidth=speed, latency=self.latency, base=base,
                write_back=self.write_back, stored=stored,
            )
            for speed in bandwidths
        ]  # fmt: skip


def cases_of(
    chosen: Sequence[Chosen], view: MoEView, options: MachineOptions, *, slots: Sequence[int],
    shares: Sequence[float], names: Mapping[str, str],
) -> list[Case]:  # fmt: skip
    """What is simulated: every choice at every number of slots on every machine.

    Args:
        chosen: policies and whose forecasts they get.
        view: the model's layers.
        options: link and computation.
        slots: as they were given; none: by `shares`.
        shares: of all experts; none: a published preset's own, or `CAPACITY`.
        names: by the word that asked for it, a predictor's name.
    """
    shape, policies = view.shape, [each.policies for each in chosen]
    plain = list(slots) or [slots_of(share, shape) for share in shares or (CAPACITY,)]
    machines = options.machines(view, policies)
    cases: list[tuple[int, int, int, Case]] = []
    for number, each in enumerate(chosen):
        own_slots, own_machines = plain, machines
        if each.published is not None:
            capacity, bandwidth, base = each.published
            own_slots = plain if slots or shares else [slots_of(capacity, shape)]
            own_machines = options.machines(view, policies, bandwidth=bandwidth, base=base)
        predictor = None if each.predictor is None else names[each.predictor]
        cases += [
            (i, j, number, Case(policies=each.policies, slots=count, machine=machine, predictor=predictor))
            for (i, count), (j, machine) in itertools.product(enumerate(own_slots), enumerate(own_machines))
        ]
    return [case for *_, case in sorted(cases, key=lambda entry: entry[:3])]
