"""Warm-up before the first request: the same tokens with fewer misses; refused files."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError
from expertcast.predictors.artefacts import seal
from expertcast.predictors.early_attention import EarlyConfig
from expertcast.runtime import load_offloaded, offload
from expertcast.runtime.policies import Policies
from expertcast.runtime.recording.recorder import Observer
from expertcast.runtime.serving.warm import HotExperts, prepare, read_prompts, warm
from expertcast.runtime.storage.slots import SlotState
from expertcast.training.fit import fit
from tests.families.models import tiny_model
from tests.irregular import IRREGULAR, in_seconds, put
from tests.runtime.conftest import assert_same, greedy, refused
from tests.runtime.faults import INPUTS, Result
from tests.runtime.links.cuda_helpers import cuda_model


class ByteTokenizer:
    """Use bytes as token ids, 0 to 63."""

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[byte % 64 for byte in text.encode()]])}


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
    """Early attention reads the KV cache; the warm-up has none."""
    predictor = fit("early_attention", reference_traces, config=EarlyConfig()).predictor
    with load_offloaded("reference", slots=192, predictor=predictor, forecasts="always") as offloaded:
        assert warm(offloaded, reference_tokenizer, ["In the beginning"]) > 0
        assert offloaded.pool.resident()


def test_a_prompt_with_a_token_that_the_model_lacks(reference_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(reference_tokenizer)
    tokenizer.add_tokens(["<|tool|>"])
    with (
        offload(tiny_model("qwen3_moe"), slots=12) as offloaded,
        refused(r"token 4096 \(<\|tool\|>\) has no embedding"),
    ):
        warm(offloaded, tokenizer, ["Use <|tool|> now"])


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("none.txt", None, "cannot read"), ("empty.txt", b"\n \n", "has no prompts"),
        ("bytes.txt", b"\xff\xfe", "UTF-8"),
        ("bad.jsonl", b'{"prompt": "a"}\n{"prompt', "line 2"),
        ("other.jsonl", b'{"text": "a"}', "line 1"),
        ("number.jsonl", b'{"prompt": 3}', "line 1"),
        ("half.jsonl", b'{"prompt": "\\ud800"}', "line 1"),
    ],
)  # fmt: skip
def test_bad_files_of_prompts(name: str, content: bytes | None, line: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with refused(line):
        read_prompts(tmp_path / name)


def test_prompts_in_json_lines(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "two\\nlines", "id": 1}\n\n{"prompt": "b"}\n', encoding="utf-8-sig")
    assert read_prompts(tmp_path / "p.jsonl") == ["two\nlines", "b"]


@pytest.mark.parametrize("kind", IRREGULAR)
def test_prompts_that_are_no_file(kind: str, tmp_path: Path) -> None:
    put(kind, tmp_path / "prompts.txt")
    with in_seconds(20), pytest.raises(ExpertcastError, match=r"^cannot read .*prompts.txt: "):
        read_prompts(tmp_path / "prompts.txt")


LINKS: dict[str, dict[str, Any]] = {
    "instant": {"link": "instant"},
    "emulated": {"link": "emulated", "bandwidth": 2e7},
    "disk": {"store": "disk", "link": "disk"},
    "forecast": {"link": "emulated", "bandwidth": 2e7, "predictor": "next_norm"},
    "shares": {"link": "instant", "policies": Policies(scope="layer")},
}
CODED = {"coded": "", "pools": "C=4MB"}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("qwen3_moe")


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> Result:
    return greedy(model, INPUTS)


def _first_request(model: PreTrainedModel, path: Path | None, options: dict[str, Any]) -> tuple[Result, int, int]:
    """Return the run's tokens, its misses, and the number of experts loaded before it."""
    with offload(model, slots=12, **options) as offloaded:
        loaded = 0 if path is None else HotExperts(path, offloaded).load()
        before = offloaded.stats.total
        assert before.requests == before.misses == 0
        result = greedy(offloaded, INPUTS)
        return result, offloaded.stats.total.misses, loaded


@pytest.mark.parametrize("link", list(LINKS))
def test_the_next_run_begins_with_what_the_last_one_used(
    link: str, model: PreTrainedModel, expected: Result, tmp_path: Path
) -> None:
    options, path = LINKS[link], tmp_path / "hot.json"
    with offload(model, slots=12, **options) as offloaded:
        hot = HotExperts(path, offloaded)
        assert hot.load() == 0
        assert_same(greedy(offloaded, INPUTS), expected)
        assert hot.save()
    assert list(tmp_path.iterdir()) == [path]
    cold, misses, _ = _first_request(model, None, options)
    warm, fewer, loaded = _first_request(model, path, options)
    assert_same(cold, expected)
    assert_same(warm, expected)
    assert 0 < loaded <= 12
    assert fewer < misses


class _Uses(Observer):
    def __init__(self) -> None:
        self.count: Counter[int] = Counter()

    def needed(self, layer: int, keys: Any) -> None:
        self.count.update(keys)


