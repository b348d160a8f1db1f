"""Quality with lossy policies, with prefills as in the simulator; EleutherAI's harness on an offloaded model.

The harness's tasks are local files.
"""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import AutoModelForCausalLM, PreTrainedModel

import expertcast
from expertcast import OffloadConfig
from expertcast.commands.predictors import QualityOptions, policy_quality
from expertcast.data.batch import RouterCall
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.taps import RouterTaps
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json
from expertcast.runtime import quality
from expertcast.runtime.offloading import OffloadedModel, offload
from expertcast.runtime.policies import Policies
from expertcast.runtime.quality import decode_log_probs, measure_policies
from expertcast.runtime.recording.recorder import RunStatistics
from expertcast.runtime.simulation.machine import Case, Machine, constant_times
from expertcast.runtime.simulation.simulator import simulate
from expertcast.runtime.simulation.trace import PREFILL, Routes, Trace, trace_of
from expertcast.runtime.storage.layout import BlockLayout
from tests.families.models import CONFIGS

BUDGET = Policies(routing="budget", scope="layer", prefetch="none")
SLOTS = 5


@pytest.fixture(scope="module")
def one_layer() -> PreTrainedModel:
    """Return a model with one MoE layer. Lossy policies cannot change its routing, so runtime and simulator agree."""
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
    )
    document_T = torch.arange(len(windows_NW)).repeat_interleave(windows_NW.shape[1])
    return trace_of(view.shape, routes, document_T, prefill=prefill)


def simulated(model: PreTrainedModel, windows_NW: Tensor, prefill: int) -> dict[str, int]:
    trace, block = recorded(model, windows_NW, prefill), BlockLayout.of(find_moe_layers(model)).block_bytes
    machine = Machine(times=constant_times(1, 1e-3), block_bytes={"full": block}, bandwidth=1e9)
    return counts(simulate(trace, Case(policies=BUDGET, slots=SLOTS, machine=machine)).decode)


def counts(stats: RunStatistics) -> dict[str, int]:
    total = stats.total
    return {"misses": total.misses, "skipped": total.skipped, "bytes": total.bytes_moved}


def measured_and_counted(model: PreTrainedModel, windows_NW: Tensor, prefill: int) -> tuple[Json, dict[str, int]]:
    """Return the quality with a budget, and the counts of its decode steps."""
    decoded: Counter[str] = Counter()
    hooks: list[RemovableHandle] = []

    def opened(config: OffloadConfig) -> OffloadedModel:
        offloaded = offload(model, config)
        for hook in hooks:
            hook.remove()

        def after(_model: object, _args: object, kwargs: dict[str, Any], _output: object) -> None:
            if config.policies == BUDGET and kwargs["input_ids"].shape[1] == 1:
                decoded.update(counts(offloaded.stats))
            offloaded.reset_stats()

        hooks.append(model.register_forward_hook(after, with_kwargs=True))
        return offloaded

    runs = {"budget": OffloadConfig(policies=BUDGET, slots=SLOTS)}
    found = measure_policies(opened, windows_NW, runs, prefill=prefill)
    hooks[-1].remove()
    return found, dict(decoded)


@pytest.mark.parametrize("prefill", [4, PREFILL])
def test_quality_is_that_of_the_run_that_is_timed(one_layer: PreTrainedModel, windows: Tensor, prefill: int) -> None:
    """Same prefill, same decode steps, same experts left out: else a budget's quality is not that of its speed."""
    found, counted = measured_and_counted(one_layer, windows, prefill)
    expected = simulated(one_layer, windows, prefill)
    assert counted == expected
    assert expected["skipped"] > 0
    assert found["prefill"] == min(prefill, 20)
    assert found["tokens"] == 3 * (40 - min(prefill, 20))


