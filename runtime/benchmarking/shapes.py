"""Shapes: models of published sizes with random weights, for measuring time where no checkpoint is at hand."""

from __future__ import annotations

import sys

import torch
from transformers import PreTrainedModel

from expertcast.data.models import meta_model, torch_dtype
from expertcast.predictors import ExpertcastError
from expertcast.runtime.benchmarking.random_weights import random_model, weight_bytes
from expertcast.runtime.benchmarking.shape_configs import SHAPES as SHAPES
from expertcast.runtime.storage.host_memory import available_memory


def build_shape(
    name: str,
    *,
    layers: int | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> PreTrainedModel:
    """A causal LM of a shape with random weights, in eval mode.

    Args:
        name: one of `SHAPES`.
        layers: MoE layers to keep; None for all. Dense layers before the first MoE layer come on top.
        dtype: `auto` (bf16), `bf16`, `fp16`, `fp32` or a torch dtype.
        device: where the weights are made.
        seed: the same gives the same weights.

    Raises:
        ExpertcastError: unknown shape or dtype, no such layers, or not enough free memory on the device.
    """
    checked = check_shape(name, layers=layers, dtype=dtype, device=device)
    model = random_model(SHAPES[name].config(layers), dtype=checked, device=device, seed=seed)
    model.config._name_or_path = name if layers is None else f"{name}, {layers} layers"
    return model


def check_shape(
    name: str, *, layers: int | None = None, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu"
) -> torch.dtype:
    """Whether :func:`build_shape` can build this; returns the dtype.

    Args:
        name: as for :func:`build_shape`.
        layers: as for :func:`build_shape`.
        dtype: as for :func:`build_shape`.
        device: as for :func:`build_shape`.

    Raises:
        ExpertcastError: as :func:`build_shape`.
    """
    if name not in SHAPES:
        raise ExpertcastError(f"unknown shape {name!r}: choose from {', '.join(SHAPES)}")
    most = SHAPES[name].layers
    if layers is not None and not 1 <= layers <= most:
        raise ExpertcastError(f"--layers {layers}: {name} has 1 to {most} MoE layers")
    wanted = dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype) or torch.bfloat16
    check_memory(name, layers or most, wanted, torch.device(device))
    return wanted


def check_memory(name: str, layers: int, dtype: torch.dtype, device: torch.device, free: int | None = None) -> None:
    """Refuse a shape that the device has no room for, before anything is allocated.

    Args:
        name: one of `SHAPES`.
        layers: MoE layers that are kept.
        dtype: of the weights.
        device: where they are made.
        free: bytes; what the device says when None.

    Raises:
        ExpertcastError: with the number of layers that would fit.
    """
    shape = SHAPES[name]
    free = free_memory(device) if free is None else free
    one, two = (weight_bytes(meta_model(shape.config(count), dtype)) for count in (1, 2))
    per_layer, rest = two - one, 2 * one - two
    # one more layer: while experts are packed, one layer exists twice
    needed = rest + (layers + 1) * per_layer
    if needed <= free:
        return
    fit = (free - rest) // per_layer - 1
    remedy = f"give --layers {fit} or fewer" if fit >= 1 else "take a smaller shape; not even --layers 1 fits"
    raise ExpertcastError(
        f"{name} with {layers} layers needs {needed / 1e9:.1f} GB of {device.type} memory, "
        f"{free / 1e9:.1f} GB are free: {remedy}"
    )


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = available_memory()
    return sys.maxsize if free is None else free
