"""The files that all runs of the disk benchmark read, made once and kept: the model, its stores, and what the resident
model computes.

The model has random weights in a published shape. Experts are normal numbers, so that their exponents are as
compressible as trained ones. What else is random is scaled so that routing has the locality of a trained model's: a
token's own embedding is small beside what the first layer's attention brings of its neighbours, and later layers add
little.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from benchmarks.children import run
from expertcast.cli import main as expertcast
from expertcast.commands.output import say
from expertcast.data.models import load_tokenizer
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.text import bundled_ids
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json
from expertcast.runtime.benchmarking.shapes import SHAPES, STD, random_model, weight_bytes

RUN = "benchmarks.disk_run"
"""Module of one run."""
EMBEDDING, LATER_ATTENTION = 0.05, 0.004
"""Standard deviations of the embeddings, and of the attention's last matrix in all layers but the first."""
_SMALL = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4,
          "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 4096}  # fmt: skip


def olmoe(layers: int, *, small: bool) -> PretrainedConfig:
    """OLMoE-1B-7B with so many layers; `small`: of toy size, for tests."""
    config = SHAPES["olmoe-1b-7b"].config(layers)
    for name, value in (_SMALL if small else {}).items():
        setattr(config, name, value)
    return config


@torch.no_grad()
def local_model(config: PretrainedConfig) -> PreTrainedModel:
    """A model in bf16 whose routing has the locality of a trained model's."""
    model = random_model(config, dtype=torch.bfloat16, device="cpu", seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            embedded, later = "embed_tokens" in name, "o_proj" in name and "layers.0." not in name
            parameter.normal_(std=EMBEDDING if embedded else LATER_ATTENTION if later else STD, generator=generator)
    return model


def write_model(folder: Path, config: PretrainedConfig) -> Json:
    """Write a model in bf16; it is held in memory meanwhile.

    Returns:
        `bytes`, `expert_bytes`, `experts_bytes`, and the settings.
    """
    model = local_model(config)
    model.save_pretrained(folder)
    view = find_moe_layers(model)
    total = sum(weight_bytes(layer.experts) for layer in view)
    return {
        "config": config.to_diff_dict(), "embedding_std": EMBEDDING, "later_attention_std": LATER_ATTENTION,
        "std": STD, "bytes": weight_bytes(model), "experts_bytes": total, "shape": view.shape.as_dict(),
        "expert_bytes": total // (len(view) * view.shape.experts),
    }  # fmt: skip


class Prepared:
    """The files of one `--keep` folder; another model or text needs another one.

    Args:
        folder: where they lie.
        args: of the command line.
    """

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self._args = folder, args
        self.model, self.truth = folder / "model", folder / "truth.safetensors"
        tokens = bundled_ids(load_tokenizer("reference"), args.prompt + args.warm + args.new_tokens)
        self.base_spec: Json = {
            "model": str(self.model), "tokens": tokens, "prompt": args.prompt, "warm": args.warm,
            "timed": args.new_tokens, "threads": args.threads, "truth": None,
        }  # fmt: skip
        """What every run reads."""

    def make(self, codecs: list[str]) -> Json:
        """All that runs over stores of these codecs read; `model`, `stores` and `resident`, with its routing."""
        note = self.folder / "made.json"
        asked = {"layers": self._args.layers, "small": self._args.small, **self.base_spec}
        made: Json = json.loads(note.read_text()) if note.is_file() else {"asked": asked, "stores": {}}
        if made["asked"] != asked:
            raise ExpertcastError(f"{str(self.folder)!r} is of other settings: remove it, or give another --keep")
        if "model" not in made:
            say(f"the model and its stores, in {self.folder}")
            made["model"] = write_model(self.model, olmoe(self._args.layers, small=self._args.small))
        for codec in codecs:
            if codec not in made["stores"]:
                made["stores"][codec] = self._packed(codec)
        if "resident" not in made:
            made["resident"] = self._resident()
        note.write_text(json.dumps(made))
        return made

    def store_folder(self, codec: str) -> Path:
        """Of one codec."""
        return self.folder / f"store-{codec}"

    def _packed(self, codec: str) -> Json:
        result = self.folder / "packed.json"
        options = ["--store-folder", str(self.store_folder(codec)), "--codec", codec, "--device", "cpu"]
        if expertcast(["store", str(self.model), *options, "--json", str(result)]):
            raise ExpertcastError(f"the store of codec {codec} was not packed")
        packed = json.loads(result.read_text())
        return {key: packed[key] for key in ("nbytes", "stored_nbytes", "ratio", "bound")}

    def _resident(self) -> Json:
        say("the resident model")
        spec = {**self.base_spec, "kind": "resident", "remember": str(self.truth)}
        found = run(RUN, spec, folder=self.folder)
        if "failed" in found:
            raise ExpertcastError(f"the resident model: {found['failed']}")
        return {name: found[name] for name in ("resident_tpot_s", "ids")}
