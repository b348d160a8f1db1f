"""Traces of a server's traffic: the same values come back, at any moment, after kills, by one writer after another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from expertcast_vllm.traffic import Conversations, LiveOptions, LiveTraces
from transformers import PreTrainedModel

from expertcast.data import trace_format as layout
from expertcast.data.models import load_tokenizer
from expertcast.data.plan import SPLITS
from expertcast.data.text import Document
from expertcast.data.trace_format import read_info, shard_names
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError
from expertcast.predictors.linear import LinearConfig
from expertcast.training.evaluation import evaluate
from expertcast.training.fit import fit
from tests.data.small_traces import Crash, whole
from tests.data.traffic import SHAPE, as_traffic, request, texts, writer


@pytest.fixture(scope="module")
def live(collected: Path, small_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> TraceDataset:
    """Collected documents as if they were requests."""
    return as_traffic(TraceDataset.open(collected), small_model, tmp_path_factory.mktemp("live") / "traces")


def test_values_and_model_are_those_of_the_requests(live: TraceDataset, collected: Path) -> None:
    live.verify()
    reference = TraceDataset.open(collected)
    assert live.view.fingerprint() == reference.view.fingerprint()
    assert live.info["splits"] == {split: len(whole(live, split)) for split in SPLITS}
    ours, theirs = texts(live), texts(reference)
    assert ours.keys() == theirs.keys()
    for ids, rows in ours.items():
        assert torch.equal(rows.residual_TLD, theirs[ids].residual_TLD)
        assert torch.equal(rows.logits_TLE, theirs[ids].logits_TLE)
        assert rows.position_T.tolist() == list(range(len(ids)))
    datasets = pytest.importorskip("datasets")
    assert len(datasets.load_from_disk(str(live.folder))) == live.token_count()


def test_predictors_on_router_inputs_are_trained_and_the_others_say_what_they_lack(live: TraceDataset) -> None:
    linear = fit("linear", live, config=LinearConfig(inputs=["router_input"])).predictor
    assert not linear.reads_residual
    assert "expert_LED" not in linear.state_dict()
    scored = {"linear": linear, **{name: fit(name, live).predictor for name in ("router_input", "frequency")}}
    assert scored.keys() <= evaluate(scored, live.batches("test", 1000), live.view).as_dict()["recall_at_k"].keys()
    for name in ("quasi_hidden", "linear", "estimator"):
        with pytest.raises(ExpertcastError, match="without default vectors: add those of other traces"):
            fit(name, live)


def numbers(folder: Path) -> list[int]:
    """Whose rows there are, of all shards, checked against what the requests are made of. The model cannot be opened,
    transformers does not know it."""
    info = read_info(folder)
    assert info is not None
    rows = whole(TraceDataset(folder, info))
    assert rows.token_T is not None
    found: list[int] = []
    for document in info["documents"]:
        own = rows[rows.document_T == document["index"]]
        assert own.token_T is not None
        made, count = request(int(own.token_T[0])), document["tokens"]
        assert own.token_T.tolist() == made.token_T[:count].tolist()
        assert torch.equal(own.residual_TLD, made.residual_TLD[:count])
        assert torch.equal(own.logits_TLE, made.logits_TLE[:count])
        found += own.token_T.tolist()
    return found


def test_nothing_is_written_before_there_are_prompts_for_three_splits(tmp_path: Path) -> None:
    made = writer(tmp_path / "traces", (0, 0, 1), commit_s=0)
    assert read_info(tmp_path / "traces") is None
    made.add(request(2))
    assert sorted(numbers(tmp_path / "traces")) == [0] * 6 + [1] * 4 + [2] * 5


def test_in_a_lull_what_is_much_is_committed(tmp_path: Path) -> None:
    made = writer(tmp_path / "traces", range(3), shard_bytes=10**6)
    made.commit_if_idle()
    assert len(numbers(tmp_path / "traces")) == 3 + 4 + 5
    for number in range(3, 30):
        made.add(request(number))
    made.commit_if_idle()
    committed = len(numbers(tmp_path / "traces"))
    made.add(request(0))
    made.commit_if_idle()
    assert len(numbers(tmp_path / "traces")) == committed == made.tokens - 3


def test_a_prompt_stays_in_its_split_and_requests_are_cut(tmp_path: Path) -> None:
    made = writer(tmp_path / "traces", [*range(30), *range(30)])
    made.commit()
    splits: dict[str, set[str]] = {}
    for document in made.documents:
        splits.setdefault(document.hash, set()).add(document.split)
    assert len(splits) == 30
    assert all(len(own) == 1 for own in splits.values())
    expected = sorted(2 * [min(32, 3 + n) for n in range(30)])
    assert sorted(document.tokens for document in made.documents) == expected
    assert len(numbers(tmp_path / "traces")) == sum(expected)


def test_no_more_tokens_than_wanted_by_one_writer_after_another(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    for begin in (0, 20, 40):
        made = writer(folder, range(begin, begin + 20), tokens=500)
        made.commit()
    assert len(numbers(folder)) == 500
    assert made.left == 0
    assert writer(folder, tokens=600).left == 100, "another time more may be wanted"


def test_the_disk_is_looked_at_first(tmp_path: Path) -> None:
    """Rows of 159 bytes here; a million tokens of a model with 48 layers, 128 experts and 2048 hidden are 126 GB."""
    assert "1,000 tokens of 159 bytes, about 159 kB on disk" in writer(tmp_path / "small", tokens=1000).disk
    with pytest.raises(
        ExpertcastError, match=r"tokens of .* bytes need .* TB more in .* are free: collect fewer tokens"
    ):
        writer(tmp_path / "large", tokens=10**12)


def test_too_few_different_prompts_take_no_memory(tmp_path: Path) -> None:
    made = writer(tmp_path / "traces", [37] * 200)
    row_bytes = SHAPE.layers * (SHAPE.hidden + 1 + SHAPE.experts * 4) + 12
    assert made.tokens * row_bytes < 2 * made.options.shard_bytes + 32 * row_bytes
    assert read_info(tmp_path / "traces") is None


def go_on(folder: Path) -> None:
    made = writer(folder)
    for number in range(len(made.documents), 10_000):
        made.add(request(number))


def test_what_was_committed_is_there_after_kills(tmp_path: Path) -> None:
    """Between any two files of a commit, and in the middle of one; readers of the old files see the whole of them."""
    folder, seen = tmp_path / "traces", 0
    for left in range(16):
        with pytest.MonkeyPatch.context() as patch:
            Crash(patch, 1 + left)
            with pytest.raises(KeyboardInterrupt):
                go_on(folder)
        if (info := read_info(folder)) is None:
            continue
        (folder / layout.shard_file(0, 99)).write_bytes(b"half a shard")
        seen, before = len(numbers(folder)), seen
        assert seen >= before
        assert {path.name for path in folder.glob("data-*")} >= {*shard_names(info)}
    assert seen > 500
    made, info = writer(folder), read_info(folder)
    assert info is not None
    state = json.loads((folder / layout.DATASET_STATE_FILE).read_text())
    assert [file["filename"] for file in state["_data_files"]] == shard_names(info)
    assert {path.name for path in folder.glob("data-*")} == {*shard_names(info)}
    opened = {name: (folder / name).open() for name in (layout.DATASET_STATE_FILE, layout.DATASET_INFO_FILE)}
    before_of = {name: (folder / name).read_text() for name in opened}
    made.add(request(10_000))
    made.commit()
    assert len(numbers(folder)) == seen + 3
    assert (folder / layout.DATASET_STATE_FILE).read_text() != before_of[layout.DATASET_STATE_FILE]
    for name, file in opened.items():
        with file:
            assert file.read() == before_of[name]


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
    """Three long documents exceed the shard size together; the first commit has all of them."""
    found = []
    for name, order in (("rising", range(3, 33)), ("falling", range(32, 2, -1))):
        made = writer(tmp_path / name, order, shard_bytes=10**6)
        made.commit()
        found.append({document.hash: document.split for document in made.documents})
    assert found[0] == found[1]


def test_requests_larger_than_the_buffer_are_kept_until_there_are_three(tmp_path: Path) -> None:
    assert len(writer(tmp_path / "traces", (30, 31, 32), shard_bytes=100).documents) == 3


def _flip(folder: Path) -> None:
    writer(folder, range(5)).commit()
    shard = next(folder.glob("data-*"))
    content = bytearray(shard.read_bytes())
    content[-200] ^= 1
    shard.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "notes.txt").write_text("mine"), "is not empty and has no traces"),
        (lambda folder: writer(folder, range(5), window=16).commit(), "has window=16, not 32: use"),
        (_flip, "was changed after it was written"),
    ],
)
def test_what_is_not_ours_is_left_alone(spoil: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    spoil(tmp_path / "traces")
    with pytest.raises(ExpertcastError, match=said):
        writer(tmp_path / "traces")


def test_traces_of_collect_are_not_gone_on_with(collected: Path) -> None:
    view, options = TraceDataset.open(collected).view, LiveOptions(tokens=600, window=64)
    with pytest.raises(ExpertcastError, match="has batch_size=4, not 1: use"):
        LiveTraces(collected, view, options, config={}, logits=torch.bfloat16, dtype="bfloat16")
