"""expertcast.offload: a `transformers` MoE model whose experts live in host memory."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Sequence

from transformers import PreTrainedModel

from expertcast.data.discovery import find_moe_layers
from expertcast.data.early import EarlyAttention
from expertcast.data.release import check_release
from expertcast.predictors import ExpertcastError
from expertcast.runtime.arguments import (
    executed_layers,
    make_monitor,
    make_refit,
    recall_per_layer,
    resolve_next_token,
    resolve_predictor,
    slot_count,
)
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.effects import remarks
from expertcast.runtime.engine.guards import refuse_shared
from expertcast.runtime.engine.kernels import SlotKernel, kernel_of
from expertcast.runtime.engine.seam import EXPERTS_NAME, is_attached
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.offload_parts import OffloadParts
from expertcast.runtime.offloaded import OffloadedModel
from expertcast.runtime.recording.observer import Observer, check_observers
from expertcast.runtime.storage.layout import device_of
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.transport import make_link, make_store


def offload(
    model: PreTrainedModel, config: OffloadConfig | None = None, *, observers: Sequence[Observer] = (), **fields: object
) -> OffloadedModel:
    """Move a model's experts to host memory and run it from a few slots.

    Args:
        model: a `transformers` model of a supported family, on the device that computes.
        config: how; none is the default :class:`OffloadConfig`.
        observers: are told what happens, such as a :class:`expertcast.runtime.recording.recorder.Recorder`.
        fields: fields of :class:`OffloadConfig` that are other than in `config`, such as `predictor` or `slots`.

    Returns:
        An object that is also a context manager; `.model` is the model that was given. Options that change the output
        in mode 'exact', or have no effect, are warned of.

    Raises:
        ExpertcastError: no model, too few slots, an unknown option, mode, link or predictor, other observers, a
            predictor of another model, a model that is offloaded already, has no weights or is not supported; or
            transformers is too old.
    """
    check_release("offloading")
    config = OffloadConfig.of(config, fields)
    check_observers(observers)
    if not hasattr(model, "modules"):
        raise ExpertcastError(f"{reprlib.repr(model)} is no loaded model: expertcast.load_offloaded(...) loads one")
    _refuse_offloaded(model)
    refuse_shared(config.link, config.store, config.predictor)
    view = find_moe_layers(model)
    device = config.store.device if isinstance(config.store, ExpertStore) else device_of(view)
    policies = config.resolved_policies()
    bound, checkpoint = resolve_predictor(config.resolved_predictor(), view)
    if bound is not None:
        if bound.looks != "layers":
            raise ExpertcastError(f"{bound.name} forecasts tokens, not layers: give it as next_token=, not predictor=")
        bound.to(device)
    speculator = Speculator(
        view,
        bound,
        layers=executed_layers(config, len(view), recall_per_layer(checkpoint, config.ahead)),
        true_weights=config.true_weights,
        prefill=config.speculate_prefill,
        ahead=config.ahead,
        router_free=config.router_free,
        reach=config.reach,
        early=EarlyAttention(model, view) if bound is not None and bound.uses_early else None,
    )
    speculator.refit = make_refit(config, bound)
    for line in remarks(config):
        warnings.warn(line, stacklevel=2)
    count = slot_count(config, view)
    parts = OffloadParts(
        store=make_store(config, view, device),
        slots=count,
        link=make_link(config, device.type),
        policies=policies,
        speculator=speculator,
        next_token=resolve_next_token(config.next_token, view, policies, device),
        kernel=SlotKernel(kernel_of(model), count),
        cache=config.cache,
        likely=config.likely,
        gated=config.forecasts == "worth",
        draft=config.draft,
        drift=make_monitor(config, view, bound, checkpoint),
        observers=observers,
    )
    return OffloadedModel(model, parts)


def _refuse_offloaded(model: PreTrainedModel) -> None:
    if is_attached(model):
        raise ExpertcastError("this model is offloaded already: close the other offload first")
    if EXPERTS_NAME in model.get_experts_implementation().values():
        raise ExpertcastError(
            f"the model's config says {EXPERTS_NAME!r}, as that of an offloaded model does: give each model a config "
            "of its own (copy.deepcopy), or set another experts implementation"
        )
