"""What vLLM is asked for beside offloading: refused by one line, or arranged."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expertcast_vllm.settings import Settings
from expertcast_vllm.step import SPLIT_AT, check_config, check_slots
from vllm.config import CompilationConfig, CUDAGraphMode, ParallelConfig

from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape

HOST = Settings.from_dict({})
DEVICE = Settings.from_dict({"link": "kernel"})


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
        (lambda each: setattr(each.parallel_config, "data_parallel_size", 2), "--data-parallel-size.*one server for"),
        (lambda each: setattr(each, "lora_config", object()), "--enable-lora"),
        (lambda each: setattr(each.model_config, "enable_sleep_mode", True), "--enable-sleep-mode"),
    ],
)
def test_refused(change: Callable[[Any], None], words: str) -> None:
    asked = config()
    check_config(asked, HOST)
    change(asked)
    with pytest.raises(ExpertcastError, match=words) as caught:
        check_config(asked, HOST)
    assert "\n" not in str(caught.value)


WHOLE = [CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE]


@pytest.mark.parametrize("mode", WHOLE)
def test_whole_graphs_need_decisions_on_the_device(mode: CUDAGraphMode) -> None:
    check_config(config("cpu", mode), HOST)
    with pytest.raises(ExpertcastError, match=r"--enforce-eager.*\"link\": \"kernel\""):
        check_config(config("cuda", mode), HOST)
    check_config(config("cuda", mode), DEVICE)
    with pytest.raises(ExpertcastError, match="collect reads every step on the host"):
        check_config(config("cuda", mode), Settings.from_dict({"link": "kernel", "collect": "traces"}))


@pytest.mark.parametrize("settings", [HOST, DEVICE])
def test_graphs_of_parts_end_before_moe_layers(settings: Settings) -> None:
    asked = config("cuda", CUDAGraphMode.PIECEWISE)
    check_config(asked, settings)
    check_config(asked, settings)
    assert asked.compilation_config.splitting_ops == ["vllm::unified_attention", *SPLIT_AT]
    eager = config("cuda")
    check_config(eager, settings)
    assert eager.compilation_config.splitting_ops == ["vllm::unified_attention"]
    unsplit = config("cuda", CUDAGraphMode.PIECEWISE)
    unsplit.compilation_config.splitting_ops = []
    with pytest.raises(ExpertcastError, match="would capture the MoE layers of prompts"):
        check_config(unsplit, settings)


@pytest.mark.parametrize(("largest", "needed"), [(4, 32), (8, 64), (512, 64)])
def test_a_whole_graph_has_a_slot_for_whatever_its_step_may_name(largest: int, needed: int) -> None:
    shape = ModelShape(layers=2, experts=64, top_k=8, hidden=16)
    asked = config("cuda", CUDAGraphMode.FULL_AND_PIECEWISE)
    asked.compilation_config.max_cudagraph_capture_size = largest
    check_slots(asked, shape, needed)
    with pytest.raises(ExpertcastError, match=f"give {needed} slots, or .*capture-size {(needed - 1) // 8}"):
        check_slots(asked, shape, needed - 1)
    asked.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    check_slots(asked, shape, 8)
