"""The files that all runs read, made once and kept: the model, its stores, and what the resident model computes.

The model has random weights in a published shape. Experts are normal numbers, so that their exponents are as
compressible as trained ones. What else is random is scaled so that routing has the locality of a trained model's: a
token's own embedding is small beside what the first layer's attention brings of its neighbours, and later layers add
little.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from transformers import PretrainedConfig

from benchmarks.children import call, run
from benchmarks.disk_sides import OWN, PROCESS, Side
from expertcast.commands.output import say
from expertcast.data.models import load_tokenizer, meta_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.text import load_documents
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json
from expertcast.runtime.benchmarking.shapes import SHAPES, STD, weight_bytes

EMBEDDING, LATER_ATTENTION = 0.05, 0.004
"""Standard deviations of the embeddings, and of the attention's last matrix in all layers but the first."""
_CHUNK = 1 << 24
"""Numbers drawn at a time."""
_SMALL = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4,
          "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 4096}  # fmt: skip


def olmoe(layers: int, *, small: bool) -> PretrainedConfig:
    """OLMoE-1B-7B with so many layers; `small`: of toy size, for tests."""
    config = SHAPES["olmoe-1b-7b"].config(layers)
    for name, value in (_SMALL if small else {}).items():
        setattr(config, name, value)
    return config


def write_model(folder: Path, config: PretrainedConfig, *, seed: int = 0) -> Json:
    """Write `config.json` and `model.safetensors`, unless they are there with the same settings.

    Args:
        folder: made if need be.
        config: of the model; weights are bf16.
        seed: the same gives the same weights.

    Returns:
        `bytes`, `expert_bytes`, `experts_bytes`, and the settings.

    Raises:
        ExpertcastError: another model lies there.
    """
    skeleton = meta_model(config, torch.bfloat16)
    view = find_moe_layers(skeleton)
    total = sum(weight_bytes(layer.experts) for layer in view)
    made: Json = {
        "config": config.to_diff_dict(), "seed": seed, "embedding_std": EMBEDDING,
        "later_attention_std": LATER_ATTENTION, "std": STD, "bytes": weight_bytes(skeleton), "experts_bytes": total,
        "expert_bytes": total // (len(view) * view.shape.experts), "shape": view.shape.as_dict(),
    }  # fmt: skip
    made = json.loads(json.dumps(made))
    note = folder / "made.json"
    if note.is_file():
        if json.loads(note.read_text()) != made:
            raise ExpertcastError(f"{str(folder)!r} holds another model: remove it, or give another --keep")
        return made
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(skeleton).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    parameters = dict(skeleton.named_parameters())
    with (folder / "model.safetensors").open("wb") as file:
        _write_header(file, parameters)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in parameters.items():
            for part in _drawn(name, parameter, generator):
                file.write(part.view(torch.int16).numpy().data)
        os.fsync(file.fileno())
    note.write_text(json.dumps(made))
    return made


def sizes(config: PretrainedConfig) -> int:
    """Bytes of a model in bf16."""
    return weight_bytes(meta_model(config, torch.bfloat16))


def text_tokens(count: int) -> list[int]:
    """Tokens of English text, as the bundled model's tokenizer counts them: words come again as they do in a text."""
    tokenizer = load_tokenizer("reference")
    found: list[int] = []
    for document in load_documents(["reference"]):
        found += tokenizer(document.text)["input_ids"]
        if len(found) >= count:
            return found[:count]
    raise ExpertcastError(f"the bundled text has {len(found)} tokens, {count} are needed: give fewer --new-tokens")


