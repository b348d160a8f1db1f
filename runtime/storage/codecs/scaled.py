"""What codecs of quantised checkpoints share: matrices as codes and scales, other parameters as they are.

plane    [ codes | scales | codes | scales | biases ... ]      each at a multiple of 256 bytes
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from expertcast.runtime.storage.codecs.base import Codec, CodecConfig, Part, Plane, Shard, shards_of
from expertcast.runtime.storage.layout import BlockLayout, Field, aligned_bytes

_CODES, _SCALES = ".codes", ".scales"
Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of codes or of scales in the store."""


class Scaled(Codec):
    """One part that holds what the checkpoint ships; the block is what transformers dequantises it to, bit for bit.

    Padding between a block's parameters is not kept.
    """

    def __init__(self, config: CodecConfig, layout: BlockLayout) -> None:
        super().__init__(config, layout)
        self._coded = tuple(field for field in layout.fields if len(field.shape) > 1)
        if not self._coded:
            raise self._refuse("none of their parameters is a matrix")
        places: list[Field] = []
        offset = 0
        for field in layout.fields:
            forms: dict[str, Form] = {field.name: (field.shape, field.dtype)}
            if field in self._coded:
                if len(field.shape) > 2 or not field.dtype.is_floating_point:
                    raise self._refuse(f"{field.name!r} is no matrix of floats")
                codes, scales = self._forms(field)
                forms = {field.name + _CODES: codes, field.name + _SCALES: scales}
            for name, (shape, dtype) in forms.items():
                places.append(Field(name=name, shape=shape, dtype=dtype, offset=offset))
                offset = aligned_bytes(offset + places[-1].nbytes)
        self.packed = BlockLayout(fields=tuple(places), block_bytes=offset)
        """How the plane lies."""
        self.planes = (Plane(name="shipped", nbytes=offset),)
        self.shards = shards_of(self.planes)

    @abstractmethod
    def _forms(self, field: Field) -> tuple[Form, Form]:
        """Of the codes and of the scales of a matrix; raises where it cannot be held."""

    @abstractmethod
    def _stored(self, field: Field, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales in the store's form from those of the checkpoint; raises where they cannot be held."""

    @abstractmethod
    def _multiply(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the matrix [rows, columns] that codes and scales in the store's form stand for."""

    def encode_shipped(
        self, shipped: Mapping[str, tuple[Tensor, Tensor]], kept: Mapping[str, Tensor]
    ) -> tuple[Part, ...]:
        """The parts of an expert as its checkpoint ships it.

        Args:
            shipped: codes and scales of each matrix, by the parameter's name, without the expert dimension.
            kept: the other parameters.

        Raises:
            ExpertcastError: a parameter is missing, of another shape, or cannot be held.
        """
        plane = torch.zeros(self.packed.block_bytes, dtype=torch.uint8)
        views = self.packed.views(plane)
        for field in self.layout.fields:
            if field.name not in (shipped if field in self._coded else kept):
                raise self._refuse(f"{field.name!r} is not given", "give it")
            if field in self._coded:
                codes, scales = self._stored(field, *shipped[field.name])
                self._put(views, field, codes, scales)
            else:
                views[field.name][0].copy_(kept[field.name])
        return self._parts((plane,))

    def recover(self, planes: Sequence[Tensor], block: Tensor, shard: Shard | None = None) -> None:
        packed, full = self.packed.views(planes[0]), self.layout.views(block)
        for field in self.layout.fields:
            target = full[field.name][0]
            if field in self._coded:
                self._multiply(packed[field.name + _CODES][0], packed[field.name + _SCALES][0], target)
            else:
                target.copy_(packed[field.name][0])

    def _put(self, views: Mapping[str, Tensor], field: Field, codes: Tensor, scales: Tensor) -> None:
        views[field.name + _CODES][0].copy_(codes)
        views[field.name + _SCALES][0].copy_(scales)
