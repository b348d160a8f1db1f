"""Memory plan of an offload: what the device that computes holds beside the slots of the experts.

K experts per token.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from expertcast.data.machine import free_memory, process_memory
from expertcast.data.packed_experts import activation_bytes
from expertcast.predictors.messages import ExpertcastError, format_bytes
from expertcast.predictors.view import MoEView
from expertcast.runtime.config import OffloadConfig, draft_bytes, listed, memory_beside, size_bytes, slots_for
from expertcast.runtime.storage.store import ExpertStore

_RESERVE = 2**29
"""Bytes of free memory that the default budget leaves for other uses, at most an eighth of it."""
_LOCALITY, _MANY_EXPERTS = 6.5, 32


def missing(share: float, experts: int) -> float:
    """Return the share of a token's experts that are not in slots, in a long text.

    Layers of many experts choose the same ones again soon. With `lrfu`, recorded routing of Qwen3-30B-A3B misses within
    a fifth of this with 10 to 30% of the experts in slots; with 5% it misses .65, here .72.

    Args:
        share: of all experts, those in slots.
        experts: E of a layer.
    """
    return (1 - share) ** (_LOCALITY if experts >= _MANY_EXPERTS else 1)


def context_bytes(
    config: OffloadConfig, model: PretrainedConfig, view: MoEView, dtype: torch.dtype, at_once: int | None = None
) -> dict[str, int]:
    """Return the bytes that the longest sequence and drafts take on the device, each with its name.

    Args:
        config: the options, with `context`.
        model: the model's configuration.
        view: its MoE layers.
        dtype: its dtype.
        at_once: most tokens of one forward; None: those of the longest sequence.
    """
    text, layer = model.get_text_config(), view[0]
    tokens = min(config.context, getattr(text, "max_position_embeddings", None) or config.context)
    together = min(at_once or tokens, tokens)
    cache = dtype.itemsize * sum(_pairs(each, layer.hidden_size) for each in text.per_layer_config)
    return {
        f"keys and values of {tokens} tokens": tokens * cache,
        f"the activations of {together} tokens": together * activation_bytes(layer, dtype.itemsize),
        f"draft={config.draft!r}": draft_bytes(config, view),
    }


def _pairs(config: PretrainedConfig, hidden: int) -> int:
    """Return the numbers in a token's keys and values in a layer of hidden size `hidden` with this configuration."""
    heads = int(config.num_attention_heads)
    if getattr(config, "kv_lora_rank", None):  # keys and values are kept expanded
        return heads * int(config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    size = getattr(config, "head_dim", None) or hidden // heads
    return int(2 * size * (getattr(config, "num_key_value_heads", None) or heads))


def parts_beside(
    config: OffloadConfig, store: ExpertStore, beside: Mapping[str, int], freed: int = 0
) -> dict[str, int]:
    """Return all bytes beside the slots on the device that computes, each with its name.

    Args:
        config: the options.
        store: store of the experts, not filled.
        beside: bytes of the model that are not allocated yet, each with its name, without those of the experts.
        freed: bytes that this process has on the device until the experts are in the store.
    """
    parts = {name: nbytes for name, nbytes in beside.items() if nbytes}
    if store.name == "memory" and store.device.type == "cpu":
        parts["the experts in memory"] = store.nbytes
    parts["a reserve"] = min(_RESERVE, sum(beside.values()) + store.top_k * store.layout.block_bytes)
    if config.memory is not None:
        parts["this process"] = max(0, process_memory(store.device) - freed)
    return memory_beside(config, store, parts)


def fits_memory(config: OffloadConfig, store: ExpertStore, beside: Mapping[str, int]) -> bool:
    """Whether host memory holds all experts, and on the CPU their slots and everything beside them too."""
    free, needed = free_memory(torch.device("cpu")), store.nbytes
    if store.device.type == "cpu":
        if config.memory is not None:
            free = size_bytes(config.memory)
        slots = slots_for(replace(config, memory=None), store, room=sys.maxsize)
        needed = sum(parts_beside(config, store, beside).values()) + store.slots_nbytes(slots)
    return free is None or needed <= free


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Number of slots of a model that is to be loaded, with the memory beside them."""

    name: str
    """Name of the model."""
    form: str
    """Form of its experts and dtype."""
    slots: int
    store: ExpertStore
    beside: Mapping[str, int]
    """Bytes on the device beside the slots, each with its name."""

    @classmethod
    def of(
        cls, config: OffloadConfig, store: ExpertStore, beside: Mapping[str, int], *, name: str, form: str,
        loading: int = 0,
    ) -> Plan:  # fmt: skip
        """Return the plan of a model, which fits into memory.

        Args:
            config: the options.
            store: store of the experts, not filled.
            beside: bytes that are not allocated yet, each with its name, without those of the experts.
            name, form: for messages.
            loading: bytes that loading takes before there are slots.

        Raises:
            ExpertcastError: too little memory, or too few slots for one token; names the smallest number that would do.
        """
        device, least = store.device, store.slots_nbytes(store.top_k)
        parts, free = parts_beside(config, store, beside), free_memory(device)
        slots = slots_for(config, store, parts, free)
        if free is not None and config.memory is not None:
            free = min(free + parts["this process"], size_bytes(config.memory))
        held = sum(parts.values())
        in_slots = store.slots_nbytes(slots)
        needed = held + max(in_slots, loading)
        if free is not None and needed > free:
            least, most = held + max(least, loading), store.slots_in(free - held)
            fewer = f"give slots={most} or fewer" if most >= store.top_k and least <= free else ""
            raise ExpertcastError(
                f"{name!r} needs {needed} bytes of {device.type} memory ({listed(parts)}, {in_slots} for "
                f"{slots} slots) and {free} are available: {fewer or f'it takes {least} or more'}"
            )
        host = free_memory(torch.device("cpu"))
        if device.type != "cpu" and store.name == "memory" and host is not None and store.nbytes > host:
            raise ExpertcastError(f"{name!r} needs {store.nbytes} bytes of host memory and {host} are available")
        return cls(name=name, form=form, slots=slots, store=store, beside=parts)

    def __str__(self) -> str:
        store = self.store
        everything, per_token = store.layers * store.experts, store.layers * store.top_k
        block = store.slots_nbytes(everything) // everything
        place = {"memory": "host memory", "checkpoint": "the checkpoint's own files"}.get(store.name, "a file on disk")
        absent = missing(self.slots / everything, store.experts)
        in_slots = format_bytes(store.slots_nbytes(self.slots))
        reads = f"all are in {place}, and each is read once"
        if absent:
            reads = (
                f"the others in {place}; once these slots are full, a token reads about "
                f"{absent * per_token:.0f} of its {per_token} experts, {format_bytes(absent * per_token * block)}"
            )
        return (
            f"{self.name}: experts {self.form}, {format_bytes(block)} each; {format_bytes(sum(self.beside.values()))} "
            f"beside them; {self.slots} of {everything} in slots ({in_slots}), {reads}"
        )
