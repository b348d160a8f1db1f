"""Router skeleton: the norms and routers of a model without its experts.

With it, traces can be scored and predictors trained without the model:

    skeleton/config.json          transformers' configuration of the model
    skeleton/model.safetensors    weights by MoE layer: `0.norm.*`, `0.router.*`, and `0.given.*` (further tensor
                                  arguments of the router)

The configuration builds the model on the meta device, where the layers are found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import Tensor, nn

from expertcast.predictors.artefacts import read_tensors, write_atomically
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.view import MoEView, OwnTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG, WEIGHTS = "config.json", "model.safetensors"
REMEDY = "collect the traces again"


def check_code(model: PreTrainedModel) -> None:
    """Raise an error if a skeleton of the model could not be loaded.

    Raises:
        ExpertcastError: the model's class is custom code, which a skeleton does not store.
    """
    from transformers.dynamic_module_utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

    if type(model).__module__.partition(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME:
        raise ExpertcastError(
            f"{type(model).__name__} is custom code of the model, which traces cannot store: train online (expertcast "
            "train MODEL --data D --trust-remote-code), which stores nothing"
        )


def save_skeleton(view: MoEView, config: Json, folder: Path) -> None:
    """Write the router skeleton of a model.

    Args:
        view: routers and norms with their weights.
        config: transformers' configuration of the model.
        folder: destination, created if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(view[0].dtype).removeprefix("torch.")  # may differ from the configuration's dtype
    write_atomically(folder / CONFIG, (json.dumps({**config, "dtype": dtype}, indent=2) + "\n").encode())
    write_atomically(folder / WEIGHTS, save({name: each.cpu().contiguous() for name, each in _tensors(view).items()}))


def load_skeleton(folder: Path, model_id: str, device: torch.device | str = "cpu") -> MoEView:
    """Load a skeleton: norms and routers with weights, everything else on the meta device.

    Args:
        folder: folder of the skeleton.
        model_id: name of the model.
        device: device of the weights.

    Raises:
        ExpertcastError: the folder has no skeleton, or weights of another model.
    """
    from expertcast.data.models import meta_model
    from expertcast.data.moe_layers import find_moe_layers
    from expertcast.data.source import ModelSource

    try:
        view = replace(find_moe_layers(meta_model(ModelSource.of(folder))), model_id=model_id)
    except ExpertcastError as error:
        raise ExpertcastError(f"{folder} is not a valid router skeleton: {error}; {REMEDY}") from error
    tensors, _ = read_tensors(folder / WEIGHTS, _tensors(view), REMEDY)
    for name, module in _modules(view):
        own = {key: tensors[f"{name}.{key}"].to(device) for key in module.state_dict()}
        module.load_state_dict(own, assign=True)
        module.requires_grad_(False)
        module.eval()
    for name, given in _given(view):
        if given.name in given.owner._parameters:
            given.owner._parameters[given.name] = nn.Parameter(tensors[name], requires_grad=False)
        else:
            given.owner._buffers[given.name] = tensors[name]
    return view


def _tensors(view: MoEView) -> dict[str, Tensor]:
    """Return the tensors of a skeleton by name."""
    own = {f"{name}.{key}": tensor for name, module in _modules(view) for key, tensor in module.state_dict().items()}
    return own | {name: given.tensor.detach() for name, given in _given(view)}


def _modules(view: MoEView) -> Iterator[tuple[str, nn.Module]]:
    for layer in view:
        if layer.norm_name:
            yield f"{layer.index}.norm", layer.norm
        yield f"{layer.index}.router", layer.router


def _given(view: MoEView) -> Iterator[tuple[str, OwnTensor]]:
    """Yield the further tensor arguments of the routers."""
    for layer in view:
        yield from ((f"{layer.index}.given.{name}", value) for name, value in layer.router_arguments
                    if isinstance(value, OwnTensor))  # fmt: skip
