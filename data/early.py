"""Early attention: the next block's attention on a stand-in for its input, while this layer's experts wait or run.

The cache holds the true keys and values of the past; only the newest position is approximate. The block itself runs,
up to the norm before its router, so that norms, residuals and multipliers are the model's own in every family: its cache
is a copy that shares the past, so nothing is written.

T tokens, B sequences, S tokens per sequence, D hidden size, L MoE layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from expertcast.predictors.view import MoELayer, MoEView

_COPIED = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)
"""Layers of a cache that put new tensors in the place of old ones: a shallow copy leaves them as they were."""
_CLONED = (StaticLayer, StaticSlidingWindowLayer)
"""Those that write into their tensors."""
_MASKED = ("sdpa", "eager")
"""Attention implementations that take any mask, which whole texts need."""
_CLOSE = 2e-2
"""How far a residual may be from the block's own, in parts of its size, when the block is given its own input."""


class _Reached(Exception):
    """The norm before the router has its input."""

    def __init__(self, residual: Tensor) -> None:
        super().__init__()
        self.residual = residual


@dataclass(slots=True)
class _Call:
    """How a block was called: everything but its input."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(slots=True)
class _Block:
    """One layer's block, as far as it can be run early."""

    layer: MoELayer
    kind: object
    """Blocks of one kind are called with the same masks and positions."""
    cache_index: int | None
    checked: bool = False
    own_input: Tensor | None = None
    """In a check: what the block was given."""
    expected: Tensor | None = None
    """In a check: what early attention made of it."""
    written: Cache | None = field(default=None, repr=False)
    """Of a forward over whole texts: what holds the true keys and values."""
    call: _Call | None = None


