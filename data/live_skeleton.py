"""The router skeleton of a model that a server runs in modules of its own: weights by layer, no paths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save
from torch import nn

from expertcast.checkpoints.provenance import without_folders
from expertcast.data.shard_file import write_atomically
from expertcast.predictors.artefacts import digest, seal
from expertcast.predictors.plain import Json
from expertcast.predictors.view import MoEView

CONFIG, WEIGHTS, LAYERS = "config.json", "model.safetensors", "layers.json"
FOUND = "found"
"""In the place of the layers' paths."""
LIVE_REMEDY = "the server's routers have other weights than those of transformers: collect with expertcast collect"


def save_live_skeleton(view: MoEView, config: Json, folder: Path) -> None:
    """Write the skeleton of a model (drawn in :mod:`expertcast.data.skeleton`) that transformers did not make.

    Args:
        view: the routers and norms are modules with the weights that transformers' have, by the same names.
        config: transformers' configuration of the model.
        folder: made where it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{name}.{key}": tensor.detach().cpu().contiguous()
        for name, module in kept(view, own_names=True)
        for key, tensor in module.state_dict().items()
    }
    dtype = str(view[0].dtype).removeprefix("torch.")
    files = {CONFIG: (json.dumps({**config, "dtype": dtype}, indent=2) + "\n").encode(), WEIGHTS: save(tensors)}
    for name, content in files.items():
        write_atomically(folder / name, content)
    digests = {name: digest(content) for name, content in files.items()}
    description = {
        "model_id": without_folders(view.model_id),
        "top_k": view.shape.top_k,
        "layers": FOUND,
        "files": digests,
    }
    write_atomically(folder / LAYERS, json.dumps(seal(description), indent=2).encode())


def kept(view: MoEView, own_names: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a skeleton holds, with their paths in the model; by layer with `own_names`."""
    for layer in view:
        if layer.norm_name:
            yield f"{layer.index}.norm" if own_names else layer.norm_name, layer.norm
        yield f"{layer.index}.router" if own_names else layer.router_name, layer.router
