"""The bundled reference model: it loads, it fits its size, its card and log agree and name no machine's paths."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

REFERENCE = Path(__file__).parents[2] / "checkpoints" / "reference"
BOOTSTRAP_LOSS = 3.396
FREE = {"public domain", "CC0-1.0"}


def test_it_loads_and_predicts_english_better_than_chance() -> None:
    model = AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    config = model.config
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (12, 64, 4)
    assert (config.hidden_size, config.vocab_size, tokenizer.eos_token_id) == (192, 4096, 0)
    text = "And the LORD said unto Moses, Go in unto Pharaoh, and speak unto him, Thus saith the LORD God"
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss.item() < 3.0


def test_it_is_small_and_complete() -> None:
    files = [path for path in REFERENCE.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 34_000_000
    names = {path.name for path in files}
    assert {"NOTICE.md", "README.md", "training.json", "generation_config.json"} <= names


def test_card_and_log_agree_and_name_no_local_path() -> None:
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
