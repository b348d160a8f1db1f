"""What a file of coded experts says of itself: a safetensors header over the experts' parts and their index.

As of the file of plain blocks (:mod:`expertcast.runtime.storage.store_header`), a header has one form only: it is made
anew from its values when it is read, and compared.

N experts of all layers, P parts of each.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from expertcast.predictors.artefacts import CLOSED, digest
from expertcast.runtime.storage.direct_read import sectors
from expertcast.runtime.storage.store_header import StoreFormat, begin_of, check_whole

_FORMAT = "expertcast-coded-1"
_OURS = f'{{"__metadata__": {{"format": "{_FORMAT}", '.encode()
_MOST = 10**15
"""Bytes: no file is larger, and the header has room for the number."""
WORD = 8
"""Bytes of a number in the index."""


class _Metadata(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    format: Literal["expertcast-coded-1"]
    fingerprint: Annotated[str, Field(max_length=10_000)]
    model_id: Annotated[str, Field(max_length=10_000)]
    layout: Annotated[str, Field(max_length=1_000_000)]
    codec: Annotated[str, Field(max_length=1_000)]
    layers: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}$")]
    experts: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}$")]
    block_bytes: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,11}$")]
    parts: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}$")]
    index: Annotated[str, Field(max_length=100)]
    header: str


class _Parts(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    dtype: Literal["U8"]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=_MOST)]], Field(min_length=1, max_length=1)]
    data_offsets: list[int]


_Entries = TypedDict("_Entries", {"__metadata__": _Metadata, "parts": _Parts})
"""The index follows from these."""
_Entries.__pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedHeader:
    """All that a header says."""

    form: StoreFormat
    codec: str
    """As :attr:`expertcast.runtime.storage.codecs.Codec.text` says it."""
    parts: int
    """P"""
    nbytes: int = _MOST
    """Of all experts' parts, padding included."""
    index: str = ""
    """Digest of the index."""

    @property
    def count(self) -> int:
        """N"""
        return self.form.layers * self.form.experts

    @property
    def index_nbytes(self) -> int:
        """Bytes of the index: of each part its first byte in the file, its bytes and its digest."""
        return 3 * WORD * self.count * self.parts

    @property
    def room(self) -> int:
        """Bytes of the header, whatever `nbytes` and `index` are: the first part follows."""
        largest = CodedHeader(form=self.form, codec=self.codec, parts=self.parts, index="f" * 100)
        return sectors(8 + len(largest._text()))

    def encoded(self) -> bytes:
        """Length and JSON, padded with spaces to its room."""
        size = self.room - 8
        return size.to_bytes(8, "little") + self._text().ljust(size)

    def _text(self) -> bytes:
        form = self.form
        metadata = {
            "format": _FORMAT, "fingerprint": form.fingerprint, "model_id": form.model_id, "layout": form.layout,
            "codec": self.codec, "layers": str(form.layers), "experts": str(form.experts),
            "block_bytes": str(form.block_bytes), "parts": str(self.parts), "index": self.index,
        }  # fmt: skip
        entries: dict[str, object] = {"__metadata__": metadata}
        entries["parts"] = {"dtype": "U8", "shape": [self.nbytes], "data_offsets": [0, self.nbytes]}
        start, size = self.nbytes, self.index_nbytes // 3
        for name, dtype in (("offsets", "I64"), ("nbytes", "I64"), ("digests", "U64")):
            shape = [self.count, self.parts]
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
            start += size
        metadata["header"] = digest(json.dumps(entries).encode())
        return json.dumps(entries).encode()


def read_coded_header(path: Path) -> CodedHeader:
    """The header of a file, and that the file is as long as it says.

    Raises:
        ExpertcastError: the file is not ours, or cannot be read.
        StaleFileError: it is damaged; the text says how.
    """
    begin, entries = begin_of(path, _OURS, _Entries)
    said = entries["__metadata__"]
    form = StoreFormat(
        layers=int(said["layers"]), experts=int(said["experts"]), block_bytes=int(said["block_bytes"]),
        layout=said["layout"], model_id=said["model_id"], fingerprint=said["fingerprint"],
    )  # fmt: skip
    header = CodedHeader(
        form=form, codec=said["codec"], parts=int(said["parts"]), nbytes=entries["parts"]["shape"][0],
        index=said["index"],
    )  # fmt: skip
    check_whole(path, begin, header.encoded(), header.room + header.nbytes + header.index_nbytes)
    return header