def test_distributions_of_one_batch_at_a_time_are_held(
    one_layer: PreTrainedModel, windows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8,192 tokens over 151,936 words are 5 GB."""
    held, real = list[weakref.ref[Tensor]](), decode_log_probs

    def decoded(*args: Any, **options: Any) -> Tensor:
        gc.collect()
        assert sum(each() is not None for each in held) <= 1
        made = real(*args, **options)
        held.append(weakref.ref(made))
        return made

    monkeypatch.setattr(quality, "decode_log_probs", decoded)
    measure_policies(one_layer, windows, {"budget": OffloadConfig(policies=BUDGET, slots=SLOTS)}, prefill=4)
    assert len(held) == 6


def test_another_prefill_is_another_run(one_layer: PreTrainedModel, windows: Tensor) -> None:
    config = {"budget": OffloadConfig(policies=BUDGET, slots=SLOTS)}
    short, long = (measure_policies(one_layer, windows, config, prefill=count)["runs"]["budget"] for count in (4, 20))
    assert short["kl"] != long["kl"]


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


def test_read_token_by_token_as_in_one_forward(one_layer: PreTrainedModel, windows: Tensor) -> None:
    with torch.no_grad():
        whole = one_layer(input_ids=windows, use_cache=False).logits.log_softmax(-1)
    for prefill in (1, 8, 40):
        got = decode_log_probs(one_layer, windows, prefill)
        torch.testing.assert_close(got, whole[:, prefill - 1 :], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("shape", "kwargs"), [((3, 2), {}), ((3, 8), {"prefill": 0}), ((3, 8), {"batch": 4})])
def test_bad_windows(one_layer: PreTrainedModel, shape: tuple[int, int], kwargs: dict[str, int]) -> None:
    with pytest.raises(ExpertcastError, match=r"windows of shape \[3, "):
        measure_policies(one_layer, torch.ones(shape).long(), {}, **kwargs)


ROWS = [
    {"question": "It is a truth universally", "answers": ["acknowledged", "theorem", "river"], "right": 0},
    {"question": "In the beginning God created the heaven and the", "answers": ["speech", "earth", "set"], "right": 1},
    {"question": "The President of the United", "answers": ["Kings", "Numbers", "States"], "right": 2},
    {"question": "To be, or not to", "answers": ["be", "king", "seven"], "right": 1},  # wrong on purpose
]
CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: {kind}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
KINDS = {
    "multiple_choice": 'doc_to_choice: "{{answers}}"\ndoc_to_target: right\nmetric_list:\n  - metric: acc\n',
    "generate_until": (
        'doc_to_target: " {{answers[right]}}"\ngeneration_kwargs:\n  until: ["."]\n  max_gen_toks: 3\n'
        "  do_sample: false\nmetric_list:\n  - metric: exact_match\n"
    ),
}
Run = Callable[[Any], dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Evaluates what the harness takes for a model on both kinds of task."""
    tmp_path = tmp_path_factory.mktemp("harness")
    lm_eval = pytest.importorskip("lm_eval", reason="pip install '.[eval]'")
    from lm_eval.tasks import TaskManager

    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    for kind, rest in KINDS.items():
        (tmp_path / f"{kind}.yaml").write_text(CHOICE.format(name=f"own_{kind}", data=data, kind=kind) + rest)

    def evaluated(model: Any) -> dict[str, Any]:
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=[f"own_{kind}" for kind in KINDS],
            task_manager=TaskManager(include_path=str(tmp_path)),
            bootstrap_iters=0,
        )
        said = {name: [each["filtered_resps"] for each in samples] for name, samples in found["samples"].items()}
        return {"said": said, "accuracy": found["results"]["own_multiple_choice"]["acc,none"]}

    return evaluated


@pytest.fixture(scope="module")
def resident(reference_fp32: PreTrainedModel, reference_tokenizer: Any, run: Run) -> dict[str, Any]:
    """Return results of the harness's own HFLM."""
    from lm_eval.models.huggingface import HFLM

    return run(HFLM(pretrained=reference_fp32, tokenizer=reference_tokenizer, batch_size=2))


def by_hand(model: PreTrainedModel, tokenizer: Any) -> list[list[float]]:
    """Log-likelihood of each answer, one forward each."""
    sums = []
    for row in ROWS:
        context = tokenizer(row["question"])["input_ids"]
        sums.append([])
        for answer in row["answers"]:  # type: ignore[attr-defined]
            ids = torch.tensor([tokenizer(f"{row['question']} {answer}")["input_ids"]])
            with torch.no_grad():
                log_probs: Tensor = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
            told = log_probs[0, :-1].gather(1, ids[0, 1:, None])[len(context) - 1 :]
            sums[-1].append(float(told.sum()))
    return sums


def likelihoods(found: dict[str, Any]) -> list[list[float]]:
    return [[value for value, _ in row] for row in found["said"]["own_multiple_choice"]]


def test_the_harness_takes_an_offloaded_model_as_it_is(
    reference_fp32: PreTrainedModel, reference_tokenizer: Any, run: Run, resident: dict[str, Any]
) -> None:
    """The harness's own HFLM on an offloaded model gives the resident model's results."""
    from lm_eval.models.huggingface import HFLM

    expected = by_hand(reference_fp32, reference_tokenizer)
    for got, wanted in zip(likelihoods(resident), expected, strict=True):
        assert got == pytest.approx(wanted, abs=1e-2)
    best = [row.index(max(row)) for row in expected]
    right = sum(index == row["right"] for index, row in zip(best, ROWS, strict=True))
    assert resident["accuracy"] == right / len(ROWS)
    assert 0 < right < len(ROWS)
    with expertcast.offload(reference_fp32, slots=300):
        assert run(HFLM(pretrained=reference_fp32, tokenizer=reference_tokenizer, batch_size=2)) == resident
