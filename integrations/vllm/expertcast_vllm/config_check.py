"""What vLLM must not be asked to do beside offloading."""

from __future__ import annotations

from vllm.config import CUDAGraphMode, VllmConfig

from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape
from expertcast_vllm.settings import Settings

SPLIT_AT = ("vllm::moe_forward", "vllm::moe_forward_shared")
"""Operators that hold vLLM's MoE layers: what CUDA graphs must leave out."""


def check_config(config: VllmConfig, settings: Settings) -> None:
    """Refuse what offloaded layers cannot do, and take them out of CUDA graphs.

    Raises:
        ExpertcastError: one line about the first such option.
    """
    parallel, model = config.parallel_config, config.model_config
    refused = {
        "--enable-expert-parallel": parallel.enable_expert_parallel,
        "--enable-eplb": parallel.enable_eplb,
        "--enable-dbo": parallel.use_ubatching,
        "--enable-lora": config.lora_config is not None,
        "--enable-sleep-mode": model.enable_sleep_mode,
    }
    gathered = {
        "--data-parallel-size": parallel.data_parallel_size > 1,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size > 1,
    }
    for option, given in gathered.items():
        if given:
            raise ExpertcastError(
                f"with {option} vLLM's MoE layers run tokens of all processes together, which is not supported: start "
                "one server for each device in place of it"
            )
    for option, given in refused.items():
        if given:
            raise ExpertcastError(f"expertcast keeps experts in slots, which {option} does not go with: leave it out")
    if config.device_config.device.type == "cuda":
        _check_graphs(config, settings)


def captures_whole_steps(config: VllmConfig) -> bool:
    """Whether vLLM makes CUDA graphs of whole steps: inside, no host decides."""
    mode = config.compilation_config.cudagraph_mode
    return config.device_config.device.type == "cuda" and mode is not None and mode.has_full_cudagraphs()


def _check_graphs(config: VllmConfig, settings: Settings) -> None:
    """A captured graph would run the host's part of a step once and for all: graphs end before the MoE layers, or the
    device decides what is copied."""
    compilation = config.compilation_config
    mode = compilation.cudagraph_mode
    if mode is None or mode == CUDAGraphMode.NONE:
        return
    whole = captures_whole_steps(config)
    if whole and settings.offload.link != "kernel":
        raise ExpertcastError(
            "expertcast decides on the host which experts are copied, outside CUDA graphs: start vLLM with "
            '--enforce-eager, with --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', or give expertcast the '
            'option "link": "kernel", which decides on the device'
        )
    if whole and settings.collect is not None:
        raise ExpertcastError(
            "collect reads every step on the host, which whole CUDA graphs leave out: start vLLM with --enforce-eager"
        )
    if not mode.has_piecewise_cudagraphs():
        return
    if not compilation.splitting_ops:
        raise ExpertcastError(
            f"cudagraph_mode {mode.name} without splitting_ops would capture the MoE layers of prompts: leave "
            "splitting_ops out of --compilation-config, or start vLLM with --enforce-eager"
        )
    compilation.splitting_ops.extend(name for name in SPLIT_AT if name not in compilation.splitting_ops)


def check_slots(config: VllmConfig, shape: ModelShape, slots: int) -> None:
    """Refuse fewer slots than the largest step needs that becomes a whole graph: nobody could run it in groups.

    Args:
        config: vLLM's.
        shape: of the model.
        slots: of the worker.

    Raises:
        ExpertcastError: one line with what would do.
    """
    if not captures_whole_steps(config):
        return
    largest = config.compilation_config.max_cudagraph_capture_size or 0
    needed = min(largest * shape.top_k, shape.experts)
    if slots < needed:
        fit = slots // shape.top_k
        raise ExpertcastError(
            f"slots={slots} is fewer than the {needed} experts that a layer may need in a CUDA graph of {largest} "
            f"tokens: give {needed} slots, or start vLLM with --max-cudagraph-capture-size {fit}"
        )
