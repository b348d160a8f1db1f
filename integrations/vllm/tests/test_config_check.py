"""What vLLM is asked for beside offloading: refused by one line, or arranged."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expertcast_vllm.config_check import SPLIT_AT, check_config
from vllm.config import CompilationConfig, CUDAGraphMode, ParallelConfig

from expertcast.predictors.errors import ExpertcastError


def config(device: str = "cpu", mode: CUDAGraphMode = CUDAGraphMode.NONE, **others: Any) -> Any:
    compilation = CompilationConfig(cudagraph_mode=mode, splitting_ops=["vllm::unified_attention"])
    given = {
        "parallel_config": ParallelConfig(), "lora_config": None, "compilation_config": compilation,
        "model_config": SimpleNamespace(enable_sleep_mode=False),
        "device_config": SimpleNamespace(device=torch.device(device)),
    }  # fmt: skip
    return SimpleNamespace(**{**given, **others})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda each: setattr(each.parallel_config, "enable_expert_parallel", True), "--enable-expert-parallel"),
        (lambda each: setattr(each.parallel_config, "enable_eplb", True), "--enable-eplb"),
        (lambda each: setattr(each, "lora_config", object()), "--enable-lora"),
        (lambda each: setattr(each.model_config, "enable_sleep_mode", True), "--enable-sleep-mode"),
    ],
)
def test_refused(change: Callable[[Any], None], words: str) -> None:
    asked = config()
    check_config(asked)
    change(asked)
    with pytest.raises(ExpertcastError, match=words) as caught:
        check_config(asked)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_whole_graphs_are_refused_on_cuda(mode: CUDAGraphMode) -> None:
    check_config(config("cpu", mode))
    with pytest.raises(ExpertcastError, match="--enforce-eager"):
        check_config(config("cuda", mode))


def test_graphs_end_before_moe_layers() -> None:
    asked = config("cuda", CUDAGraphMode.PIECEWISE)
    check_config(asked)
    check_config(asked)
    assert asked.compilation_config.splitting_ops == ["vllm::unified_attention", *SPLIT_AT]
    eager = config("cuda")
    check_config(eager)
    assert eager.compilation_config.splitting_ops == ["vllm::unified_attention"]
