"""What the arguments of :func:`expertcast.offload` stand for: predictor, layers, slots, link."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from expertcast.checkpoints.store import PredictorCheckpoint, load_predictor
from expertcast.predictors import ExpertcastError, MoEView, NextToken, Predictor, names, predictor_class
from expertcast.runtime.links.base import Link
from expertcast.runtime.links.cuda import CudaLink
from expertcast.runtime.links.emulated import EmulatedLink
from expertcast.runtime.links.instant import InstantLink
from expertcast.runtime.links.kernel import KernelLink
from expertcast.runtime.policies import LRU, Fetch, Policies, Standard, TopK
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.store import ExpertStore

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def resolve_predictor(
    given: str | Path | Predictor | None, view: MoEView
) -> tuple[Predictor | None, PredictorCheckpoint | None]:
    """The predictor bound to the model, and the checkpoint it came from.

    Raises:
        ExpertcastError: unknown name, one that must be trained first, or a checkpoint of another model.
    """
    if given is None:
        return None, None
    if isinstance(given, Predictor):
        return given.bind(view), None
    if not Path(given).exists() and str(given) in names():
        cls = predictor_class(str(given))
        made = cls(cls.config_class(), view.shape)
        if made.state_dict():
            raise ExpertcastError(
                f"predictor {given!r} must be trained for a model: give the folder that `expertcast train` wrote"
            )
        return made.bind(view), None
    if not Path(given).exists():
        raise ExpertcastError(
            f"predictor {str(given)!r} is neither a folder nor one of {', '.join(names())}: give a checkpoint's folder"
        )
    return load_predictor(given, view), PredictorCheckpoint.open(given)


def executed_layers(
    mode: str,
    layers: Iterable[int] | None,
    view: MoEView,
    predictor: Predictor | None,
    checkpoint: PredictorCheckpoint | None,
    min_recall: float,
) -> list[int]:
    """Layers that execute their forecast; see :func:`expertcast.offload`.

    Raises:
        ExpertcastError: no predictor to execute, or nothing that says where a hybrid should.
    """
    if mode == "exact":
        return []
    if predictor is None:
        raise ExpertcastError(f"mode {mode!r} executes forecasts: give a predictor")
    if layers is not None:
        return list(layers)
    if mode == "speculate":
        return list(range(len(view)))
    recall = recall_per_layer(checkpoint)
    if recall is None:
        raise ExpertcastError(
            "mode 'hybrid' needs to know where forecasts are good: give layers=[...], or a checkpoint with recall_at_k "
            "in its metrics.json"
        )
    return [layer for layer, value in recall.items() if value >= min_recall]


def recall_per_layer(checkpoint: PredictorCheckpoint | None) -> dict[int, float] | None:
    """Recall@k by target layer on the validation split, as metrics.json has it; of whatever it has, without one."""
    if checkpoint is None:
        return None
    metrics = checkpoint.metrics.get("validation", checkpoint.metrics)
    per_layer = metrics.get("recall_at_k", {}).get(checkpoint.name, {}).get("per_layer")
    if per_layer is None:
        return None
    targets = metrics.get("targets", range(1, len(per_layer) + 1))
    return {int(layer): float(value) for layer, value in zip(targets, per_layer, strict=True)}


def slot_count(
    view: MoEView, block_bytes: int, slots: int | None, memory: str | int | None, cache: bool, overfetch: float
) -> int:
    """Slots to make, at most one per expert.

    Raises:
        ExpertcastError: both or too little of slots and memory, or no size.
    """
    shape = view.shape
    everything = shape.layers * shape.experts
    if memory is not None:
        slots = _bytes(memory) // block_bytes
        if slots < shape.top_k:
            raise ExpertcastError(
                f"memory={memory!r} holds {slots} experts of {block_bytes} bytes, one token needs {shape.top_k}: "
                f"give {shape.top_k * block_bytes} bytes or more"
            )
    elif slots is None:
        # the running layer's, a forecast's, and those of a wrong forecast whose copies are under way
        least = shape.top_k + 2 * -(-int(shape.top_k * overfetch * 100) // 100)
        slots = max(least, everything // 4) if cache else least
    if slots < shape.top_k:
        raise ExpertcastError(
            f"slots={slots} is fewer than the {shape.top_k} experts one token needs: give slots={shape.top_k} or more"
        )
    return min(slots, everything)


def _bytes(memory: str | int) -> int:
    if isinstance(memory, int):
        return memory
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMG]?I?)B?\s*", memory.upper())
    try:
        if match is None:
            raise ValueError
        return int(float(match[1]) * _UNITS[match[2]])
    except (ValueError, KeyError):
        raise ExpertcastError(f"memory={memory!r} is no size: write bytes, or text such as '2GB' or '512MiB'") from None


def resolve_next_token(
    given: str | Path | Predictor | None, view: MoEView, policies: Policies, device: torch.device
) -> NextToken | None:
    """The forecaster of the next tokens, bound to the model and on its device.

    Raises:
        ExpertcastError: another predictor, or no policy that reads its forecasts.
    """
    if given is None:
        return None
    found, _ = resolve_predictor(given, view)
    if not isinstance(found, NextToken):
        raise ExpertcastError(
            f"next_token={str(given)!r} forecasts no tokens: give what `expertcast train --predictor next_token` wrote"
        )
    if not policies.eviction.cls.reads_tokens:
        raise ExpertcastError(
            f"next_token serves the eviction policy 'forecast', not {policies.eviction.name!r}: give "
            "policies=Policies(eviction='forecast')"
        )
    return found.to(device)


def device_decides(policies: Policies) -> bool:
    """Whether the kernel link can follow these policies, which it does on the device."""
    chosen = (policies.eviction.cls, policies.prefetch.cls, policies.miss.cls, policies.routing.cls)
    plain = policies.scope == "global" and policies.pre_eviction.name == "none"
    return plain and chosen == (LRU, TopK, Fetch, Standard)


def make_link(
    link: str | Link, device: str, bandwidth: float | None, latency: float, policies: Policies | None = None
) -> Link | None:
    """The link that `link`, the device type and the emulation's numbers ask for; None where measurement decides.

    Raises:
        ExpertcastError: unknown link, or one that the device or the other arguments rule out.
    """
    if (link == "kernel" or isinstance(link, KernelLink)) and policies is not None and not device_decides(policies):
        raise ExpertcastError(
            "the kernel link decides on the device: lru over all slots, top_k prefetches, every miss fetched; "
            "take link='cuda' for other policies"
        )
    if isinstance(link, Link):
        return link
    if link == "auto":
        link = "auto" if device == "cuda" else "instant" if bandwidth is None and not latency else "emulated"
    emulated = link == "emulated"
    if not emulated and (bandwidth is not None or latency):
        raise ExpertcastError(f"bandwidth and latency belong to the emulated link, not to {link!r}: leave them out")
    if link == "cuda":
        if device != "cuda":
            raise ExpertcastError(f"link 'cuda' needs a model on CUDA, this one is on {device}: use 'emulated'")
        return CudaLink()
    if emulated:
        if device != "cpu":
            raise ExpertcastError(f"the emulated link is for models on the CPU, this one is on {device}: use 'cuda'")
        return EmulatedLink(float("inf") if bandwidth is None else bandwidth, latency)
    if link == "instant":
        return InstantLink()
    if link == "kernel":
        return KernelLink()
    return None


def make_store(
    store: str | ExpertStore,
    folder: str | Path | None,
    view: MoEView,
    device: torch.device,
    fingerprint: str | None = None,
) -> ExpertStore:
    """The store that `store` and `store_folder` ask for.

    Args:
        fingerprint: of the checkpoint that the experts come from; see :class:`DiskStore`.

    Raises:
        ExpertcastError: unknown store, or a folder for one that has no file.
    """
    if isinstance(store, ExpertStore):
        return store
    if store == "disk":
        return DiskStore(view, folder, device=device, fingerprint=fingerprint)
    return ExpertStore(view, device=device, pinned=device.type == "cuda")