class EarlyAttention:
    """Runs blocks of a model early. Its hooks follow the model's forwards from :meth:`attach` to :meth:`close`.

    A layer that cannot be run early is named in :attr:`refused` with the reason; each other one is checked once: given
    its own input it must give its own residual.

    Args:
        model: whose forwards it follows.
        view: the model's MoE layers.
    """

    def __init__(self, model: PreTrainedModel, view: MoEView) -> None:
        self.refused: dict[int, str] = {0: "no layer before it"}
        """By MoE layer index."""
        config = model.config.get_text_config()
        self._implementation = str(config._attn_implementation)
        kinds = getattr(config, "layer_types", None)
        paths = {module: name for name, module in model.named_modules()}
        self._blocks: list[_Block] = []
        for layer in view:
            index = _cache_index(layer.decoder)
            kind = kinds[index] if kinds and index is not None and index < len(kinds) else None
            self._blocks.append(_Block(layer, kind, index))
            before = paths[view[layer.index - 1].decoder] if layer.index else ""
            reason = _static_refusal(before, paths[layer.decoder], kind, index)
            if layer.index and reason:
                self.refused[layer.index] = reason
        self._latest: dict[object, _Call] = {}
        self._running: int | None = None
        self._stack = ExitStack()

    @property
    def works(self) -> bool:
        """Whether any layer can be run early, as far as is known."""
        return len(self.refused) < len(self._blocks)

    def close(self) -> None:
        """Remove the hooks."""
        self._stack.close()

    def start(self) -> None:
        """A forward starts."""
        self._latest.clear()
        for block in self._blocks:
            block.written = block.own_input = block.expected = block.call = None

    def attach(self) -> None:
        """Follow the model's forwards."""
        for block in self._blocks:

            def before_block(
                _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], block: _Block = block
            ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
                return None if self._running is not None else self._called(block, args, kwargs)

            def before_norm(_module: nn.Module, args: tuple[Tensor, ...], block: _Block = block) -> None:
                if self._running == block.layer.index:
                    raise _Reached(args[0])
                if self._running is None and block.expected is not None:
                    self._check(block, args[0])

            decoder, norm = block.layer.decoder, block.layer.norm
            self._stack.callback(decoder.register_forward_pre_hook(before_block, with_kwargs=True).remove)
            self._stack.callback(norm.register_forward_pre_hook(before_norm).remove)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _called(
        self, block: _Block, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        hidden = args[0] if args else kwargs["hidden_states"]
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        call = self._latest[block.kind] = block.call = _Call(args[1:], rest)
        if block.layer.index in self.refused:
            return None
        if hidden.shape[1] > 1:
            block.own_input = None if block.checked else hidden
            if rest.get("past_key_values") is not None or self._implementation not in _MASKED:
                return None
            block.written = DynamicCache()
            return args, {**kwargs, "past_key_values": block.written}
        if not block.checked:
            block.expected = self._run(block, hidden, call)
        return None

    def attend(self, layer: int, hidden_TD: Tensor) -> Tensor | None:
        """The residual [T, D] before the norm of `layer`'s router, had its block been given `hidden_TD`: in a decode
        step, when the layer before has been reached. None where it cannot be had in this step."""
        block = self._blocks[layer]
        call = self._latest.get(block.kind)
        if layer in self.refused or call is None:
            return None
        found = self._run(block, hidden_TD.unsqueeze(1), call)
        return None if found is None else found.reshape(hidden_TD.shape)

    def attend_whole(self, layer: int, hidden_TD: Tensor) -> Tensor | None:
        """The same for every token of whole texts at once, each reading the true past of its own text: once `layer`'s
        own attention has run. None where it cannot be had."""
        block = self._blocks[layer]
        if layer in self.refused or block.written is None or block.call is None or block.cache_index is None:
            return None
        if not block.checked:
            own = block.own_input
            assert own is not None
            block.expected = self._run_whole(block, own)
            truth = self._truth(block, own)
            self._check(block, truth)
            if layer in self.refused:
                return None
        sequences = block.written.layers[block.cache_index].keys.shape[0]
        return self._run_whole(block, hidden_TD.view(sequences, -1, hidden_TD.shape[-1])).reshape(hidden_TD.shape)

    def _truth(self, block: _Block, own: Tensor) -> Tensor:
        """What the block makes of its own input, without a past."""
        assert block.call is not None
        call = _Call(block.call.args, {**block.call.kwargs, "past_key_values": DynamicCache()})
        return self._reach(block, own, call)

    def _run_whole(self, block: _Block, hidden_BSD: Tensor) -> Tensor:
        assert block.call is not None and block.written is not None
        mask = _beside(block.call.kwargs.get("attention_mask"), hidden_BSD)
        kwargs = {**block.call.kwargs, "attention_mask": mask}
        kwargs["past_key_values"] = self._reader(block.written, block.cache_index)
        return self._reach(block, hidden_BSD, _Call(block.call.args, kwargs))

    def _run(self, block: _Block, hidden_B1D: Tensor, call: _Call) -> Tensor | None:
        past = call.kwargs.get("past_key_values")
        if past is None:
            return None
        reader = self._reader(past, block.cache_index)
        if reader is None:
            index = block.layer.index
            self.refused[index] = f"its {type(past).__name__} cannot be read without being changed"
            return None
        return self._reach(block, hidden_B1D, _Call(call.args, {**call.kwargs, "past_key_values": reader}))

    @staticmethod
    def _reader(past: Cache, index: int | None) -> Cache | None:
        """The cache with a copy of one layer, which takes what is written to it."""
        if index is None or getattr(past, "offloading", False) or not hasattr(past, "layers"):
            return None
        reader = copy.copy(past)
        if index >= len(past.layers):  # grows when it is first written to
            reader.layers = list(past.layers)
            return reader
        kind = type(past.layers[index])
        if kind not in (*_COPIED, *_CLONED):
            return None
        mirrored = copy.copy(past.layers[index])
        if kind in _CLONED:
            for name, value in vars(mirrored).items():
                if isinstance(value, Tensor):
                    setattr(mirrored, name, value.clone())
        reader.layers = list(past.layers)
        reader.layers[index] = mirrored
        return reader

    def _reach(self, block: _Block, hidden: Tensor, call: _Call) -> Tensor:
        """The residual that a call of the block reaches its router's norm with."""
        parameter = next(block.layer.decoder.parameters())
        with _unrecorded(), torch.no_grad():
            self._running = block.layer.index
            try:
                block.layer.decoder(hidden.to(parameter.dtype), *call.args, **call.kwargs)
            except _Reached as reached:
                return reached.residual
            finally:
                self._running = None
        raise AssertionError("the block ran without its router's norm")

    def _check(self, block: _Block, residual: Tensor) -> None:
        """Compare what the block made of its own input early with what it made of it."""
        expected, block.expected, block.own_input = block.expected, None, None
        assert expected is not None
        block.checked = True
        size = residual.float().square().mean().sqrt()
        off = (expected.float() - residual.float()).square().mean().sqrt()
        if not off <= _CLOSE * size:
            self.refused[block.layer.index] = "its attention gave another result when it was run early"


def _static_refusal(before: str, own: str, kind: object, index: int | None) -> str | None:
    """Why a layer's block cannot be run early, as far as the model's structure tells."""
    if index is None:
        return "its block has no layer_idx, by which a cache is read"
    stem, _, number = own.rpartition(".")
    if not number.isdigit() or before != f"{stem}.{int(number) - 1}":
        return "another layer stands between it and the MoE layer before it"
    if kind is not None and "linear" in str(kind):
        return "linear attention keeps a state that a read would change"
    return None


def _cache_index(decoder: nn.Module) -> int | None:
    for module in decoder.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            return index
    return None


def _beside(mask: Tensor | None, hidden_BSD: Tensor) -> Tensor:
    """The mask [B or 1, 1, S, 2S] of queries that read the true keys before their own position, and their own stand-in.

    `mask` is what the block was called with: None stands for causal attention.
    """
    length = hidden_BSD.shape[1]
    own_SS = torch.eye(length, dtype=torch.bool, device=hidden_BSD.device)
    if mask is None:
        before_SS = torch.ones_like(own_SS).tril(-1)
        return torch.cat([before_SS, own_SS], dim=1)[None, None]
    never = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    parts = [mask.masked_fill(own_SS, never), mask.masked_fill(~own_SS, never)]
    return torch.cat(parts, dim=-1)


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Without hidden states, attentions and router logits being gathered for the model's output."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # another release
        yield
        return
    token = _active_collector.set(None)
    try:
        yield
    finally:
        _active_collector.reset(token)
