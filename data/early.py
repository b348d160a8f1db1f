"""Early attention: the next block's attention on a stand-in for its input, while this layer's experts wait or run.

The cache holds the true keys and values of the past; only the newest position is approximate. The block itself runs,
up to the norm before its router, so that norms, residuals and multipliers are the model's own in every family: its
cache is a copy that shares the past, so nothing is written.

T tokens, B sequences, S tokens per sequence, D hidden size, L MoE layers.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from expertcast.data.cache_reading import growing_layer, reading_copy
from expertcast.data.early_block import Block, Call, ReachedError
from expertcast.data.early_layers import cache_index, kind_of, static_refusals, takes_masks, told
from expertcast.data.early_masks import beside, own_rows
from expertcast.data.early_program import EarlyProgram
from expertcast.predictors.view import MoEView


class EarlyAttention:
    """Runs blocks of a model early. Its hooks follow the model's forwards from :meth:`attach` to :meth:`close`.

    A layer that cannot be run early is named in :attr:`refused` with the reason, by MoE layer index: known from the
    model's structure, or found when its block was called first, for each is given its own input once and must then give
    its own residual (a warning says so after that forward). A cache that cannot be read is no such reason, for the next
    text may come with another: there is no early attention with it, and one warning for each class of caches.

    Args:
        model: whose forwards it follows.
        view: the model's MoE layers.
        whole: it will run over whole texts.
    """

    def __init__(self, model: PreTrainedModel, view: MoEView, *, whole: bool = False) -> None:
        self._model = model
        self.refused = static_refusals(model, view, whole=whole)
        self._told = len(self.refused)
        """How many refusals somebody knows of."""
        self._masked = takes_masks(model)
        self._blocks = [Block(each, kind_of(model, each.decoder), cache_index(each.decoder)) for each in view]
        self._programs = [EarlyProgram(block) for block in self._blocks]
        self._latest: dict[str | None, Block] = {}
        """By kind, the block that has run last."""
        self._masks: dict[int, tuple[Tensor, Tensor | None]] = {}
        """Of a forward over whole texts: masks by the identity of those that blocks are called with, and these."""
        self._unreadable: set[type] = set()
        self._stack = ExitStack()

    @property
    def works(self) -> bool:
        """Whether any layer can be run early, as far as is known."""
        return len(self.refused) < len(self._blocks)

    def close(self) -> None:
        """Remove the hooks."""
        self._stack.close()
        self.start()

    def start(self) -> None:
        """A forward starts."""
        self._latest.clear()
        self._masks.clear()
        for block in self._blocks:
            block.clear()

    def attach(self) -> None:
        """Follow the model's forwards."""
        for block in self._blocks:

            def before_block(
                _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], block: Block = block
            ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
                return None if block.running else self._called(block, args, kwargs)

            def before_norm(_module: nn.Module, args: tuple[Tensor, ...], block: Block = block) -> None:
                if block.running:
                    raise ReachedError(args[0])
                if block.expected is not None and not block.check(args[0]):
                    self.refused[block.layer.index] = "its attention gave another result when it was run early"

            decoder, norm = block.layer.decoder, block.layer.norm
            self._stack.callback(decoder.register_forward_pre_hook(before_block, with_kwargs=True).remove)
            self._stack.callback(norm.register_forward_pre_hook(before_norm).remove)
        self._stack.callback(self._model.base_model.register_forward_hook(self._finished).remove)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _finished(self, *_: object) -> None:
        """A forward ends; what it left here would keep a finished text's cache."""
        self.start()
        if len(self.refused) > self._told:
            found = dict(list(self.refused.items())[self._told :])
            warnings.warn(f"forecasts do without early attention at {'; '.join(told(found))}", stacklevel=2)
        self._told = len(self.refused)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _called(
        self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        hidden = args[0] if args else kwargs["hidden_states"]
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        call = block.call = Call(args[1:], rest, hidden.dtype)
        self._latest[block.kind] = block
        whole = rest.get("past_key_values") is None
        runs = self._masked if whole else hidden.shape[1] == 1
        if runs and not block.checked and block.layer.index not in self.refused:
            self._try(block, hidden, call)
        if not runs or not whole or block.layer.index in self.refused:
            return None
        self._blocks[block.layer.index - 1].written = None  # nobody asks for that layer any more
        block.written = DynamicCache()
        return args, {**kwargs, "past_key_values": block.written}

    def attend(self, layer: int, hidden_TD: Tensor) -> Tensor | None:
        """The residual [T, D] before the norm of `layer`'s router, had its block been given `hidden_TD`: in a decode
        step, when the layer before has been reached. None where it cannot be had in this step: the layer is refused,
        its cache cannot be read or lacks tokens, for forwards have left its block out, or no block of its kind has run
        yet, whose mask it needs (gpt_oss's second layer)."""
        block = self._blocks[layer]
        latest = self._latest.get(block.kind)
        if layer in self.refused or latest is None or latest.call is None or _lacks_tokens(block, latest):
            return None
        call = latest.call
        hidden_B1D = hidden_TD.unsqueeze(1)
        found = self._programs[layer].run(hidden_B1D, call, lambda: self._run(block, hidden_B1D, call))
        return None if found is None else found.reshape(hidden_TD.shape)

    def attend_whole(self, layer: int, hidden_TD: Tensor) -> Tensor | None:
        """The same for every token of whole texts at once, each reading the true past of its own text: once `layer`'s
        own attention has run. None where it cannot be had."""
        block = self._blocks[layer]
        if layer in self.refused or block.written is None or block.call is None or block.cache_index is None:
            return None
        sequences = block.written.layers[block.cache_index].keys.shape[0]
        hidden_BSD = hidden_TD.view(sequences, -1, hidden_TD.shape[-1])
        return self._run_whole(block, hidden_BSD, block.call, block.written).reshape(hidden_TD.shape)

    def _run(self, block: Block, hidden_B1D: Tensor, call: Call) -> Tensor | None:
        past = call.kwargs.get("past_key_values")
        if past is None or block.cache_index is None:
            return None
        reader = reading_copy(past, block.cache_index)
        if reader is None:
            self._warn_unreadable(past)
            return None
        return block.reach(hidden_B1D, call, reader)

    def _run_whole(self, block: Block, hidden_BSD: Tensor, call: Call, written: Cache) -> Tensor:
        """One pass over whole texts.

        Args:
            block: runs.
            hidden_BSD: stands for its input.
            call: what it is called with besides.
            written: holds the keys and values of its true input.
        """
        assert block.cache_index is not None
        given = call.kwargs.get("attention_mask")
        if id(given) not in self._masks:
            self._masks[id(given)] = beside(given, hidden_BSD), given
        kwargs = {**call.kwargs, "attention_mask": self._masks[id(given)][0]}
        reader = reading_copy(written, block.cache_index)
        return block.reach(hidden_BSD, Call(call.args, kwargs, call.dtype), reader)

    def _try(self, block: Block, own: Tensor, call: Call) -> None:
        """Give a block its `own` input; what it makes of that is compared with what it makes of it in the model."""
        try:
            if call.kwargs.get("past_key_values") is not None:
                block.expected = self._run(block, own, call)
                return
            written = DynamicCache()
            block.reach(own, call, written)
            block.expected = self._run_whole(block, own, call, written)
            block.rows = own_rows(call.kwargs.get("attention_mask"), own)
        except Exception as error:  # it is the model's: any, for it takes no cache, or another mask, or reads too far
            what = " ".join(f"{type(error).__name__}: {error}".split())[:100]
            self.refused[block.layer.index] = f"its block cannot be run beside the model ({what})"

    def _warn_unreadable(self, past: object) -> None:
        """Say, once for each class, that a cache cannot be read."""
        if type(past) not in self._unreadable:
            self._unreadable.add(type(past))
            warnings.warn(
                f"{type(past).__name__} cannot be read without being changed: forecasts do without early attention; "
                "a DynamicCache or StaticCache lets it run",
                stacklevel=2,
            )


def _lacks_tokens(block: Block, latest: Block) -> bool:
    """Whether the cache holds fewer tokens of a block than of one of its kind before this step."""
    assert latest.call is not None
    past = latest.call.kwargs.get("past_key_values")
    if past is None or block.cache_index is None or latest.cache_index is None:
        return False
    own, other = (growing_layer(past, index) for index in (block.cache_index, latest.cache_index))
    return own is not None and other is not None and own.get_seq_length() + 1 < other.get_seq_length()
