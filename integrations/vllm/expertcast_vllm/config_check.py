"""What vLLM must not be asked to do beside offloading."""

from __future__ import annotations

from vllm.config import CUDAGraphMode, VllmConfig

from expertcast.predictors.errors import ExpertcastError

SPLIT_AT = ("vllm::moe_forward", "vllm::moe_forward_shared")
"""Operators that hold vLLM's MoE layers: what CUDA graphs must leave out."""


def check_config(config: VllmConfig) -> None:
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
    for option, given in refused.items():
        if given:
            raise ExpertcastError(f"expertcast keeps experts in slots, which {option} does not go with: leave it out")
    if config.device_config.device.type == "cuda":
        _leave_out_of_graphs(config)


def _leave_out_of_graphs(config: VllmConfig) -> None:
    """A captured graph would run the host's part of a step once and for all: graphs end before the MoE layers."""
    compilation = config.compilation_config
    if compilation.cudagraph_mode == CUDAGraphMode.NONE:
        return
    if compilation.cudagraph_mode != CUDAGraphMode.PIECEWISE or not compilation.splitting_ops:
        raise ExpertcastError(
            "expertcast decides on the host which experts are copied, outside CUDA graphs: start vLLM with "
            '--enforce-eager, or with --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\''
        )
    compilation.splitting_ops.extend(name for name in SPLIT_AT if name not in compilation.splitting_ops)
