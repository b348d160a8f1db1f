"""Weights of a checkpoint as bitsandbytes ships them, read as the ones that they stand for.

    4 bits  x [N/2 bytes], x.absmax [N/B], x.quant_map [16], x.quant_state.bitsandbytes__nf4 (JSON: shape, B, dtype)
            nested: x.absmax are bytes, x.nested_quant_map [256], x.nested_absmax [N/B/256]
    8 bits  x.weight int8 [R, C], x.SCB [R]

N numbers in blocks of B, two codes a byte, the first one in the high bits. R rows and C columns. Source: bitsandbytes'
`functional.dequantize_4bit` and `int8_vectorwise_dequant` (their CPU kernels), to whose bits this computes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from expertcast.data.weights.files import Part, TensorFile
from expertcast.data.weights.packed import PackedTensor
from expertcast.predictors.errors import ExpertcastError

_STATE = ".quant_state.bitsandbytes__"
_OF_127 = 7.874015718698502e-3
"""1 / 127, as bitsandbytes writes it."""


class FourBits:
    """A weight in 4 bits, computed when it is read.

    Args:
        parts: the tensors by what follows the weight's name: ``, `absmax`, `quant_map`, `state`, ...
    """

    def __init__(self, parts: Mapping[str, TensorFile]) -> None:
        self._parts = parts

    @cached_property
    def _state(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(bytes(self._parts["state"][...].tolist()))
        return read

    def get_shape(self) -> list[int]:
        """Of the weight."""
        return list(self._state["shape"])

    def get_dtype(self) -> str:
        """As safetensors names it."""
        return {"bfloat16": "BF16", "float16": "F16"}.get(self._state["dtype"], "F32")

    def __getitem__(self, part: Part) -> Tensor:
        shape, each = self.get_shape(), int(self._state["blocksize"])
        count = math.prod(shape)
        octets = self._parts[""][...].reshape(-1).view(torch.uint8)
        codes = torch.stack((octets >> 4, octets & 15), -1).flatten()[:count]
        largest = self._parts["absmax"][...].reshape(-1)
        if "nested_absmax" in self._parts:
            outer = self._parts["nested_absmax"][...].repeat_interleave(int(self._state["nested_blocksize"]))
            factors = self._parts["nested_quant_map"][...][largest.long()] * outer[: len(largest)]
            largest = factors + float(self._state["nested_offset"])
        made = self._parts["quant_map"][...][codes.int()].mul_(largest.float().repeat_interleave(each)[:count])
        whole = made.view(shape).to(getattr(torch, self._state["dtype"]))
        return whole if part is ... else whole[part]


def join_bnb(tensors: Mapping[str, TensorFile]) -> dict[str, TensorFile]:
    """A checkpoint's tensors by name, where each weight in 4 or 8 bits is one.

    Raises:
        ExpertcastError: one lacks its tables or scales.
    """
    joined, used = dict(tensors), set[str]()
    for name, tensor in tensors.items():
        if _STATE in name:
            weight = name.partition(_STATE)[0]
            needed = {"": weight, **{key: f"{weight}.{key}" for key in ("absmax", "quant_map")}, "state": name}
            nested = {key: f"{weight}.{key}" for key in ("nested_absmax", "nested_quant_map")}
            if missing := [each for each in needed.values() if each not in tensors]:
                raise ExpertcastError(f"the checkpoint has no {missing[0]}: it is incomplete")
            found = {**needed, **{key: each for key, each in nested.items() if each in tensors}}
            joined[weight] = FourBits({key: tensors[each] for key, each in found.items()})
            used |= set(found.values()) - {weight}
        elif name.endswith(".weight") and tensor.get_dtype() == "I8":
            stem = name.removesuffix(".weight")
            if (scales := tensors.get(f"{stem}.SCB")) is None:
                raise ExpertcastError(f"the checkpoint has no {stem}.SCB: it is incomplete")
            joined[name] = _eight_bits(tensor, scales)
            used |= {f"{stem}.SCB", f"{stem}.weight_format"}
    return {name: tensor for name, tensor in joined.items() if name not in used}


def _eight_bits(codes: TensorFile, scales: TensorFile) -> PackedTensor:
    def make() -> Tensor:
        return codes[...].float().mul_(scales[...].float().view(-1, 1)).mul_(_OF_127)

    return PackedTensor(codes.get_shape(), "F32", make)
