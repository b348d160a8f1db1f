"""The training script on a corpus and a model of toy size: it learns, resumes exactly and refuses bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from scripts import train_reference
from scripts.train_reference import Trainer, WindowOrder, encode, load_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

SIZES = {
    "layers": 2,
    "experts": 4,
    "experts-per-token": 2,
    "expert-width": 8,
    "hidden": 16,
    "heads": 2,
    "vocab": 300,
    "window": 16,
    "batch": 2,
    "warmup": 2,
    "seed": 3,
    "device": "cpu",
    "log-every": 1,
}
STEP_TOKENS = 32
Run = Callable[..., int]


def write_split(folder: Path, split: str, documents: int) -> None:
    """Write a corpus of two domains that a model can learn: counting and a refrain."""
    counting = [" ".join(str(n) for n in range(i, i + 40)) for i in range(documents)]
    refrain = [f"verse {i}: the cat sat on the mat and the dog lay by the log. " * 3 for i in range(documents)]
    texts = counting + refrain
    columns = {
        "text": texts,
        "domain": ["count"] * documents + ["refrain"] * documents,
        "source": ["made here"] * len(texts),
        "license": ["CC0-1.0"] * len(texts),
    }
    pq.write_table(pa.table(columns), folder / f"{split}.parquet")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_split(folder, "train", 20)
    write_split(folder, "validation", 3)
    return folder


@pytest.fixture(autouse=True)
def leave_process_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setattr(train_reference, "keep_freed_memory", lambda: None)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(corpus: Path) -> Run:
    def run_script(out: Path | None, *flags: str, steps: int = 6, **changed: object) -> int:
        sizes = {**SIZES, "corpus": corpus, "tokens": steps * STEP_TOKENS, **changed}
        arguments = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
        return train_reference.main([*arguments, *(["--out", str(out)] if out else []), *flags])

    return run_script


def test_loss_falls_and_the_output_loads(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "model"
    assert run(out, steps=80, **{"learning-rate": 0.02, "validate-every": 40}) == 0

    report = json.loads((out / "training.json").read_text())
    losses = [entry["loss"] for entry in report["train_log"]]
    assert report["steps"] == 80
    assert report["tokens"] == 80 * STEP_TOKENS
    assert sum(losses[-10:]) / 10 < 0.7 * losses[0]
    assert set(report["validation_loss"]) == {"count", "refrain", "all"}
    assert [entry["step"] for entry in report["validation_log"]] == [40, 80]

    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert tokenizer.eos_token_id == 0
    assert tokenizer.decode(tokenizer("the cat — é").input_ids) == "the cat — é"
    assert model(**tokenizer("the cat sat", return_tensors="pt")).logits.shape[-1] == 300
    assert "state" not in {path.name for path in out.iterdir()}


def test_the_files_name_no_absolute_path(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "model"
    monkeypatch.setattr(sys, "argv", ["train_reference.py", "--corpus", "../shared/corpus", "--out", str(out)])
    assert run(out) == 0
    command = "python scripts/train_reference.py --corpus ../shared/corpus --out model"
    assert json.loads((out / "training.json").read_text())["command"] == command
    assert f"`{command}`" in (out / "README.md").read_text()
    for name in ("README.md", "training.json", "config.json", "tokenizer_config.json"):
        assert str(tmp_path) not in (out / name).read_text()


def test_a_killed_run_resumes_to_the_same_bits(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(whole, **{"checkpoint-every": 3}) == 0

    step = Trainer.train_step

    def die_in_step_5(trainer: Trainer) -> torch.Tensor:
        if trainer.progress.step == 4:
            raise KeyboardInterrupt
        return step(trainer)

    monkeypatch.setattr(Trainer, "train_step", die_in_step_5)
    with pytest.raises(KeyboardInterrupt):
        run(parts, **{"checkpoint-every": 3})
    monkeypatch.setattr(Trainer, "train_step", step)
    assert run(parts, "--resume", **{"checkpoint-every": 3}) == 0

    expected, resumed = (load_file(folder / "model.safetensors") for folder in (whole, parts))
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    logs = [json.loads((folder / "training.json").read_text())["train_log"] for folder in (whole, parts)]
    assert [entry["loss"] for entry in logs[0]] == [entry["loss"] for entry in logs[1]]


def test_continuing_from_a_model_keeps_its_tokenizer_and_beats_it(
    run: Run, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(first, steps=10) == 0
    assert run(second, "--init", str(first), steps=60, **{"learning-rate": 0.02}) == 0
    assert (first / "tokenizer.json").read_text() == (second / "tokenizer.json").read_text()

    before, after = (json.loads((f / "training.json").read_text())["validation_loss"] for f in (first, second))
    assert after["all"] < before["all"]
    capsys.readouterr()
    assert train_reference.main(["--corpus", str(corpus), "--init", str(first), "--evaluate", "--window", "16"]) == 0
    assert json.loads(capsys.readouterr().out) == pytest.approx(before, abs=1e-6)


def test_a_budget_in_minutes_ends(run: Run, tmp_path: Path) -> None:
    assert run(tmp_path / "model", tokens=0, minutes=0.01) == 0
    report = json.loads((tmp_path / "model" / "training.json").read_text())
    assert 0.6 <= report["seconds"] < 5
    rates = [entry["learning_rate"] for entry in report["train_log"]]
    assert max(rates) <= 4e-3
    assert rates[-1] < rates[len(rates) // 2]


def test_window_order_visits_every_window_once_and_depends_on_the_seed() -> None:
    stream = torch.arange(1000).numpy().astype("uint16")
    order = WindowOrder(stream, 16, seed=1)
    seen = order.batch(0, order.per_epoch)
    assert len(seen[:, 0].unique()) == order.per_epoch
    assert torch.equal(seen - seen[:, :1], torch.arange(16).expand_as(seen))
    assert torch.equal(WindowOrder(stream, 16, seed=1).batch(7, 3), seen[7:10])
    assert not torch.equal(WindowOrder(stream, 16, seed=2).batch(0, order.per_epoch), seen)
    assert not torch.equal(order.batch(order.per_epoch, order.per_epoch), seen)


def test_documents_are_joined_by_end_of_text(run: Run, tmp_path: Path) -> None:
    assert run(tmp_path / "model", steps=1) == 0
    tokenizer = load_tokenizer(tmp_path / "model")
    stream = encode(tokenizer, ["the cat", "the dog"]).tolist()
    assert stream.count(0) == 2
    assert stream[-1] == 0
    assert tokenizer.decode(stream) == "the cat<|endoftext|>the dog<|endoftext|>"


def test_bf16_experts_agree_with_the_fp32_ones() -> None:
    config = train_reference.Qwen3MoeConfig(
        hidden_size=16, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, vocab_size=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = train_reference.Qwen3MoeForCausalLM(config)
    experts = model.model.layers[0].mlp.experts
    hidden_ND, ids_NK = torch.randn(10, 16), torch.randint(4, (10, 2))
    weights_NK = torch.full((10, 2), 0.5)
    model.set_experts_implementation("grouped_mm")
    expected = experts(hidden_ND, ids_NK, weights_NK)
    train_reference.ALL_EXPERTS_FUNCTIONS.register(train_reference.BF16_EXPERTS, train_reference.bf16_experts)
    model.set_experts_implementation(train_reference.BF16_EXPERTS)
    actual = experts(hidden_ND, ids_NK, weights_NK)
    actual.sum().backward()
    torch.testing.assert_close(actual, expected, rtol=0.03, atol=0.03 * expected.detach().abs().max().item())
    assert experts.down_proj.grad is not None


def refused(capsys: pytest.CaptureFixture[str], code: int, words: str) -> None:
    """Check for exit code 2 and exactly one line on stderr that says `words`."""
    error = capsys.readouterr().err.strip()
    assert code == 2
    assert "\n" not in error
    assert error.startswith("train_reference: ")
    assert words in error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--corpus", "nowhere"], "there is no train.parquet in nowhere"),
        (["--tokens", "0"], "give exactly one"),
        (["--minutes", "1"], "give exactly one"),
        (["--tokens", "many"], "invalid int value"),
        (["--speed", "9"], "unrecognized arguments"),
        (["--window", "100000"], "--window 100000 needs"),
        (["--window", "0"], "--window is 0"),
        (["--vocab", "99999"], "--vocab is 99999"),
        (["--experts-per-token", "9"], "--experts-per-token 9"),
        (["--hidden", "17"], "--hidden 17"),
        (["--hold", "1"], "--hold is 1.0"),
        (["--device", "abacus"], "--device abacus"),
        (["--init", "nowhere"], "there is no config.json in nowhere"),
        (["--resume"], "start without --resume"),
        (["--evaluate"], "--init DIR"),
    ],
)
def test_bad_flags_give_one_line(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    refused(capsys, run(tmp_path / "model", *flags), words)


def test_a_folder_of_something_else_is_left_alone(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    refused(capsys, run(tmp_path), "is not empty")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    refused(capsys, run(tmp_path / "thesis.txt"), "is not a folder")
    refused(capsys, run(None), "--out is missing")


@pytest.mark.parametrize("damage", ["garbage", "no domain", "no rows", "empty cell"])
def test_a_damaged_corpus_gives_one_line(
    run: Run, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    table = pq.read_table(corpus / "validation.parquet")
    bad, path = tmp_path / "bad", tmp_path / "bad" / "train.parquet"
    bad.mkdir()
    write_split(bad, "validation", 2)
    if damage == "garbage":
        path.write_bytes(b"not parquet")
    elif damage == "empty cell":
        text = pa.array([None] * len(table), pa.string())
        pq.write_table(table.set_column(0, "text", text), path)
    else:
        pq.write_table(table.drop_columns(["domain"]) if damage == "no domain" else table.slice(0, 0), path)
    words = {"garbage": "not a readable parquet", "no domain": "lacks the column domain", "no rows": "has no rows"}
    refused(capsys, run(tmp_path / "model", corpus=bad), words.get(damage, "has empty cells"))
    assert not (tmp_path / "model").exists()


def test_resume_refuses_other_settings_and_a_damaged_checkpoint(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "model"
    monkeypatch.setattr(train_reference, "finish", lambda *_: None)
    assert run(out) == 0
    capsys.readouterr()
    refused(capsys, run(out), "is not empty")
    for changed, words in (
        ({"seed": 4}, "seed is 3, not 4"),
        ({"batch": 3}, "batch is 2, not 3"),
        ({"layers": 3}, "shapes is another"),
    ):
        code = run(out, "--resume", **changed)
        progress, _, error = capsys.readouterr().err.strip().rpartition("\n")
        assert "training tokens" in progress
        assert code == 2
        assert words in error
    checkpoint = out / "state" / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    assert run(out, "--resume") == 2
    assert "is damaged" in capsys.readouterr().err
