"""The training script on a tiny corpus and model, and the bundled model that it wrote."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from scripts import train_reference
from scripts.train_reference import Trainer, WindowOrder
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

REFERENCE = Path(__file__).parents[2] / "checkpoints" / "reference"
SIZES = {
    "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "hidden_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 300, "intermediate_size": 64,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 64,
}  # fmt: skip
OPTIONS = {"window": 16, "batch": 2, "warmup": 2, "seed": 3, "log-every": 1}
STEP_TOKENS = 32
BOOTSTRAP_LOSS = 3.396
FREE = {"public domain", "CC0-1.0"}
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
    """Folder with a corpus and a model's config."""
    folder = tmp_path_factory.mktemp("corpus")
    write_split(folder, "train", 20)
    write_split(folder, "validation", 3)
    Qwen3MoeConfig(**SIZES).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def leave_process_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setattr(train_reference, "keep_freed_memory", lambda: None)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(corpus: Path) -> Run:
    def run_script(out: Path, *flags: str, steps: int = 6, **changed: object) -> int:
        options = {**OPTIONS, "corpus": corpus, "config": corpus, "tokens": steps * STEP_TOKENS, "out": out, **changed}
        given = [part for name, value in options.items() if value for part in (f"--{name}", str(value))]
        return train_reference.main([*given, *flags])

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
    command = "train_reference.py --corpus ../shared/corpus --out model"
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


def test_window_order_visits_every_window_once_and_depends_on_the_seed() -> None:
    stream = torch.arange(1000).numpy().astype("uint16")
    order = WindowOrder(stream, 16, seed=1)
    seen = order.batch(0, order.per_epoch)
    assert len(seen[:, 0].unique()) == order.per_epoch
    assert torch.equal(seen - seen[:, :1], torch.arange(16).expand_as(seen))
    assert torch.equal(WindowOrder(stream, 16, seed=1).batch(7, 3), seen[7:10])
    assert not torch.equal(WindowOrder(stream, 16, seed=2).batch(0, order.per_epoch), seen)
    assert not torch.equal(order.batch(order.per_epoch, order.per_epoch), seen)


def test_a_folder_of_something_else_and_other_settings_are_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(words: str, *flags: str, **changed: object) -> None:
        assert run(tmp_path, *flags, **changed) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]

    refused("start without --resume", "--resume")
    refused("--window 100000 needs", window=100_000)
    (tmp_path / "thesis.txt").write_text("mine")
    refused("is not empty")
    (tmp_path / "thesis.txt").unlink()
    monkeypatch.setattr(train_reference, "finish", lambda *_: None)
    assert run(tmp_path) == 0
    refused("is not empty")
    refused("seed is 3, not 4", "--resume", seed=4)
    refused("batch is 2, not 3", "--resume", batch=3)
    checkpoint = tmp_path / "state" / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    refused("is damaged", "--resume")


def test_the_bundled_model_predicts_english_better_than_chance() -> None:
    model = AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    config = model.config
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (12, 64, 4)
    assert (config.hidden_size, config.vocab_size, tokenizer.eos_token_id) == (192, 4096, 0)
    text = "And the LORD said unto Moses, Go in unto Pharaoh, and speak unto him, Thus saith the LORD God"
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss.item() < 3.0


def test_the_bundled_model_is_small_and_complete() -> None:
    files = [path for path in REFERENCE.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 34_000_000
    names = {path.name for path in files}
    assert {"NOTICE.md", "README.md", "training.json", "generation_config.json"} <= names


def test_its_card_and_log_agree_and_name_no_local_path() -> None:
    card = (REFERENCE / "README.md").read_text()
    report = json.loads((REFERENCE / "training.json").read_text())
    assert f"| all | {report['validation_loss']['all']:.3f} |" in card
    assert report["validation_loss"]["all"] < BOOTSTRAP_LOSS
    assert report["command"] in card
    for path in (*REFERENCE.glob("*.json"), *REFERENCE.glob("*.md")):
        assert not re.search(r"(?<![\w.:/])/(root|home|work|tmp|mnt|usr)/", path.read_text()), path


@pytest.mark.parametrize("split", ["validation", "test"])
def test_the_bundled_text_is_free_and_has_several_domains(split: str) -> None:
    rows = pq.read_table(REFERENCE / "text" / f"{split}.parquet").to_pylist()
    assert {row["license"] for row in rows} <= FREE
    assert len({row["domain"] for row in rows}) >= 5
    assert sum(len(row["text"]) for row in rows) > 500_000
