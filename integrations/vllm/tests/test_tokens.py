"""Tokens equal vLLM's, for one and two processes, every family and few slots; unsupported settings fail in one line."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engines import LOADING, Ran, both, run
from family_models import FAMILIES, HIDDEN, LAYERS, make_model, top_k


@pytest.fixture(scope="module")
def resident() -> Ran:
    return run()


@pytest.mark.smoke
def test_off_unless_asked_for(resident: Ran) -> None:
    assert "RoutedExperts" in resident.layers
    assert "OffloadedExperts" not in resident.layers


@pytest.mark.smoke
def test_same_tokens_from_few_slots(resident: Ran) -> None:
    ran = run({"slots": 200})
    assert ran.tokens == resident.tokens
    assert "OffloadedExperts" in ran.layers
    assert "RoutedExperts" not in ran.layers
    (counted,) = ran.workers
    assert counted["slots"] == 200
    assert counted["misses"] > 200
    assert counted["hits"] > 0
    assert counted["requests"] == counted["hits"] + counted["misses"]
    block = counted["store_bytes"] // 768
    assert counted["bytes_moved"] == counted["misses"] * block
    assert counted["slots_bytes"] == 200 * block
    assert "200 of 768 experts have a slot" in ran.log
    assert f"{counted['requests']} experts needed" in ran.log


def test_same_tokens_from_slots_for_hardly_more_than_a_token_and_a_disk(resident: Ran) -> None:
    ran = run(engine={"additional_config": {"expertcast": {"slots": 5, "store": "disk"}}})
    assert ran.tokens == resident.tokens
    (counted,) = ran.workers
    assert counted["link"] == "disk"
    assert counted["steps"] > len(ran.tokens[0]) * 12, "groups after groups"


def test_same_tokens_in_single_precision() -> None:
    assert run({"slots": 90}, engine={"dtype": "float32"}).tokens == run(engine={"dtype": "float32"}).tokens


def test_too_few_slots_are_one_line() -> None:
    with pytest.raises(RuntimeError, match=r"slots=3 is fewer than the 4 experts one token needs"):
        run({"slots": 3})


_SMOKE = [pytest.param(family, marks=pytest.mark.smoke) if family == "qwen2_moe" else family for family in FAMILIES]


@pytest.mark.parametrize("family", _SMOKE)
def test_same_tokens(family: str, tmp_path: Path) -> None:
    slots = top_k(family) + 1
    resident, offloaded = both({"slots": slots}, model=make_model(tmp_path, family))
    assert len({tuple(tokens) for tokens in resident.tokens}) == len(resident.tokens)  # answers differ by prompt
    assert offloaded.tokens == resident.tokens
    assert "OffloadedExperts" not in resident.layers
    assert "OffloadedExperts" in offloaded.layers
    (counted,) = offloaded.workers
    assert counted["slots"] == slots
    forwards = len(resident.tokens[0])
    assert counted["steps"] > 2 * forwards * LAYERS  # eight tokens' experts do not fit, so steps run in groups


@pytest.mark.smoke
def test_two_processes(tmp_path: Path) -> None:
    resident, offloaded = both(
        {"slots": 11, "predictor": "router_input", "forecasts": "always"},
        model=make_model(tmp_path, "mixtral", intermediate_size=128),
        engine={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    )
    assert offloaded.tokens == resident.tokens
    first, second = offloaded.workers
    for counted in (first, second):
        assert counted["slots"] == 11
        assert counted["requests"] == counted["hits"] + counted["misses"] > 0
        assert counted["prefetched_used"] > 0
    assert first["requests"] == second["requests"]  # both ran all layers of all tokens
    whole = LAYERS * 8 * 3 * HIDDEN * 128 * 2
    assert first["store_bytes"] == second["store_bytes"] == whole // 2


def test_two_stages(tmp_path: Path) -> None:
    resident, offloaded = both(
        {"slots": 5},
        model=make_model(tmp_path, "mixtral"),
        engine={"pipeline_parallel_size": 2, "distributed_executor_backend": "mp", "enforce_eager": False},
    )
    assert offloaded.tokens == resident.tokens
    held = []
    for counted in offloaded.workers:
        assert counted["slots"] == 5
        assert counted["misses"] > 5
        held.append(len(counted["per_layer"]))
        assert f"5 of {held[-1] * 8} experts have a slot" in offloaded.log
    assert sorted(held) == [LAYERS // 2, LAYERS - LAYERS // 2]


def test_memory_while_loading_and_after(tmp_path: Path) -> None:
    layers, experts, hidden, inner, few = 8, 64, 256, 512, 60
    block = 3 * hidden * inner * 2
    spare = 2 * experts * block  # the layer being read, and the previous one, which may not be freed yet
    model = make_model(
        tmp_path, "olmoe", num_hidden_layers=layers, num_experts=experts, hidden_size=hidden, intermediate_size=inner,
        initializer_range=0.05,
    )  # fmt: skip
    ways = None, {"slots": few}, {"slots": few, "store": "disk"}
    with ThreadPoolExecutor(2) as pool:
        resident, memory, disk = pool.map(lambda options: run(options, model=model, tokens=8), ways)
    assert resident.tokens == memory.tokens == disk.tokens
    all_experts, slots = layers * experts * block, few * block
    for offloaded in (memory, disk):
        (counted,) = offloaded.workers
        assert (counted["store_bytes"], counted["slots_bytes"]) == (all_experts, slots)
    for when in ("loading", "after"):
        # A store in memory has all experts once, beside the slots. Steps gather slots for the kernel, and one layer's
        # copy may not be freed before the next layer's.
        assert memory.memory[when] < resident.memory[when] + 3 * slots + spare
        assert disk.memory[when] < resident.memory[when] - all_experts + 3 * slots + spare


OWN = "are not supported: switch expertcast off"
LATER = "link 'cuda' needs a model on CUDA, this one is on cpu"
CASES: list[tuple[Mapping[str, object], Mapping[str, object], str]] = [
    ({"slot": 5}, {}, "unknown option 'slot'"),
    ({"predictor": "no/such/folder"}, {}, "unknown predictor 'no/such/folder'"),
    ({"link": "cuda"}, {}, LATER),
    ({}, {"quantization": "fp8"}, "quantised experts"),
    ({}, {"enable_expert_parallel": True}, "--enable-expert-parallel"),
    ({}, {"model_impl": "transformers"}, f"TransformersRoutedExperts {OWN}"),
]


def test_refused_in_one_line(tmp_path: Path) -> None:
    model = make_model(tmp_path, "mixtral")
    assert LOADING in run(model=model, tokens=1).log

    def said(case: tuple[Mapping[str, object], Mapping[str, object], str]) -> str:
        options, engine, _ = case
        try:
            run({"slots": 9, **options}, engine=engine, model=model)
        except RuntimeError as failed:
            return str(failed)
        return "nothing"

    with ThreadPoolExecutor(2) as pool:
        logs = list(pool.map(said, CASES))
    for log, (options, engine, words) in zip(logs, CASES, strict=True):
        lines = [line for line in log.splitlines() if "ExpertcastError: " in line]
        assert lines, (options, engine, log)
        assert words in lines[-1]
        assert (LOADING in log) == (words == LATER), log


def test_a_family_with_a_class_of_its_own(tmp_path: Path) -> None:
    model = make_model(tmp_path, "gpt_oss", intermediate_size=64, num_local_experts=8, head_dim=64)
    with pytest.raises(RuntimeError, match=f"GptOssRoutedExperts {OWN}") as caught:
        run({"slots": 9}, model=model)
    assert LOADING not in str(caught.value)
