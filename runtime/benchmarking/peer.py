"""The peer: the same model under accelerate's own CPU offload, what a transformers user would otherwise take.

accelerate moves whole modules: all experts of a layer for every token, whichever of them are routed to. Its hooks load
a module's weights before its forward and drop them after it; what fits the memory stays on the device (`device_map`).
"""

from __future__ import annotations

import logging
import statistics

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.discovery import experts_implementation
from expertcast.predictors.plain import Json
from expertcast.runtime.benchmarking.decoding import Decoding, decode_greedily, same_logits
from expertcast.runtime.benchmarking.shapes import weight_bytes
from expertcast.runtime.engine.kernels import kernel_name

ON_CPU = (
    "the model computes on the CPU, where its weights are: accelerate moves nothing here, so its time shows what its "
    "hooks cost and not what its copies cost; moved_bytes is what it would move per token, and least_tpot_s those "
    "bytes over the emulated link (calculated, not measured)"
)


def measure_peer(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    *,
    memory: int,
    new_tokens: int = 4,
    bandwidth: float | None = None,
    truth: Decoding | None = None,
) -> Json:
    """Decode under accelerate's offload, which starts from a model on the CPU; it is left there, without hooks.

    Args:
        model: a model that is not offloaded.
        prompt_ids: [1, T] on the model's device, where the computation stays.
        memory: bytes of the device that weights may take: what the offloaded runs take.
        new_tokens: how many are decoded.
        bandwidth: of the emulated link, bytes per second, for `least_tpot_s` on the CPU.
        truth: the first tokens of what it must decode.

    Returns:
        `tpot_s`, `ttft_s`, `moved_bytes` per token, `identical`, `note`.
    """
    device = prompt_ids.device
    model.to("cpu")
    try:
        device_map = _device_map(model, memory)
        moved = _offloaded_bytes(model, device_map)
        _dispatch(model, device_map, device)
        with experts_implementation(model, kernel_name(model)):
            decode_greedily(model, prompt_ids[:, :8], 2)  # warm-up
            decoding = decode_greedily(model, prompt_ids, new_tokens)
    finally:
        _restore(model)
    tpot_s = statistics.median(decoding.steps_s)
    on_cpu = device.type == "cpu"
    return {
        "tpot_s": tpot_s,
        "ttft_s": decoding.ttft_s,
        "new_tokens": new_tokens,
        "moved_bytes": moved,
        "least_tpot_s": moved / bandwidth if on_cpu and bandwidth else None,
        "identical": None if truth is None else same_logits(decoding, truth),
        "note": ON_CPU if on_cpu else "measured",
    }


def _device_map(model: PreTrainedModel, memory: int) -> dict[str, int | str]:
    """Module name to 0 (the device) or "cpu": as much as the memory holds stays on the device."""
    from accelerate import infer_auto_device_map

    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it says that a CPU is no device 0
    found: dict[str, int | str] = infer_auto_device_map(
        model, max_memory={0: memory, "cpu": 2 * weight_bytes(model)}, no_split_module_classes=model._no_split_modules
    )
    return found


def _offloaded_bytes(model: PreTrainedModel, device_map: dict[str, int | str]) -> int:
    """Bytes of the weights that are not on the device: each forward moves them all."""
    away = [name for name, where in device_map.items() if where == "cpu"]
    return sum(
        parameter.numel() * parameter.dtype.itemsize
        for name, parameter in model.named_parameters()
        if any(not module or name.startswith(module + ".") for module in away)
    )


def _dispatch(model: PreTrainedModel, device_map: dict[str, int | str], device: torch.device) -> None:
    from accelerate import cpu_offload, dispatch_model

    if device.type == "cpu":
        cpu_offload(model, execution_device=device)
        return
    places = {name: device if where == 0 else where for name, where in device_map.items()}
    dispatch_model(model, places, main_device=device, force_hooks=True)


def _restore(model: PreTrainedModel) -> None:
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)
    model.__dict__.pop("hf_device_map", None)
    for name in ("to", "cuda"):  # dispatch_model puts warnings in their place
        model.__dict__.pop(name, None)
    model.to("cpu")
