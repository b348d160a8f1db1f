"""What a disk store's file says of itself: a safetensors header with one tensor of blocks per MoE layer.

A header has one form only. Reading takes its few values by a schema, makes the header anew from them, and compares
the bytes: whatever else is changed, moved or added in it is noticed, a digit of a checksum by the digest `header`.

L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NotRequired, TypeVar

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from expertcast.predictors.artefacts import CLOSED, digest, open_file, parse_json
from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.storage.layout import BlockLayout

T = TypeVar("T")

REMEDY = "remove it or give another store_folder"
_FORMAT = "expertcast-store-1"
_OURS = f'{{"__metadata__": {{"format": "{_FORMAT}", '.encode()
_PAGE = 4096
_MOST_LAYERS = 10_000
_MOST_HEADER = 1 << 22
"""Bytes: more than so many layers take."""


class StaleFileError(Exception):
    """The file is ours, but not of these weights, incomplete or damaged: it must be made again."""


class _Metadata(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    format: Literal["expertcast-store-1"]
    fingerprint: Annotated[str, Field(max_length=10_000)]
    model_id: Annotated[str, Field(max_length=10_000)]
    layout: Annotated[str, Field(max_length=1_000_000)]
    checksums: Annotated[str, Field(pattern=r"^[0-9a-f]{8}( [0-9a-f]{8})*$", max_length=9 * _MOST_LAYERS)]
    changed: Annotated[str, Field(pattern=r"^[0-9]{12}$")]
    header: NotRequired[str]


class _Blocks(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    dtype: Literal["U8"]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=1 << 40)]], Field(min_length=2, max_length=2)]
    data_offsets: list[int]


_Entries = TypedDict("_Entries", {"__metadata__": _Metadata, "layer.0": _Blocks})
"""The other layers follow from these."""
_Entries.__pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFormat:
    """What blocks a file holds, and of what; equal where the blocks are."""

    layers: int
    experts: int
    block_bytes: int
    layout: str
    """A block's fields, as :func:`layout_text` says them."""
    model_id: str = field(compare=False)
    fingerprint: str
    """Of the weights' origin."""

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer's blocks."""
        return self.experts * self.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHeader:
    """All that a header says."""

    form: StoreFormat
    checksums: list[int]
    """CRC-32 per layer."""
    changed: int
    """Seconds since 1970: the file's time of change, as long as nobody changes it."""
    sealed: bool = True
    """Whether it holds its own digest, which older files lack."""

    def encoded(self) -> bytes:
        """Length and JSON, padded with spaces to whole pages; the same length whatever the checksums are."""
        form = self.form
        metadata = {
            "format": _FORMAT,
            "fingerprint": form.fingerprint,
            "model_id": form.model_id,
            "layout": form.layout,
            "checksums": " ".join(f"{checksum:08x}" for checksum in self.checksums),
            "changed": f"{self.changed:012d}",
        }
        entries: dict[str, object] = {"__metadata__": metadata}
        for layer in range(form.layers):
            start = layer * form.layer_nbytes
            shape = [form.experts, form.block_bytes]
            offsets = [start, start + form.layer_nbytes]
            entries[f"layer.{layer}"] = {"dtype": "U8", "shape": shape, "data_offsets": offsets}
        if self.sealed:
            metadata["header"] = digest(json.dumps(entries).encode())
        text = json.dumps(entries).encode()
        size = -(-(8 + len(text)) // _PAGE) * _PAGE - 8
        return size.to_bytes(8, "little") + text.ljust(size)


def layout_text(layout: BlockLayout) -> str:
    """A block's fields, for the header."""
    return json.dumps([asdict(entry) | {"dtype": str(entry.dtype)} for entry in layout.fields])


def read_header(path: Path) -> StoreHeader:
    """The header of a file, and that the file is as long as it says.

    Raises:
        ExpertcastError: the file is not ours, or cannot be read.
        StaleFileError: it is damaged; the text says how.
    """
    begin, entries = begin_of(path, _OURS, _Entries)
    header = _from_entries(entries)
    encoded = header.encoded()
    check_whole(path, begin, encoded, len(encoded) + header.form.layers * header.form.layer_nbytes)
    return header


def begin_of(path: Path, ours: bytes, schema: type[T]) -> tuple[bytes, T]:
    """The first bytes of a file, as many as a header may take, and the header's entries in them.

    Args:
        path: of the file.
        ours: what the header of such a file begins with.
        schema: of its entries.

    Raises:
        ExpertcastError: the file is not ours, or cannot be read.
        StaleFileError: its header is damaged.
    """
    begin = _begin(path)
    if not begin[8:].startswith(ours):
        raise ExpertcastError(f"{str(path)!r} was not written by expertcast or is damaged: {REMEDY}")
    try:
        return begin, parse_json(begin[8 : 8 + int.from_bytes(begin[:8], "little")], schema, "header", REMEDY)
    except ExpertcastError:
        raise StaleFileError("its header is damaged") from None


def check_whole(path: Path, begin: bytes, encoded: bytes, size: int) -> None:
    """That a file begins with its header as it was `encoded` anew, and has `size` bytes.

    Raises:
        StaleFileError: it does not.
    """
    if not begin.startswith(encoded):
        raise StaleFileError("its header is damaged")
    found = path.stat().st_size
    if found != size:
        raise StaleFileError(f"it has {found} bytes instead of {size}")


def _begin(path: Path) -> bytes:
    """As much as a header may take."""
    try:
        with open_file(path) as file:
            return file.read(_MOST_HEADER)
    except OSError as error:
        raise ExpertcastError(f"cannot read {str(path)!r}: {error.strerror}; {REMEDY}") from error


def _from_entries(entries: _Entries) -> StoreHeader:
    metadata, (experts, block_bytes) = entries["__metadata__"], entries["layer.0"]["shape"]
    checksums = [int(word, 16) for word in metadata["checksums"].split()]
    form = StoreFormat(
        layers=len(checksums), experts=experts, block_bytes=block_bytes, layout=metadata["layout"],
        model_id=metadata["model_id"], fingerprint=metadata["fingerprint"],
    )  # fmt: skip
    return StoreHeader(form=form, checksums=checksums, changed=int(metadata["changed"]), sealed="header" in metadata)
