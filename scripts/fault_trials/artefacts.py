"""Small artefacts of every kind, made once by the commands themselves, and the model that they are of."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

TRACES, ESTIMATOR, FREE, NEXT_TOKEN = "traces", "estimator", "quasi_hidden", "next_token"
STORE, CONFIG, DATA = "store", "config", "data"
ARTEFACTS = (TRACES, ESTIMATOR, FREE, NEXT_TOKEN, STORE, CONFIG, DATA)
CONFIG_FILE = "offload.json"
PROMPT = "It was a dark and stormy night"
TEXT = "the old man went down to the river and saw that the boat was gone so he sat by the water until morning came"
TOKENS = 360
_SPEED = ("bandwidth", "latency")
"""Left out: a file may ask for a link of one byte per second, and gets it."""
ESTIMATOR_SETTINGS = "parameters=2000", "steps=6", "step_tokens=32"
NEXT_TOKEN_SETTINGS = "steps=4", "tokens=2"


@dataclass(frozen=True, slots=True)
class Made:
    """Folders of one set of artefacts."""

    root: Path

    @property
    def model(self) -> Path:
        """A model with a tokenizer."""
        return self.root / "model"

    @property
    def text(self) -> Path:
        """What the traces are of."""
        return self.root / "text.jsonl"

    def __getitem__(self, name: str) -> Path:
        return self.root / name


def collect_words(made: Made, out: Path, data: Path | None = None) -> list[str]:
    """The command that collects them, of `data` where that is given."""
    return ["collect", str(made.model), "--data", str(data or made.text), "--tokens", str(TOKENS), "--window", "16",
            "--batch-size", "2", "--out", str(out)]  # fmt: skip


def train_words(traces: Path, name: str, out: Path) -> list[str]:
    """The command that trains a checkpoint."""
    settings = {ESTIMATOR: ESTIMATOR_SETTINGS, NEXT_TOKEN: NEXT_TOKEN_SETTINGS}.get(name, ())
    words = ["train", str(traces), "--predictor", name, "--out", str(out)]
    return [*words, "--set", *settings] if settings else words


def generate_words(made: Made, *more: str) -> list[str]:
    """The command that decodes a few tokens with a third of the experts."""
    slots = () if "--config" in more else ("--slots", "8")
    return ["generate", str(made.model), "--prompt", PROMPT, "--new-tokens", "3", *slots, *more]


def make(made: Made, seed: int) -> None:
    """Make all of them, from weights drawn from `seed`. Runs tensor operations."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from expertcast.cli import main
    from expertcast.data.collect import collect
    from expertcast.data.models import load_model, load_tokenizer
    from expertcast.data.text import load_documents
    from expertcast.runtime.config import OffloadConfig

    made.root.mkdir(parents=True)
    _save_model(made.model, seed)
    lines = [{"text": TEXT[number % 7 * 5 :] + TEXT[: number % 5 * 4] + "."} for number in range(24)]
    made.text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model, tokenizer, documents = load_model(made.model), load_tokenizer(made.model), load_documents([str(made.text)])
    collect(model, tokenizer, documents, made[TRACES], tokens=TOKENS, window=16, batch_size=2, shard_bytes=40_000)
    runs = [train_words(made[TRACES], name, made[name]) for name in (ESTIMATOR, FREE, NEXT_TOKEN)]
    runs += [generate_words(made, "--store-folder", str(made[STORE]))]
    for words in runs:
        assert main(words) == 0, words
    made[DATA].mkdir()
    pq.write_table(pa.table({"text": [line["text"] for line in lines[:12]]}), made[DATA] / "a.parquet")
    shutil.copy(made.text, made[DATA] / "b.jsonl")
    (made[DATA] / "c.txt").write_text("\n\n".join([TEXT] * 60))
    made[CONFIG].mkdir()
    values = OffloadConfig(slots=8, predictor="next_norm", mode="exact").as_dict()
    values = {name: value for name, value in values.items() if name not in _SPEED}
    (made[CONFIG] / CONFIG_FILE).write_text(json.dumps(values, indent=2))


def _save_model(folder: Path, seed: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from expertcast.checkpoints.bundled import REFERENCE
    from expertcast.data.models import load_tokenizer

    tokenizer = load_tokenizer(REFERENCE)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=8, intermediate_size=16,
        norm_topk_prob=True, initializer_range=0.3, max_position_embeddings=128, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
