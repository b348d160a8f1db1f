"""Whether --model is the model that traces were collected from."""

from __future__ import annotations

from expertcast.commands.options import ModelOptions
from expertcast.data.discovery import find_moe_layers
from expertcast.data.models import meta_model
from expertcast.data.source import ModelSource
from expertcast.predictors import ExpertcastError, MoEView
from expertcast.predictors.plain import Json

_REMEDY = "give the model that they were collected from"


def check_shape(options: ModelOptions, name: str, traced: MoEView) -> None:
    """See that a model has the shape of the one that was traced, before anything is scored; no weight is read.

    Args:
        options: how it is loaded.
        name: the model's.
        traced: the layers that the traces have.

    Raises:
        ExpertcastError: no such model, or one of another shape.
    """
    shape = find_moe_layers(meta_model(ModelSource.of(name, options.passed_on(name)))).shape
    if shape != traced.shape:
        sizes = " and ".join(
            ", ".join(f"{key}={size}" for key, size in each.as_dict().items()) for each in (shape, traced.shape)
        )
        raise ExpertcastError(f"{name!r} is not the model of these traces, {traced.model_id!r} ({sizes}): {_REMEDY}")


def check_routers(view: MoEView, info: Json) -> None:
    """See that a loaded model is the one that was traced.

    Args:
        view: its layers.
        info: of the traces.

    Raises:
        ExpertcastError: its routers or norms are others.
    """
    if info["fingerprint"] not in (view.fingerprint(), view.router_fingerprint()):
        raise ExpertcastError(
            f"these traces are of {info['model']!r}, whose routers or norms are not those of {view.model_id!r}: "
            f"{_REMEDY}"
        )
