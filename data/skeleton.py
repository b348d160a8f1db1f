"""The router skeleton: the norms and routers of a model without its experts.

A skeleton is a folder that lets traces be scored and predictors be trained where the model itself is not:

    skeleton/config.json          the model's configuration
    skeleton/model.safetensors    weights of the norms before the routers, and of the routers
    skeleton/layers.json          module paths per MoE layer, K, model id, digests of the other two

One of a server (:func:`expertcast.data.live_skeleton.save_live_skeleton`) says no paths: its weights are named by
layer, and the layers are found in the model when it is read.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import TRANSFORMERS_DYNAMIC_MODULE_NAME
from typing_extensions import TypedDict

from expertcast.checkpoints.provenance import without_folders
from expertcast.data.models import meta_model
from expertcast.data.moe_layers import LayerPaths, find_moe_layers, layers_by_name, paths_of
from expertcast.data.trace_format import CONFIG, FOUND, LAYERS, LIVE_REMEDY, WEIGHTS, kept, read_tensors
from expertcast.predictors.artefacts import (
    CLOSED,
    SEAL,
    check_file,
    digest,
    file_digest,
    read_json,
    seal,
    warn_unsealed,
)
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoEView, OwnTensor

REMEDY = "collect the traces again"


@with_config(ConfigDict(extra="allow", strict=True))
class _Config(TypedDict, total=False):
    """Of config.json, which is transformers' own: what makes loops."""

    num_hidden_layers: Annotated[int, Field(ge=0, le=1000)] | None
    text_config: _Config | None


@with_config(CLOSED)
class _Description(TypedDict):
    """layers.json"""

    model_id: str
    top_k: Annotated[int, Field(ge=1, le=65_536)]
    layers: Annotated[list[LayerPaths], Field(min_length=1, max_length=10_000)] | Literal["found"]
    """`found` in a server's, whose reader finds them."""
    files: NotRequired[dict[str, str]]
    digest: NotRequired[str]


def check_code(model: PreTrainedModel) -> None:
    """See that a skeleton of the model can be loaded again.

    Raises:
        ExpertcastError: the model's class is code of its own, which a skeleton does not keep.
    """
    if type(model).__module__.partition(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME:
        raise ExpertcastError(
            f"{type(model).__name__} is code that the model brings along, which traces do not keep: train online "
            "(expertcast train MODEL --data D --trust-remote-code), which stores nothing"
        )


def save_skeleton(view: MoEView, model: PreTrainedModel, folder: Path) -> None:
    """Write the router skeleton of `model` into `folder` (see the module's docstring)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.dtype = view[0].dtype  # what it says may be what the weights were once
    config.save_pretrained(folder)
    weights = save({name: tensor.detach().cpu().contiguous() for name, tensor in _tensors(view).items()})
    (folder / WEIGHTS).write_bytes(weights)
    description = {
        "model_id": without_folders(view.model_id),
        "top_k": view.shape.top_k,
        "layers": [paths_of(layer) for layer in view],
        "files": {CONFIG: file_digest(folder / CONFIG), WEIGHTS: digest(weights)},
    }
    (folder / LAYERS).write_text(json.dumps(seal(description), indent=2))


def load_skeleton(folder: Path) -> MoEView:
    """The view of a saved skeleton: norms and routers are real, everything else stays on the meta device.

    Raises:
        ExpertcastError: the folder holds no skeleton, or one of which a file was changed.
    """
    path = folder / LAYERS
    description = read_json(path, _Description, REMEDY)
    _check_files(path, description)
    try:
        model = meta_model(str(folder))
        view = _layers(model, description)
    except ExpertcastError as error:
        raise ExpertcastError(f"{folder} holds no router skeleton: {error}; {REMEDY}") from error
    if view.shape.top_k > view.shape.experts:
        raise ExpertcastError(
            f"{path}: top_k is {view.shape.top_k}, a layer has {view.shape.experts} experts; {REMEDY}"
        )
    own_names = description["layers"] == FOUND
    remedy = LIVE_REMEDY if own_names else REMEDY
    tensors, _ = read_tensors(folder / WEIGHTS, _tensors(view, own_names), remedy)
    for name, module in kept(view, own_names):
        own = {key: tensors[f"{name}.{key}"] for key in module.state_dict()}
        module.load_state_dict(own, assign=True)
        module.requires_grad_(False)
        module.eval()
    for given in _given(view):
        if given.name in given.owner._parameters:
            given.owner._parameters[given.name] = nn.Parameter(tensors[given.path], requires_grad=False)
        else:
            given.owner._buffers[given.name] = tensors[given.path]
    return view


def _layers(model: PreTrainedModel, description: _Description) -> MoEView:
    """The view of the model's layers; K and the model's name are the description's."""
    if not isinstance(description["layers"], str):
        return layers_by_name(model, description["layers"], description["top_k"], description["model_id"])
    return replace(find_moe_layers(model), model_id=description["model_id"])


def _check_files(path: Path, description: _Description) -> None:
    """Compare the files beside layers.json with the digests in it; without them, see that the model has an end."""
    files = description.get("files")
    if files is None:
        warn_unsealed(path)
        read_json(path.with_name(CONFIG), _Config, REMEDY)
        return
    if SEAL not in description or set(files) != {CONFIG, WEIGHTS}:
        raise ExpertcastError(f"{path} does not name its files' digests as it should; {REMEDY}")
    for name, expected in files.items():
        check_file(path.with_name(name), expected, REMEDY)


def _tensors(view: MoEView, own_names: bool = False) -> dict[str, Tensor]:
    """All that a skeleton holds, by name in the model, or by layer."""
    own = {
        f"{name}.{key}": tensor for name, module in kept(view, own_names) for key, tensor in module.state_dict().items()
    }
    return own | {given.path: given.tensor.detach() for given in _given(view)}


def _given(view: MoEView) -> Iterator[OwnTensor]:
    """What blocks give their routers beside the input."""
    for layer in view:
        yield from (value for _, value in layer.router_arguments if isinstance(value, OwnTensor))
