"""What routed experts put out over a text, kept on disk: they run once, though the text is passed over twice.

One file for each batch: a digest of its tokens and their places, and a record for each layer: the output of the real
tokens, the sums of the experts' inner activations, how many rows each expert had, and a digest of these. What is not
there, or was changed, is not used: the experts run again.

T tokens, D hidden size, E routed experts, I inner width of an expert.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from expertcast.data import layout
from expertcast.data.means import inner_width, sums_of
from expertcast.data.window_batch import WindowBatch
from expertcast.predictors.artefacts import DigestingFile, digest
from expertcast.predictors.view import MoELayer, MoEView

_DIGEST = len(digest(b""))


@dataclass(slots=True)
class LayerOutput:
    """Of one layer and one batch."""

    output_TD: Tensor
    inner_EI: Tensor
    """fp32"""
    count_E: Tensor

    @classmethod
    def zero(cls, layer: MoELayer, like_TD: Tensor) -> LayerOutput:
        """For as many tokens as `like_TD` has, of its dtype and on its device."""
        inner_EI = torch.zeros(layer.num_experts, inner_width(layer), device=like_TD.device)
        return cls(torch.zeros_like(like_TD), inner_EI, inner_EI.new_zeros(layer.num_experts, dtype=torch.int64))

    def add_inner(self, inner_SI: Tensor, expert_G: Tensor, count_G: Tensor) -> None:
        """See :data:`expertcast.data.experts.Inner`."""
        self.inner_EI[expert_G] = sums_of(inner_SI, count_G)
        self.count_E[expert_G] = count_G

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of a record."""
        return self.output_TD, self.inner_EI, self.count_E


class Outputs(Protocol):
    """Answers for the routed experts in one forward, whose layers ask in their order."""

    def read(self, layer: MoELayer, hidden_TD: Tensor) -> LayerOutput | None:
        """What `layer` puts out for these tokens; None: its experts must run."""


class NoExperts:
    """Answers zero: for what is looked at besides the experts."""

    def read(self, layer: MoELayer, hidden_TD: Tensor) -> LayerOutput:
        return LayerOutput.zero(layer, hidden_TD)


class KeptOutputs:
    """The files of a text's batches, by their number.

    Args:
        folder: where they lie; made when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @staticmethod
    def nbytes(view: MoEView, tokens: int, batches: int, itemsize: int) -> int:
        """Of all files, for `tokens` in so many `batches` of a model whose numbers take `itemsize` bytes."""
        sums = sum(layer.num_experts * (4 * inner_width(layer) + 8) + _DIGEST for layer in view)
        return tokens * view.shape.layers * view.shape.hidden * itemsize + batches * (_DIGEST + sums)

    @contextmanager
    def writing(self, number: int, batch: WindowBatch) -> Iterator[BatchWriter]:
        """Write the file of a batch, which is there once it is whole."""
        path = self._path(number)
        path.parent.mkdir(exist_ok=True)
        partial = path.with_name(path.name + layout.PARTIAL)
        with partial.open("wb") as file:
            file.write(_identity(batch))
            yield BatchWriter(file)
        os.replace(partial, path)

    @contextmanager
    def reading(self, number: int, batch: WindowBatch) -> Iterator[BatchReader | None]:
        """What was kept of a batch; None where nothing was."""
        path = self._path(number)
        if not path.is_file():
            yield None
            return
        with path.open("rb") as file:
            yield BatchReader(file) if file.read(_DIGEST) == _identity(batch) else None

    def _path(self, number: int) -> Path:
        return self._folder / f"experts-{number:05d}.bin"


class BatchWriter:
    """Writes a batch's records, layer by layer."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, made: LayerOutput) -> None:
        """The next layer's."""
        record = DigestingFile(self._file)
        for tensor in made.tensors():
            record.write(tensor.contiguous().view(torch.uint8).reshape(-1).cpu().numpy().data)
        self._file.write(record.digest.encode())


class BatchReader:
    """Reads them back. Once a record is not as it was written, what follows is not read."""

    def __init__(self, file: BufferedReader) -> None:
        self._file: BufferedReader | None = file

    def read(self, layer: MoELayer, hidden_TD: Tensor) -> LayerOutput | None:
        if self._file is None:
            return None
        like = LayerOutput.zero(layer, torch.empty_like(hidden_TD, device="meta")).tensors()
        content = bytearray(sum(tensor.nbytes for tensor in like))
        self._file.readinto(content)
        if self._file.read(_DIGEST) != digest(memoryview(content)).encode():
            self._file = None
            return None
        found, start = [], 0
        for tensor in like:
            part = torch.frombuffer(content, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            found.append(part.view(tensor.shape).to(hidden_TD.device))
            start += tensor.nbytes
        return LayerOutput(*found)


def _identity(batch: WindowBatch) -> bytes:
    parts = (batch.token_T, batch.document_T, batch.position_T)
    return digest(torch.stack([part.long() for part in parts]).numpy().data).encode()