def _write_header(file: BinaryIO, parameters: dict[str, torch.nn.Parameter]) -> None:
    entries, at = {}, 0
    for name, parameter in parameters.items():
        end = at + 2 * parameter.numel()
        entries[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text = text.ljust(-(-(len(text) + 8) // 4096) * 4096 - 8)
    file.write(len(text).to_bytes(8, "little") + text)


def _drawn(name: str, parameter: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """The numbers of one parameter in order, some at a time."""
    if parameter.dim() == 1:
        yield torch.ones(parameter.numel(), dtype=torch.bfloat16)
        return
    std = STD
    if "embed_tokens" in name:
        std = EMBEDDING
    elif "o_proj" in name and "layers.0." not in name:
        std = LATER_ATTENTION
    for start in range(0, parameter.numel(), _CHUNK):
        count = min(_CHUNK, parameter.numel() - start)
        yield torch.randn(count, generator=generator).mul_(std).bfloat16()


RUN = "benchmarks.disk_run"
"""Module of one run."""
PROCESS_OPTIONS = {"persistence": 0.3, "accuracy": 0.9}
"""Of the routing that is drawn: with what comes again by chance about .45 of the experts stay, as in real models (.43
in Qwen3-30B-A3B); forecasts are as good as trained ones."""
SHARES = (0.08, 0.15, 0.3)
"""Of the experts, at which a cache's hits over the routing are counted."""
_ROOM = 1.05


def codecs(sides: Sequence[Side]) -> list[str]:
    """Those of the sides, and raw: the disk's own rate and the memory for all are measured with it."""
    return list(dict.fromkeys(["raw", *(side.codec for side in sides)]))


class Prepared:
    """The files of one `--keep` folder.

    Args:
        folder: where they lie.
        args: of the command line.
    """

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self._args = folder, args
        self.model, self.truth = folder / "model", folder / "truth"
        self.ids: dict[str, list[list[list[int]]]] = {}
        """Routing [T, L, K] of each workload, once made."""
        self.tokens = text_tokens(args.prompt + args.warm + args.new_tokens)

    @property
    def base_spec(self) -> Json:
        """What every run is told."""
        args = self._args
        return {
            "model": str(self.model), "tokens": self.tokens, "prompt": args.prompt, "warm": args.warm,
            "timed": args.new_tokens, "threads": args.threads, "process": PROCESS_OPTIONS, "truth": None,
            "remember": None,
        }  # fmt: skip

    def make(self, sides: Sequence[Side]) -> Json:
        """All that some sides read; `model`, `stores`, `workloads`."""
        config = olmoe(self._args.layers, small=self._args.small)
        say(f"the model and its stores, in {self.folder}")
        if not (self.model / "made.json").is_file():
            self._check_room(config)
        model = write_model(self.model, config)
        stores = {codec: self._store(codec) for codec in codecs(sides)}
        return {"model": model, "stores": stores, "workloads": self._workloads()}

    def store_folder(self, codec: str) -> Path:
        """Of one codec."""
        return self.folder / f"store-{codec}"

    def _check_room(self, config: object) -> None:
        shape = sizes(config)
        needed = _ROOM * 3 * shape
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise ExpertcastError(
                f"the model and two stores need {needed / 1e9:.0f} GB and {str(self.folder)!r} has "
                f"{free / 1e9:.0f} free: give fewer --layers, or another --keep"
            )

    def _store(self, codec: str) -> Json:
        """Pack, by `expertcast store`; the folder's own note says what it said."""
        note = self.store_folder(codec) / "packed.json"
        if not note.is_file():
            folder = str(self.store_folder(codec))
            say(f"packing, codec {codec}")
            options = ("--store-folder", folder, "--codec", codec, "--device", "cpu")
            made = self.folder / "packed.json"
            call("expertcast.cli", "store", str(self.model), *options, "--json", str(made))
            made.replace(note)
        packed = json.loads(note.read_text())
        return {key: packed[key] for key in ("nbytes", "stored_nbytes", "ratio", "bound")}

    def _workloads(self) -> Json:
        """The resident model's run, once for these tokens."""
        args, note = self._args, self.truth / "workloads.json"
        asked = {"tokens": self.tokens, "prompt": args.prompt, "process": PROCESS_OPTIONS, "threads": args.threads}
        if note.is_file():
            kept = json.loads(note.read_text())
            if kept["asked"] == asked and "ids" in kept:
                self.ids = kept["ids"]
                return dict(kept["found"])
        say("the resident model")
        self.truth.mkdir(exist_ok=True)
        spec = {**self.base_spec, "kind": "resident", "remember": str(self.truth), "shares": SHARES}
        found = run(RUN, spec, folder=self.folder)
        if "failed" in found:
            raise ExpertcastError(f"the resident model: {found['failed']}")
        self.ids = {workload: found[workload].pop("ids") for workload in (OWN, PROCESS)}
        kept = {workload: found[workload] for workload in (OWN, PROCESS)}
        note.write_text(json.dumps({"asked": asked, "found": kept, "ids": self.ids}))
        return kept


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a side takes beside its slots, measured; so that all get the same memory.

    The base is what our direct side needs without slots, and everyone gets it. A side of ours that needs more takes it
    from its slots.
    """

    beside: dict[str, int]
    """Bytes by codec."""
    spare: int = 64 << 20

    @property
    def base(self) -> int:
        """Bytes beside the experts' share."""
        return self.beside["raw"] + self.spare

    def slots(self, codec: str, share: int) -> int:
        """Bytes of slots out of a share of so many bytes."""
        return share - max(0, self.beside[codec] - self.beside["raw"])
