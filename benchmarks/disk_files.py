"""Files of the disk benchmark, created once: the model, its stores, and the resident model's results.

The model has random weights in a published shape. Its experts are normally distributed, so their exponents compress as
well as trained ones. The other weights are scaled to give routing the locality of a trained model: a token's own
embedding is small compared with the first layer's attention over its neighbours, and later layers add little.
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
"""Module of the child process."""
EMBEDDING, LATER_ATTENTION = 0.05, 0.004
"""Standard deviations of the embeddings, and of the attention's output matrix in all layers but the first."""
_SMALL = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4,
          "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 4096}  # fmt: skip


def olmoe(layers: int, *, small: bool) -> PretrainedConfig:
    """Return OLMoE-1B-7B's config with `layers` layers; `small` shrinks it for tests."""
    config = SHAPES["olmoe-1b-7b"].config(layers)
    for name, value in (_SMALL if small else {}).items():
        setattr(config, name, value)
    return config


@torch.no_grad()
def local_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a random bf16 model whose routing has the locality of a trained model."""
    model = random_model(config, dtype=torch.bfloat16, device="cpu", seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            embedded, later = "embed_tokens" in name, "o_proj" in name and "layers.0." not in name
            parameter.normal_(std=EMBEDDING if embedded else LATER_ATTENTION if later else STD, generator=generator)
    return model


def write_model(folder: Path, config: PretrainedConfig) -> Json:
    """Create a model in memory and write it in bf16.

    Returns:
        `bytes`, `expert_bytes`, `experts_bytes`, `shape` and the settings.
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
    """Files of one `--keep` folder. Another model or text needs another folder.

    Args:
        folder: the folder.
        args: arguments of the command line.
    """

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self._args = folder, args
        self.model, self.truth = folder / "model", folder / "truth.safetensors"
        tokens = bundled_ids(load_tokenizer("reference"), args.prompt + args.warm + args.new_tokens)
        self.base_spec: Json = {
            "model": str(self.model), "tokens": tokens, "prompt": args.prompt, "warm": args.warm,
            "timed": args.new_tokens, "threads": args.threads, "truth": None,
        }  # fmt: skip
        """Input of every run."""

    def make(self, codecs: list[str]) -> Json:
        """Create missing files; return `model`, `stores` (by codec) and `resident`, which has the routing.

        Raises:
            ExpertcastError: the folder belongs to other settings, or a step failed.
        """
        note = self.folder / "made.json"
        asked = {"layers": self._args.layers, "small": self._args.small, **self.base_spec}
        made: Json = json.loads(note.read_text()) if note.is_file() else {"asked": asked, "stores": {}}
        if made["asked"] != asked:
            raise ExpertcastError(f"{str(self.folder)!r} belongs to other settings: remove it, or use another --keep")
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
        """Return the folder of a codec's store."""
        return self.folder / f"store-{codec}"

    def _packed(self, codec: str) -> Json:
        result = self.folder / "packed.json"
        options = ["--store-folder", str(self.store_folder(codec)), "--codec", codec]
        if expertcast(["store", str(self.model), *options, "--json", str(result)]):
            raise ExpertcastError(f"packing the store of codec {codec} failed")
        packed = json.loads(result.read_text())
        return {key: packed[key] for key in ("nbytes", "stored_nbytes", "ratio", "bound")}

    def _resident(self) -> Json:
        say("the resident model")
        spec = {**self.base_spec, "kind": "resident", "remember": str(self.truth)}
        found = run(RUN, spec, folder=self.folder)
        if "failed" in found:
            raise ExpertcastError(f"the resident model: {found['failed']}")
        return {name: found[name] for name in ("resident_tpot_s", "ids")}
