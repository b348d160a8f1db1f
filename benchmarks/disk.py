"""Experts read from a disk beside accelerate's offload: one bf16 checkpoint, the same tokens, equal memory.

    python -m benchmarks disk --keep FOLDER --page PAGE.md

The model has OLMoE-1B-7B's shape with random weights whose routing has the locality of a trained model: a token's own
embedding is small beside the first layer's attention over its neighbours, and later layers add little.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.life_size_files import deviation
from benchmarks.results import ResultFile, result_parser
from benchmarks.shapes import SHAPES, random_model, weight_bytes
from benchmarks.side_by_side import SETTINGS, Side, SideBySide, add_options, page
from expertcast.commands.output import say
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors.messages import Json

PEER, _RUN = "accelerate", "benchmarks.disk_peer"
SIDES = (
    Side("in place", {"in_place": True, "store_folder": None}),
    Side(f"{PEER}, half", {"share": 0.5}, peer=_RUN),
    Side(f"{PEER}, mapped", {"share": 0.0}, peer=_RUN, where=("limited",)),
)
"""`in place` reads experts from the checkpoint's own files into slots; accelerate loads layers into half of the memory,
or none, and maps the others."""
_SMALL = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4,
          "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 4096}  # fmt: skip


@torch.no_grad()
def write_model(folder: Path, layers: int, *, small: bool) -> Json:
    """Write the model unless it is there; return what the comparison needs to know of it."""
    note = folder / "about.json"
    if not note.is_file():
        say(f"the model, {folder}")
        config = SHAPES["olmoe-1b-7b"].config(layers)
        for name, value in (_SMALL if small else {}).items():
            setattr(config, name, value)
        model, generator = random_model(config, dtype=torch.bfloat16, device="cpu", seed=0), torch.Generator()
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=deviation(name), generator=generator.manual_seed(len(name)))
        model.save_pretrained(folder)
        view = find_moe_layers(model)
        nbytes = sum(weight_bytes(layer.experts) for layer in view)
        about = {"layers": layers, "count": layers * view.shape.experts, "top_k": view.shape.top_k}
        about["experts_bytes"] = nbytes
        note.write_text(json.dumps(about))
    return {"path": str(folder), **json.loads(note.read_text())}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the result lacks, and write the page."""
    parser = result_parser("disk", __doc__)
    add_options(parser, memory=["3GB", "2GB"], layers=4)
    parser.set_defaults(prompt=32, readahead=[128], peer=Path(sys.executable))
    args = parser.parse_args(arguments)
    args.sides = args.sides or [side.name for side in SIDES]
    folder = args.keep.resolve() / f"olmoe-{args.layers}-layers{'-small' * args.small}"
    args.keep.mkdir(parents=True, exist_ok=True)
    file = ResultFile(args, {name: getattr(args, name) for name in SETTINGS}, args.keep)
    bench = SideBySide(args, file, SIDES, write_model(folder, args.layers, small=args.small))
    bench.measure()
    file.publish(f"OLMoE-1B-7B's shape in bf16, {args.layers} layers", page(bench.result, PEER))
    return 0
