"""What vLLM must not be asked to do beside offloading."""

from __future__ import annotations

from vllm.config import CUDAGraphMode, VllmConfig

from expertcast.predictors.errors import ExpertcastError

SPLIT_AT = ("vllm::moe_forward", "vllm::moe_forward_shared")
"""Operators that hold vLLM's MoE layers: what CUDA graphs must leave out."""


def check_config(config: VllmConfig) -> None:
    """Refuse what offloaded layers cannot do.

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
        _check_graphs(config)


def _check_graphs(config: VllmConfig) -> None:
    """A captured graph would run the host's part of a step once and for all."""
    compilation = config.compilation_config
    if compilation.cudagraph_mode == CUDAGraphMode.NONE:
        return
    split = set(SPLIT_AT) <= set(compilation.splitting_ops or ())
    if compilation.cudagraph_mode != CUDAGraphMode.PIECEWISE or not split:
        raise ExpertcastError(
            "expertcast decides on the host which experts are copied, outside CUDA graphs: start vLLM with "
            "--enforce-eager, or with cudagraph_mode PIECEWISE and splitting_ops that name "
            f"{' and '.join(SPLIT_AT)} beside the attention's"
        )
