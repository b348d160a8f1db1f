"""What cannot be is said in one line, before the model runs."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engines import run
from family_models import make_model

CASES: list[tuple[Mapping[str, object], Mapping[str, object], str]] = [
    ({"slot": 5}, {}, "unknown option 'slot'"),
    ({"predictor": "no/such/folder"}, {}, "predictor 'no/such/folder' is neither a folder nor one of"),
    ({"link": "cuda"}, {}, "link 'cuda' needs a model on CUDA, this one is on cpu"),
    ({}, {"quantization": "fp8"}, "holds quantised experts, which are not offloaded under vLLM: give a bf16"),
    ({}, {"enable_expert_parallel": True}, "--enable-expert-parallel does not go with: leave it out"),
]


def test_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path, "mixtral")

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
