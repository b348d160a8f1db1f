"""What `expertcast simulate` takes of a disk that experts lie on, in place of a link to memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from expertcast.commands.options import Count, Option, positive_number
from expertcast.predictors import ExpertcastError
from expertcast.runtime.links.virtual_disk import Stored
from expertcast.runtime.option_values import pool_bytes
from expertcast.runtime.storage.codecs import check_codec, make_codec
from expertcast.runtime.storage.layout import BlockLayout

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
        """How experts of this layout lie there; None: they do not.

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
