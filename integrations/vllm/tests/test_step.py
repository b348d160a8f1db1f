"""The running step, groups of tokens whose experts fit, and checks of vLLM's options."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expertcast_vllm.step import SPLIT_AT, Step, check_config, groups, running_step
from vllm.config import CompilationConfig, CUDAGraphMode, ParallelConfig
from vllm.forward_context import ForwardContext, override_forward_context

from expertcast.predictors.messages import ExpertcastError


def during(metadata: dict[str, Any] | None) -> Any:
    context = ForwardContext(no_compile_layers={}, attn_metadata=metadata, slot_mapping={})  # type: ignore[arg-type]
    return override_forward_context(context)


def flash(starts: list[int], longest: int) -> Any:
    return SimpleNamespace(
        num_actual_tokens=starts[-1], query_start_loc=torch.tensor(starts), max_query_len=longest
    )  # fmt: skip


def flash_infer(decodes: int, prefills: int, tokens: int) -> Any:
    return SimpleNamespace(
        num_actual_tokens=decodes + tokens, num_decodes=decodes, num_decode_tokens=decodes, num_prefills=prefills
    )  # fmt: skip


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (flash([0, 1, 2, 3], 1), Step(tokens=3, requests=3, decodes=True)),
        (flash([0, 1, 6], 5), Step(tokens=6, requests=2, decodes=False)),
        (flash_infer(3, 0, 0), Step(tokens=3, requests=3, decodes=True)),
        (flash_infer(1, 1, 5), Step(tokens=6, requests=2, decodes=False)),
    ],
)
def test_what_backends_say(metadata: Any, expected: Step) -> None:
    with during({"layer": metadata}):
        assert running_step() == expected
    silent = SimpleNamespace(num_actual_tokens=0, query_start_loc=None)
    with during({"convolution": silent, "layer": metadata}):
        assert running_step() == expected


def test_trial_runs_are_over_nobodys_tokens() -> None:
    assert running_step() is None
    with during(None):
        assert running_step() is None


def test_a_backend_that_says_nothing_is_refused() -> None:
    with during({"layer": SimpleNamespace(block_table=1)}), pytest.raises(ExpertcastError, match="SimpleNamespace"):
        running_step()


def test_each_token_is_in_one_group_whose_experts_fit() -> None:
    generator = torch.Generator().manual_seed(0)
    for limit in (4, 5, 9, 31):
        ids_TK = torch.rand(200, 32, generator=generator).topk(4, dim=1).indices
        parts = list(groups(ids_TK, 32, limit))
        assert torch.cat(parts).sort().values.tolist() == list(range(200))
        assert all(len(ids_TK[rows].unique()) <= limit for rows in parts)


def test_tokens_that_share_experts_share_a_group() -> None:
    ids_TK = torch.tensor([[0, 1], [2, 3]] * 50)
    assert [len(rows) for rows in groups(ids_TK, 8, 2)] == [50, 50]


def test_the_first_group_is_of_held_experts() -> None:
    ids_TK = torch.tensor([[0, 1], [0, 1], [6, 7]])
    assert next(groups(ids_TK, 8, 2)).tolist() == [0, 1]
    assert next(groups(ids_TK, 8, 2, held=[6, 7])).tolist() == [2]


def test_one_step_that_fits_is_one_group() -> None:
    ids_TK = torch.tensor([[0, 1], [2, 3], [3, 0]])
    (rows,) = groups(ids_TK.int(), 4, 4)
    assert rows.tolist() == [0, 1, 2]


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
        (lambda each: setattr(each.parallel_config, "data_parallel_size", 2), "--data-parallel-size"),
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


WHOLE = [CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE]


@pytest.mark.parametrize("mode", WHOLE)
def test_whole_graphs_are_refused(mode: CUDAGraphMode) -> None:
    check_config(config("cpu", mode))
    with pytest.raises(ExpertcastError, match=r"--enforce-eager.*PIECEWISE"):
        check_config(config("cuda", mode))


def test_graphs_of_parts_end_before_moe_layers() -> None:
    asked = config("cuda", CUDAGraphMode.PIECEWISE)
    check_config(asked)
    check_config(asked)
    assert asked.compilation_config.splitting_ops == ["vllm::unified_attention", *SPLIT_AT]
    eager = config("cuda")
    check_config(eager)
    assert eager.compilation_config.splitting_ops == ["vllm::unified_attention"]
    unsplit = config("cuda", CUDAGraphMode.PIECEWISE)
    unsplit.compilation_config.splitting_ops = []
    with pytest.raises(ExpertcastError, match="splitting_ops"):
        check_config(unsplit)
