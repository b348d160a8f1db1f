"""Traces of a server's traffic: the same values come back, at any moment, after kills, by one writer after another."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from expertcast.data import trace_format as layout
from expertcast.data.live import Conversations, LiveOptions, LiveTraces
from expertcast.data.models import load_tokenizer
from expertcast.data.plan import SPLITS
from expertcast.data.text import Document
from expertcast.data.trace_format import read_info
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError
from expertcast.predictors.linear import LinearConfig
from expertcast.predictors.view import MoEView
from expertcast.training.evaluation import evaluate
from expertcast.training.fit import fit
from tests.data.live_script import SHAPE, request, writer
from tests.data.traffic import as_traffic, texts, whole

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def live(
    reference_traces: TraceDataset, reference_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> TraceDataset:
    """The reference traces' documents as if they were requests."""
    return as_traffic(reference_traces, reference_model, tmp_path_factory.mktemp("live") / "traces")


def test_values_and_model_are_those_of_the_requests(
    live: TraceDataset, reference_traces: TraceDataset, reference_view: MoEView
) -> None:
    live.verify()
    assert live.view.fingerprint() == reference_view.fingerprint()
    assert live.info["splits"] == {split: len(whole(live, split)) for split in SPLITS}
    ours, theirs = texts(live), texts(reference_traces)
    assert ours.keys() == theirs.keys()
    for ids, rows in ours.items():
        assert torch.equal(rows.residual_TLD, theirs[ids].residual_TLD)
        assert torch.equal(rows.logits_TLE, theirs[ids].logits_TLE)
        assert rows.position_T.tolist() == list(range(len(ids)))


def test_datasets_reads_them(live: TraceDataset) -> None:
    datasets = pytest.importorskip("datasets")
    assert len(datasets.load_from_disk(str(live.folder))) == live.token_count()


def test_predictors_on_router_inputs_are_trained_and_the_others_say_what_they_lack(live: TraceDataset) -> None:
    linear = fit("linear", live, config=LinearConfig(reads="router_input")).predictor
    assert not linear.reads_residual
    assert "expert_LED" not in linear.state_dict()
    scored = {"linear": linear, **{name: fit(name, live).predictor for name in ("router_input", "frequency")}}
    recall = evaluate(scored, live.batches("test", 1000), live.view).as_dict()["recall_at_k"]
    assert recall["linear"]["mean"] > recall["router_input"]["mean"] > recall["frequency"]["mean"]
    for name in ("quasi_hidden", "linear", "estimator"):
        with pytest.raises(ExpertcastError, match="holds no default vectors: take those of other traces"):
            fit(name, live)


def test_nothing_is_written_before_there_are_prompts_for_three_splits(tmp_path: Path) -> None:
    made = writer(tmp_path / "traces", commit_s=0)
    for number in (0, 0, 1):
        made.add(request(number))
        assert read_info(tmp_path / "traces") is None
    made.add(request(2))
    assert sorted(_numbers(tmp_path / "traces")) == [0] * 6 + [1] * 4 + [2] * 5


def _numbers(folder: Path) -> list[int]:
    """Whose rows there are, of all shards: the model cannot be opened, transformers does not know it."""
    return [number for row in _read(folder) for number in row]


def _read(folder: Path) -> list[list[int]]:
    """Token ids by document, checked against what the requests are made of."""
    info = read_info(folder)
    assert info is not None
    rows = whole(TraceDataset(folder, info))
    assert rows.token_T is not None
    found = []
    for document in info["documents"]:
        own = rows[rows.document_T == document["index"]]
        assert own.token_T is not None
        made, count = request(int(own.token_T[0])), document["tokens"]
        assert own.token_T.tolist() == made.token_T[:count].tolist()
        assert torch.equal(own.residual_TLD, made.residual_TLD[:count])
        assert torch.equal(own.logits_TLE, made.logits_TLE[:count])
        found.append(own.token_T.tolist())
    return found


def test_in_a_lull_what_is_much_is_committed(tmp_path: Path) -> None:
    made = writer(tmp_path / "traces", shard_bytes=10**6)
    for number in range(3):
        made.add(request(number))
    made.lull()
    assert len(_numbers(tmp_path / "traces")) == 3 + 4 + 5
    for number in range(3, 30):
        made.add(request(number))
    made.lull()
    committed = len(_numbers(tmp_path / "traces"))
    made.add(request(0))
    made.lull()
    assert len(_numbers(tmp_path / "traces")) == committed == made.tokens - 3


def test_a_prompt_stays_in_its_split_and_requests_are_cut(tmp_path: Path) -> None:
    made = writer(tmp_path / "traces")
    for number in [*range(30), *range(30)]:
        made.add(request(number))
    made.close()
    info = read_info(tmp_path / "traces")
    assert info is not None
    splits: dict[str | None, set[str]] = {}
    for document in info["documents"]:
        splits.setdefault(document["hash"], set()).add(document["split"])
    assert len(splits) == 30
    assert all(len(own) == 1 for own in splits.values())
    assert max(document["tokens"] for document in info["documents"]) == 32
    assert sorted(len(ids) for ids in _read(tmp_path / "traces")) == sorted(2 * [min(32, 3 + n) for n in range(30)])


