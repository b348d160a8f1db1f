"""What cannot be is said in one line, before weights are read."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engines import LOADING, run
from family_models import make_model

OWN = "keeps experts in a way of its own: not supported, switch expertcast off for this model"
LATER = "link 'cuda' needs a model on CUDA, this one is on cpu"
CASES: list[tuple[Mapping[str, object], Mapping[str, object], str]] = [
    ({"slot": 5}, {}, "unknown option 'slot'"),
    ({"predictor": "no/such/folder"}, {}, "predictor 'no/such/folder' is neither a folder nor one of"),
    ({"link": "cuda"}, {}, LATER),
    ({}, {"quantization": "fp8"}, "holds quantised experts, which are not offloaded under vLLM: give a bf16"),
    ({}, {"enable_expert_parallel": True}, "--enable-expert-parallel does not go with: leave it out"),
    ({}, {"model_impl": "transformers"}, f"TransformersRoutedExperts {OWN}"),
]


def test_refused(tmp_path: Path) -> None:
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
