"""What lossy policies cost is measured on texts that are read as the simulator reads them (row D10)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from expertcast.commands.predictors import QualityOptions, policy_quality
from expertcast.data.batch import RouterCall
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.taps import RouterTaps
from expertcast.predictors import ExpertcastError
from expertcast.runtime import OffloadConfig
from expertcast.runtime.policies import Policies
from expertcast.runtime.quality import policies as quality
from expertcast.runtime.quality.policies import measure_policies, read_texts
from expertcast.runtime.simulation.machine import Case, Machine, constant_times
from expertcast.runtime.simulation.simulator import simulate
from expertcast.runtime.simulation.trace import PREFILL, Routes, Trace, trace_of
from expertcast.runtime.storage.layout import BlockLayout
from tests.families.models import CONFIGS

BUDGET = Policies(routing="budget", scope="layer", prefetch="none")
SLOTS = 5


@pytest.fixture(scope="module")
def one_layer() -> PreTrainedModel:
    """Of one MoE layer: no routing that follows can be changed by what it leaves out, so that the simulator, which
    replays recorded routing, must count what the runtime counts."""
    config = copy.deepcopy(CONFIGS["qwen3_moe"])
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.float().eval()


@pytest.fixture(scope="module")
def windows() -> Tensor:
    return torch.randint(4096, (3, 40), generator=torch.Generator().manual_seed(1))


def recorded(model: PreTrainedModel, windows_NW: Tensor, prefill: int) -> Trace:
    """The windows' routing as `collect` would record it, to be decoded after a prefill."""
    view, calls = find_moe_layers(model), []

    def on_router(call: RouterCall) -> None:
        calls.append(call)

    taps = RouterTaps(model, view, on_router)
    with torch.no_grad():
        model(input_ids=windows_NW, use_cache=False)
    taps.close()
    routes = Routes(
        view=view,
        logits=[call.logits_TE for call in calls],
        ids=[call.ids_TK for call in calls],
        weights=[call.weights_TK for call in calls],
        residual=[call.residual_TD[:, :0] for call in calls],
    )
    document_T = torch.arange(len(windows_NW)).repeat_interleave(windows_NW.shape[1])
    return trace_of(view.shape, routes, document_T, prefill=prefill)


def simulated(model: PreTrainedModel, windows_NW: Tensor, prefill: int) -> dict[str, float]:
    trace, block = recorded(model, windows_NW, prefill), BlockLayout.of(find_moe_layers(model)).block_bytes
    machine = Machine(times=constant_times(1, 1e-3), block_bytes={"full": block}, bandwidth=1e9)
    total = simulate(trace, Case(policies=BUDGET, slots=SLOTS, machine=machine)).decode.total
    tokens = trace.steps
    return {"misses": total.misses / tokens, "skipped": total.skipped / tokens, "bytes": total.bytes_moved / tokens}


@pytest.mark.parametrize("prefill", [4, 16, PREFILL])
def test_quality_is_that_of_the_run_that_is_timed(one_layer: PreTrainedModel, windows: Tensor, prefill: int) -> None:
    """Same prefill, same decode steps, same experts left out: else a budget's quality is not that of its speed."""
    found = measure_policies(
        one_layer, windows, {"budget": OffloadConfig(policies=BUDGET, slots=SLOTS)}, prefill=prefill
    )
    run, expected = found["runs"]["budget"], simulated(one_layer, windows, prefill)
    assert {name: run[name] for name in expected} == pytest.approx(expected)
    assert expected["skipped"] > 0
    assert found["prefill"] == min(prefill, 20)
    assert found["tokens"] == 3 * (40 - min(prefill, 20))


def test_another_prefill_is_another_run(one_layer: PreTrainedModel, windows: Tensor) -> None:
    config = {"budget": OffloadConfig(policies=BUDGET, slots=SLOTS)}
    short, long = (measure_policies(one_layer, windows, config, prefill=count)["runs"]["budget"] for count in (4, 20))
    assert short["kl"] != long["kl"]
    assert short["skipped"] != simulated(one_layer, windows, 20)["skipped"]


def test_prefill_defaults_to_the_simulators() -> None:
    assert measure_policies.__kwdefaults__["prefill"] == PREFILL


def test_simulate_measures_with_the_prefill_it_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """`expertcast simulate --prefill P --batch B` hands both on, and takes texts that have P tokens to read at once."""
    asked: list[dict[str, Any]] = []
    real = quality.measure_policies

    def measured(model: PreTrainedModel, windows_NW: Tensor, runs: dict[str, OffloadConfig], **kwargs: Any) -> Any:
        asked.append({"length": windows_NW.shape[1], "count": len(windows_NW), **kwargs})
        return real(model, windows_NW[:2, :6], runs, prefill=2, batch=2)

    monkeypatch.setattr(quality, "measure_policies", measured)
    options = QualityOptions(quality_tokens=1024)
    found = policy_quality(options, "reference", {"drop": OffloadConfig(slots=60)}, prefill=96, batch=3)
    assert asked == [{"length": 192, "count": 5, "prefill": 96, "batch": 3}]
    assert set(found) == {"exact", "drop"}


def test_windows_together_are_the_windows_apart(one_layer: PreTrainedModel, windows: Tensor) -> None:
    """A batch changes nothing where nothing is left out; the last, smaller one is left out."""
    config = {"same": OffloadConfig(policies=Policies(prefetch="none"))}
    apart = measure_policies(one_layer, windows[:2], config, prefill=8)
    together = measure_policies(one_layer, windows, config, prefill=8, batch=2)
    assert together["tokens"] == apart["tokens"]
    for name in ("exact", "same"):
        assert together["runs"][name]["perplexity"] == pytest.approx(apart["runs"][name]["perplexity"], rel=1e-4)
        assert together["runs"][name]["executed_recall"] == 1.0


def test_read_token_by_token_as_in_one_forward(one_layer: PreTrainedModel, windows: Tensor) -> None:
    with torch.no_grad():
        whole = one_layer(input_ids=windows, use_cache=False).logits.log_softmax(-1)
    told: list[bool] = []
    for prefill in (1, 8, 40):
        got = read_texts(one_layer, windows, prefill, prefilled=lambda: told.append(True))
        torch.testing.assert_close(got, whole[:, prefill - 1 :], atol=1e-4, rtol=1e-4)
    assert len(told) == 3


@pytest.mark.parametrize(("shape", "kwargs"), [((3, 2), {}), ((3, 8), {"prefill": 0}), ((3, 8), {"batch": 4})])
def test_bad_windows(one_layer: PreTrainedModel, shape: tuple[int, int], kwargs: dict[str, int]) -> None:
    with pytest.raises(ExpertcastError, match="give a batch of windows or more"):
        measure_policies(one_layer, torch.ones(shape).long(), {}, **kwargs)