def test_the_file_says_how_often_each_was_used(model: PreTrainedModel, tmp_path: Path) -> None:
    path, uses = tmp_path / "hot.json", _Uses()
    with offload(model, slots=12, observers=[uses]) as offloaded:
        hot = HotExperts(path, offloaded)
        greedy(offloaded, INPUTS)
        hot.save()
        values = json.loads(path.read_text())
        assert dict(zip(values["keys"], values["used"], strict=True)) == dict(uses.count)
        assert sorted(values["held"]) == sorted(offloaded.pool.resident())
        assert values["fingerprint"] == offloaded.view.fingerprint()
    with offload(model, slots=12) as offloaded:
        hot = HotExperts(path, offloaded)
        assert hot.load() == 12
        most = {key for key, _ in uses.count.most_common(12)}
        least = min(uses.count[key] for key in offloaded.pool.resident())
        assert least == min(uses.count[key] for key in most)
        pool = offloaded.pool
        assert all(pool.state(slot) is SlotState.READY for slot in pool.slots.values())
        for key, slot in pool.slots.items():
            assert torch.equal(pool.block(slot), offloaded.store.block(key))
        assert not hot.save(), "nothing was run: what is known stays"
        assert json.loads(path.read_text()) == values
        greedy(offloaded, INPUTS)
        for _ in range(2):
            assert hot.save(), "the second time the same"
    again = json.loads(path.read_text())
    halved = Counter({key: count // 2 for key, count in uses.count.items()}) + uses.count
    assert dict(zip(again["keys"], again["used"], strict=True)) == dict(halved)


@pytest.mark.parametrize("pools", CODED.values(), ids=CODED)
def test_experts_that_are_coded_on_disk(pools: str, tmp_path: Path) -> None:
    inputs, path = {"input_ids": torch.arange(40, 60)[None]}, tmp_path / "hot.json"
    options: dict[str, Any] = {
        "store": "disk", "link": "disk", "codec": "bitsplit", "pools": pools, "store_folder": tmp_path / "store",
        "slots": 96,
    }  # fmt: skip

    def run(loads: bool) -> tuple[Result, int]:
        with load_offloaded("reference", **options) as offloaded:
            hot = HotExperts(path, offloaded)
            if loads:
                assert hot.load() > 0
            result = greedy(offloaded, inputs)
            misses = offloaded.stats.total.misses
            hot.save()
        return result, misses

    cold, misses = run(False)
    warm, fewer = run(True)
    assert_same(warm, cold)
    assert fewer < misses


def _left_by_a_run(model: PreTrainedModel, folder: Path) -> Path:
    """Write the hot-experts file of a run."""
    with offload(model, slots=12) as offloaded:
        hot = HotExperts(folder / "hot.json", offloaded)
        greedy(offloaded, INPUTS)
        hot.save()
    return hot.path


def _damaged(text: str, how: str) -> str:
    values = json.loads(text)
    if how == "cut":
        return text[: len(text) // 2]
    if how == "changed":
        return text.replace('"used": [', '"used": [1')
    if how == "other model":
        return json.dumps(seal({**_unsealed(values), "fingerprint": "0" * 64}))
    if how == "no such expert":
        return json.dumps(seal({**_unsealed(values), "held": [10**6]}))
    assert how == "empty"
    return ""


def _unsealed(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "digest"}


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("cut", "not valid JSON"), ("empty", "not valid JSON"), ("changed", "was changed after it was written"),
        ("other model", "another model"), ("no such expert", "out of range"),
    ],
)  # fmt: skip
def test_a_file_of_no_use_makes_a_cold_start(
    how: str, line: str, model: PreTrainedModel, expected: Result, tmp_path: Path
) -> None:
    path = _left_by_a_run(model, tmp_path)
    path.write_text(_damaged(path.read_text(), how))
    with offload(model, slots=12) as offloaded:
        hot = HotExperts(path, offloaded)
        (said,) = prepare(offloaded, ByteTokenizer(), [], hot)
        assert said.startswith("hot experts are ignored: ")
        assert line in said
        assert "\n" not in said
        assert not offloaded.pool.resident()
        assert_same(greedy(offloaded, INPUTS), expected)
        assert hot.save()
    json.loads(path.read_text())


def test_a_run_without_a_cache_keeps_nothing(model: PreTrainedModel, expected: Result, tmp_path: Path) -> None:
    path = _left_by_a_run(model, tmp_path)
    with offload(model, slots=12, cache=False) as offloaded:
        (said,) = prepare(offloaded, ByteTokenizer(), [], HotExperts(path, offloaded))
        assert "cache=False" in said
        assert_same(greedy(offloaded, INPUTS), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("link", ["cuda", "disk"])
def test_links_of_a_cuda_device(link: str, tmp_path: Path) -> None:
    model, path = cuda_model(), tmp_path / "hot.json"
    inputs = {"input_ids": INPUTS["input_ids"].to("cuda")}
    before = greedy(model, inputs)
    options: dict[str, Any] = {"link": link, "store": "disk" if link == "disk" else "memory", "slots": 12}
    misses = []
    for _ in range(2):
        with offload(model, **options) as offloaded:
            hot = HotExperts(path, offloaded)
            prepare(offloaded, ByteTokenizer(), [], hot)
            assert_same(greedy(offloaded, inputs), before)
            misses.append(offloaded.stats.total.misses)
            assert hot.save()
    assert misses[1] < misses[0]