def test_no_more_tokens_than_wanted_by_one_writer_after_another(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    for begin in (0, 20, 40):
        made = writer(folder, tokens=500)
        for number in range(begin, begin + 20):
            made.add(request(number))
        made.close()
    info = read_info(folder)
    assert info is not None
    assert info["tokens"] == 500 == len(_numbers(folder))
    assert made.left == 0


def test_too_few_different_prompts_take_no_memory(tmp_path: Path) -> None:
    made = writer(tmp_path / "traces")
    for _ in range(200):
        made.add(request(37))
    row_bytes = SHAPE.layers * (SHAPE.hidden * 2 + SHAPE.experts * 4) + 12
    assert made.tokens * row_bytes < 2 * made.options.shard_bytes + 32 * row_bytes
    assert read_info(tmp_path / "traces") is None


def test_what_was_committed_is_there_after_kills(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    seen = 0
    for pause in (0.05, 0.3):
        command = [sys.executable, "-m", "tests.data.live_script", str(folder)]
        process = subprocess.Popen(command, cwd=ROOT)
        while process.poll() is None and (not (info := read_info(folder)) or info["tokens"] <= seen):
            time.sleep(0.02)
        time.sleep(pause)
        process.kill()
        assert process.wait() == -9
        seen, before = len(_numbers(folder)), seen
        assert seen > before
    made = writer(folder)
    named = {*TraceDataset(folder, read_info(folder)).info["files"]}  # type: ignore[arg-type]
    assert {path.name for path in folder.glob("data-*")} == {name for name in named if name.endswith(".arrow")}
    made.add(request(10_000))
    made.close()
    assert len(_numbers(folder)) == seen + 3


def test_a_reader_of_the_files_for_datasets_never_sees_a_part(tmp_path: Path) -> None:
    """Each is replaced, so that one who has opened it reads the old one to its end."""
    made, folder = writer(tmp_path / "traces"), tmp_path / "traces"
    for number in range(30):
        made.add(request(number))
    made.commit()
    names = (layout.DATASET_STATE_FILE, layout.DATASET_INFO_FILE)
    before = {name: (folder / name).read_text() for name in names}
    opened = {name: (folder / name).open() for name in names}
    made.add(request(30))
    made.commit()
    assert (folder / layout.DATASET_STATE_FILE).read_text() != before[layout.DATASET_STATE_FILE]
    for name, file in opened.items():
        with file:
            assert file.read() == before[name]


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_turns_of_a_chat_are_one_conversation_whatever_comes_before(system: str) -> None:
    """Known by its first user message, as a document with that text is."""
    tokenizer = load_tokenizer("reference")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    conversations = Conversations(tokenizer)

    def known(*contents: str) -> str:
        roles = ("user", "assistant") * 2
        chat = [{"role": "system", "content": system}] if system else []
        chat += [{"role": role, "content": each} for role, each in zip(roles, contents, strict=False)]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return conversations.hash(tokenizer(text)["input_ids"])

    assert known("Hello there.") == known("Hello there.", "Hello.", "And now?") == Document(0, "Hello there.").hash
    assert known("Another one.") != known("Hello there.")
    plain = tokenizer("Hello there.")["input_ids"]
    assert conversations.hash(plain) == Document(0, "Hello there.").hash


def test_a_conversation_is_in_the_same_split_in_any_order(tmp_path: Path) -> None:
    """Of three long ones none fits beside another: the first commit has them all."""
    found = []
    for name, order in (("rising", range(3, 33)), ("falling", reversed(range(3, 33)))):
        made = writer(tmp_path / name, shard_bytes=10**6)
        for number in order:
            made.add(request(number))
        made.close()
        found.append({document.hash: document.split for document in made.documents})
    assert found[0] == found[1]


def test_requests_larger_than_the_buffer_are_kept_until_there_are_three(tmp_path: Path) -> None:
    made = writer(tmp_path / "traces", shard_bytes=100)
    for number in (30, 31, 32):
        made.add(request(number))
    assert len(made.documents) == 3


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "notes.txt").write_text("mine"), "is not empty and holds no traces of ours"),
        (lambda folder: _write(folder, window=16), "was begun with window=16, now it is 32: give"),
    ],
)
def test_what_is_not_ours_is_left_alone(spoil: object, said: str, tmp_path: Path) -> None:
    assert callable(spoil)
    (tmp_path / "traces").mkdir()
    spoil(tmp_path / "traces")
    with pytest.raises(ExpertcastError, match=said):
        writer(tmp_path / "traces")


def _write(folder: Path, **options: int) -> None:
    made = writer(folder, **options)
    for number in range(5):
        made.add(request(number))
    made.close()


def test_traces_of_collect_are_not_gone_on_with(
    reference_traces: TraceDataset, reference_model: PreTrainedModel, tmp_path: Path
) -> None:
    options = LiveOptions(tokens=100)
    with pytest.raises(ExpertcastError, match="was begun with window=256, now it is 1024"):
        LiveTraces(
            reference_traces.folder, reference_traces.view, options, config={}, logits=torch.bfloat16, dtype="bfloat16"
        )


def test_a_changed_shard_is_noticed(tmp_path: Path) -> None:
    _write(tmp_path / "traces")
    shard = next((tmp_path / "traces").glob("data-*"))
    content = bytearray(shard.read_bytes())
    content[-200] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ExpertcastError, match="changed"):
        writer(tmp_path / "traces")
