"""Prompts that are run before the first request: the same tokens with fewer misses; files that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError
from expertcast.predictors.early_attention import EarlyConfig
from expertcast.runtime import load_offloaded, offload
from expertcast.runtime.serving.warm import prepare, read_prompts, warm
from expertcast.training.fit import fit
from tests.families.models import tiny_model
from tests.irregular import IRREGULAR, in_seconds, put
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.faults import Result
from tests.runtime.serving.byte_tokenizer import ByteTokenizer


def test_prompts_fill_slots(reference_tokenizer: Any, reference_fp32: PreTrainedModel, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("The old man went down to the river\n\nIn the beginning\n")
    prompts = read_prompts(file)
    assert prompts == ["The old man went down to the river", "In the beginning"]
    inputs = dict(reference_tokenizer(prompts[0], return_tensors="pt"))

    def first(prepared: bool) -> tuple[Result, int]:
        with offload(reference_fp32, slots=384) as offloaded:
            if prepared:
                (said,) = prepare(offloaded, reference_tokenizer, prompts, None)
                assert said.startswith("warmed by 2 prompts of ")
                assert offloaded.pool.resident()
                assert offloaded.stats.total.requests == 0
            result = greedy(offloaded, inputs, 2)
            return result, offloaded.stats.total.misses

    cold, misses = first(False)
    warm, fewer = first(True)
    assert_same(warm, cold)
    assert fewer < misses


def test_a_prompt_beyond_the_models_positions_is_cut() -> None:
    model = tiny_model("qwen3_moe")
    most = min(2048, model.config.max_position_embeddings)
    with offload(model, slots=12) as offloaded:
        assert warm(offloaded, ByteTokenizer(), ["word " * most, "", "0123456789"]) == most + 10
        assert offloaded.stats.layers[0].steps == 2


def test_prompts_run_with_early_attention(reference_tokenizer: Any, reference_traces: TraceDataset) -> None:
    """Which reads the cache where there is one."""
    predictor = fit("early_attention", reference_traces, config=EarlyConfig()).predictor
    with load_offloaded("reference", slots=192, predictor=predictor) as offloaded:
        assert warm(offloaded, reference_tokenizer, ["In the beginning"]) > 0
        assert offloaded.pool.resident()


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("none.txt", None, "cannot read"), ("empty.txt", b"\n \n", "holds no prompt"),
        ("bytes.txt", b"\xff\xfe", "UTF-8"),
        ("bad.jsonl", b'{"prompt": "a"}\n{"prompt', "line 2 is no JSON"),
        ("other.jsonl", b'{"text": "a"}', "line 1 is no object"),
        ("number.jsonl", b'{"prompt": 3}', "line 1 is no object"),
    ],
)  # fmt: skip
def test_bad_files_of_prompts(name: str, content: bytes | None, line: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ExpertcastError, match=line) as caught:
        read_prompts(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_prompts_in_json_lines(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "two\\nlines", "id": 1}\n\n{"prompt": "b"}\n')
    assert read_prompts(tmp_path / "p.jsonl") == ["two\nlines", "b"]


@pytest.mark.parametrize("kind", IRREGULAR)
def test_prompts_that_are_no_file(kind: str, tmp_path: Path) -> None:
    put(kind, tmp_path / "prompts.txt")
    with in_seconds(20), pytest.raises(ExpertcastError, match=r"^cannot read .*prompts.txt: "):
        read_prompts(tmp_path / "prompts.txt")
