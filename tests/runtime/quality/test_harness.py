"""EleutherAI's lm-evaluation-harness on an offloaded model, with tasks of one file and no network."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import expertcast
from expertcast.predictors import ExpertcastError
from expertcast.runtime.quality.policies import harness_model

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
    lm_eval = pytest.importorskip("lm_eval", reason="pip install 'expertcast[eval]'")
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
    """By the harness's own HFLM."""
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
    """Its own HFLM: the resident model's answers, which are those worked out here."""
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


def test_likelihoods_in_decode_steps(
    reference_fp32: PreTrainedModel, reference_tokenizer: Any, run: Run, resident: dict[str, Any]
) -> None:
    """What is executed in decode steps only costs nothing in one forward, and something token by token."""
    from lm_eval.models.huggingface import HFLM

    steps = run(harness_model(reference_fp32, reference_tokenizer, batch_size=2))
    assert torch.tensor(likelihoods(steps)).allclose(torch.tensor(likelihoods(resident)), atol=1e-2)
    assert steps["said"]["own_generate_until"] == resident["said"]["own_generate_until"]
    with expertcast.offload(reference_fp32, predictor="router_input", mode="speculate", slots=300):
        unseen = run(HFLM(pretrained=reference_fp32, tokenizer=reference_tokenizer, batch_size=2))
        seen = run(harness_model(reference_fp32, reference_tokenizer, batch_size=2))
    assert likelihoods(unseen) == likelihoods(resident)
    moved = torch.tensor(likelihoods(seen)) - torch.tensor(likelihoods(steps))
    assert (moved.abs() > 0.05).sum() >= 6


def test_without_the_harness(
    reference_model: PreTrainedModel, reference_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ExpertcastError, match="prefill=0"):
        harness_model(reference_model, reference_tokenizer, prefill=0)
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    with pytest.raises(ExpertcastError, match=r"pip install 'expertcast\[eval\]'"):
        harness_model(reference_model, reference_tokenizer)
