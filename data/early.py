"""Early attention: the next block's attention on a stand-in for its input, while this layer's experts wait or run.

The cache holds the true keys and values of the past; only the newest position is approximate. The block itself runs,
up to the norm before its router, so that norms, residuals and multipliers are the model's own in every family: its
cache is a copy that shares the past, so nothing is written.

T tokens, B sequences, S tokens per sequence, D hidden size, L MoE layers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from expertcast.data.batch import capturing
from expertcast.data.means import adds_block
from expertcast.data.quick_block import QuickBlock
from expertcast.data.taps import unrecorded
from expertcast.data.tracing import Program, traced
from expertcast.predictors.view import MoELayer, MoEView

# Key-value caches: reading without writing. Decided by class: of an unknown class nobody knows what a write changes.

_COPIED = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)
"""Layers that put new tensors in the place of old ones: a shallow copy leaves them as they were."""
_CLONED = (StaticLayer, StaticSlidingWindowLayer)
"""Those that write into their tensors."""


def reading_copy(past: Cache, index: int) -> Cache | None:
    """The cache with a copy of its layer `index`, which takes what is written there; None where it cannot be read so:
    a cache that quantises, moves its layers to the host, or is of a class of its own."""
    if not _readable(past):
        return None
    reader = copy.copy(past)
    reader.layers = list(past.layers)
    if index >= len(past.layers):  # it grows by what is written first
        return reader if past.layer_class_to_replicate in _COPIED else None
    kind = type(past.layers[index])
    if kind not in (*_COPIED, *_CLONED):
        return None
    mirrored = reader.layers[index] = copy.copy(past.layers[index])
    if kind in _CLONED:
        for name, value in vars(mirrored).items():
            if isinstance(value, Tensor):
                setattr(mirrored, name, value.clone())
    return reader


def growing_layer(past: Cache, index: int) -> CacheLayerMixin | None:
    """The cache's layer `index`, where it holds something and a write puts new tensors in the place of its own."""
    if not _readable(past) or index >= len(past.layers):
        return None
    layer = past.layers[index]
    return layer if type(layer) in _COPIED and layer.is_initialized else None


def _readable(past: Cache) -> bool:
    return getattr(type(past), "update", None) is Cache.update and not past.offloading


# Masks for whole texts: each token reads the true past and its own stand-in


def beside(mask: Tensor | None, hidden_BSD: Tensor) -> Tensor:
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


def own_rows(mask: Tensor | None, hidden_BSD: Tensor) -> Tensor | None:
    """[B, S]: tokens that see themselves, as those of padding need not; None for all."""
    if mask is None:
        return None
    seen = mask if mask.dtype == torch.bool else mask == 0
    return seen.diagonal(dim1=-2, dim2=-1)[:, 0].expand(hidden_BSD.shape[:2])


# Layers that cannot be run early, by the structure of the model

FIRST = "no MoE layer stands before it"
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers, as configurations name them, whose cache holds keys and values."""
_MASKED = ("sdpa", "eager")
"""Attention implementations that take any mask, which whole texts need."""


def static_refusals(model: PreTrainedModel, view: MoEView, *, whole: bool = False) -> dict[int, str]:
    """By MoE layer, why its block cannot be run early: layers that can be are left out.

    Args:
        model: may be on the meta device.
        view: its MoE layers.
        whole: over whole texts, as collection does.
    """
    paths = {module: name for name, module in model.named_modules()}
    refused = {0: FIRST}
    for layer in view.layers[1:]:
        before, own = paths[view[layer.index - 1].decoder], paths[layer.decoder]
        reason = _refusal(before, own, kind_of(model, layer.decoder), cache_index(layer.decoder))
        if not reason and not adds_block(view[layer.index - 1]):
            reason = "the layer before it adds more to the residual stream than its block's output, or another thing"
        if not reason and not layer.norm_name:
            reason = "no norm stands before its router, where its block could be left"
        if not reason and whole and not takes_masks(model):
            reason = f"attention by {_implementation(model)} takes no mask of ours (sdpa does)"
        if reason:
            refused[layer.index] = reason
    return refused


def takes_masks(model: PreTrainedModel) -> bool:
    """Whether attention follows any mask that it is given."""
    return _implementation(model) in _MASKED


def _implementation(model: PreTrainedModel) -> str:
    return str(model.config.get_text_config()._attn_implementation)


def _refusal(before: str, own: str, kind: str | None, index: int | None) -> str:
    if index is None:
        return "its block has no layer_idx, by which a cache is read"
    stem, _, number = own.rpartition(".")
    if not number.isdigit() or before != f"{stem}.{int(number) - 1}":
        return "another layer stands between it and the MoE layer before it"
    if kind is not None and kind not in _ATTENTION:
        return f"{kind.replace('_', ' ')} keeps a state that a read would change"
    return ""


def kind_of(model: PreTrainedModel, decoder: nn.Module) -> str | None:
    """What a model's configuration calls a block's attention; blocks of one kind are called with the same mask and
    positions. None where it makes no difference between blocks."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    index = cache_index(decoder)
    return str(kinds[index]) if kinds and index is not None and index < len(kinds) else None


def cache_index(decoder: nn.Module) -> int | None:
    """The number by which a block knows its own layer of a cache."""
    for module in decoder.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            return index
    return None


def told(refused: Mapping[int, str]) -> list[str]:
    """A line for each reason, with the layers that it holds for; that the first MoE layer has none before it is not
    worth a line."""
    by_reason: dict[str, list[int]] = {}
    for layer, reason in sorted(refused.items()):
        if reason != FIRST:
            by_reason.setdefault(reason, []).append(layer)
    return [f"layer{'s' * (len(layers) > 1)} {ranges(layers)}: {reason}" for reason, layers in by_reason.items()]


def ranges(numbers: Sequence[int]) -> str:
    """Rising numbers in words: `1-3, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


# One block, run from its input to the norm before its router

_CLOSE = 2e-2
"""How far a residual may be from the block's own, in parts of its size, when the block is given its own input."""


class ReachedError(Exception):
    """The norm before the router has its input: as far as a block is run."""

    def __init__(self, residual: Tensor) -> None:
        super().__init__()
        self.residual = residual


@dataclass(slots=True)
class Call:
    """How a block was called: everything but its input."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    """Of its input."""


@dataclass(slots=True)
class Block:
    """One layer's block, and what is known of it in the forward that runs."""

    layer: MoELayer
    kind: str | None
    """Blocks of one kind are called with the same masks and positions."""
    cache_index: int | None
    checked: bool = False
    """Whether it has given its own residual for its own input."""
    running: bool = False
    """Now, beside the model."""
    expected: Tensor | None = None
    """In a check: what early attention made of the block's own input."""
    rows: Tensor | None = None
    """In a check: which rows count; None for all."""
    written: Cache | None = field(default=None, repr=False)
    """Of a forward over whole texts: what holds the true keys and values."""
    given: tuple[tuple[Any, ...], dict[str, Any]] | None = field(default=None, repr=False)
    """Arguments of its last call."""

    @property
    def call(self) -> Call | None:
        """Its last call in this forward; None before there is one."""
        if self.given is None:
            return None
        args, kwargs = self.given
        hidden = args[0] if args else kwargs["hidden_states"]
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        return Call(args[1:], rest, hidden.dtype)

    def clear(self) -> None:
        """Forget the forward."""
        self.written = self.expected = self.rows = self.given = None

    def reach(self, hidden: Tensor, call: Call, past: Cache | None) -> Tensor:
        """The residual that the block reaches its router's norm with, whose hook ends the run by a `ReachedError`.

        Args:
            hidden: its input [B, S, D].
            call: what it is called with besides.
            past: the cache that it is called with in place of the call's own; is written to.
        """
        with unrecorded(), torch.no_grad():
            self.running = True
            try:
                self.layer.decoder(hidden.to(call.dtype), *call.args, **{**call.kwargs, "past_key_values": past})
            except ReachedError as reached:
                return reached.residual
            finally:
                self.running = False
        raise AssertionError("the block ran without its router's norm")

    def check(self, residual: Tensor) -> bool:
        """Whether what the block made of its own input early is what it makes of it in the model, `residual`."""
        expected, rows = self.expected, self.rows
        self.expected, self.rows, self.checked = None, None, True
        assert expected is not None
        if rows is not None:
            expected, residual = expected[rows], residual[rows]
        size = residual.float().square().mean().sqrt()
        off = (expected.float() - residual.float()).square().mean().sqrt()
        return bool(off <= _CLOSE * size)


# The same in decode steps as a traced program, with the keys and values of the past as inputs. It is used once it has
# given the bits of the block itself in several steps.

_CHECKED = 3
"""Steps, the traced one included, in which a program is compared with the block."""
_AGAIN = 256
"""And again after so many, for what changes only with the length of a text."""
_TRIALS = 4
"""Steps in which a trace is tried: where a length is by chance some other size of the model, it fails."""
_MOST = 8
"""Shapes and flags that a block has programs for."""


class _Made:
    """A program for calls of one form, if there is one, and how often it was called and tried."""

    __slots__ = ("calls", "run", "trials")

    def __init__(self) -> None:
        self.run: Program | None = None
        self.calls = 0
        self.trials = _TRIALS


class EarlyProgram:
    """The programs of one block."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._made: dict[tuple[Any, ...], _Made] = {}

    def run(self, hidden_B1D: Tensor, call: Call, own: Callable[[], Tensor | None]) -> Tensor | None:
        """The residual [B, 1, D] that the block reaches its router's norm with.

        Args:
            hidden_B1D: its input.
            call: what it is called with besides.
            own: runs the block itself, which is done where there is no program.
        """
        past, index = call.kwargs.get("past_key_values"), self._block.cache_index
        layer = None if past is None or index is None else growing_layer(past, index)
        if layer is None or not self._block.checked:
            return own()
        held = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
        tensors = [hidden_B1D, *held.values()]
        try:
            form = (hidden_B1D.shape, hidden_B1D.dtype, call.dtype, type(layer), *held, _form(call, tensors))
        except TypeError:  # it is called with what is neither a tensor nor a flag
            return own()
        made = self._made.get(form)
        if made is None:
            if len(self._made) == _MOST:
                return own()
            made = self._made[form] = _Made()
        if made.run is None or made.calls < _CHECKED or made.calls % _AGAIN == 0:
            return own() if capturing() else self._checked(made, call, held, tensors, own)
        made.calls += 1
        return made.run(*tensors)[0]

    def _checked(
        self, made: _Made, call: Call, held: dict[str, Tensor], tensors: list[Tensor], own: Callable[[], Tensor | None]
    ) -> Tensor | None:
        """What `own` gives, compared with what the program gives, which is made if there is none.

        Args:
            made: the program.
            call: what the block is called with.
            held: the past's tensors.
            tensors: all inputs of the program.
            own: as for :meth:`run`.
        """
        expected = own()
        if made.run is None and made.trials:
            made.trials -= 1
            made.run = self._trace(call, held, tensors)
        if made.run is not None and expected is not None:
            made.calls += 1
            if not torch.equal(made.run(*tensors)[0], expected):
                made.run, made.trials = None, 0
        return expected

    def _trace(self, call: Call, held: dict[str, Tensor], tensors: list[Tensor]) -> Program | None:
        past, index = call.kwargs["past_key_values"], self._block.cache_index
        assert index is not None

        def reached(hidden_B1D: Tensor, *given: Tensor) -> tuple[Tensor]:
            reader: Cache = copy.copy(past)
            reader.layers = list(past.layers)
            layer = reader.layers[index] = copy.copy(past.layers[index])
            for name, tensor in zip(held, given, strict=False):
                setattr(layer, name, tensor)
            args, kwargs = _filled((call.args, _besides(call)), iter(given[len(held) :]))
            return (self._block.reach(hidden_B1D, Call(args, kwargs, call.dtype), reader),)

        lengths = {tensor.shape[-2] + more for tensor in held.values() if tensor.dim() > 2 for more in (0, 1)}
        return traced(reached, tuple(tensors), [self._block.layer.decoder], lengths=lengths)


def _besides(call: Call) -> dict[str, Any]:
    return {name: value for name, value in call.kwargs.items() if name != "past_key_values"}


def _form(call: Call, tensors: list[Tensor]) -> tuple[Any, ...]:
    """What a block is called with, as something to compare; its tensors are added to `tensors`.

    Raises:
        TypeError: it is called with anything but tensors, flags and collections of these.
    """
    found: list[Any] = [_formed(value, tensors) for value in call.args]
    for name, value in _besides(call).items():
        found += name, _formed(value, tensors)
    return tuple(found)


def _formed(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.dtype
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return tuple(_formed(each, tensors) for each in value)
    if isinstance(value, dict):
        return tuple((name, _formed(each, tensors)) for name, each in value.items())
    raise TypeError(type(value))


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same with other tensors, in the order in which :func:`_formed` finds them."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple | list):
        return type(value)(_filled(each, tensors) for each in value)
    if isinstance(value, dict):
        return {name: _filled(each, tensors) for name, each in value.items()}
    return value


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
        self._quick: dict[int, QuickBlock] = {}
        """By layer."""
        self._latest: dict[str | None, Block] = {}
        """By kind, the block that has run last."""
        self._masks: dict[int, tuple[Tensor, Tensor | None]] = {}
        """Of a forward over whole texts: masks by the identity of those that blocks are called with, and these."""
        self._unreadable: set[type] = set()
        self._stack = ExitStack()
        self._following = False

    @property
    def works(self) -> bool:
        """Whether any layer can be run early, as far as is known."""
        return len(self.refused) < len(self._blocks)

    def close(self) -> None:
        """Remove the hooks."""
        self._stack.close()
        self.start()

    def follow(self, wanted: bool) -> None:
        """A forward starts: follow it, or leave it alone, which takes no time."""
        self.start()
        if wanted != self._following:
            (self.attach if wanted else self._stack.close)()

    def start(self) -> None:
        """A forward starts."""
        self._latest.clear()
        self._masks.clear()
        for block in self._blocks:
            block.clear()

    def attach(self) -> None:
        """Follow the model's forwards."""
        self._following = True
        self._stack.callback(setattr, self, "_following", False)
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
            self._stack.callback(norm.register_forward_pre_hook(before_norm, prepend=True).remove)
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
        if block.checked and kwargs.get("past_key_values") is not None:  # a decode step: most of them need no more
            block.given, self._latest[block.kind] = (args, kwargs), block
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        block.given, self._latest[block.kind] = (args, kwargs), block
        call = block.call
        assert call is not None
        whole = call.kwargs.get("past_key_values") is None
        runs = self._masked if whole else hidden.shape[1] == 1
        if runs and not block.checked and block.layer.index not in self.refused:
            self._try(block, hidden, call)
        if not runs or not whole or block.layer.index in self.refused:
            return None
        self._blocks[block.layer.index - 1].written = None  # nobody asks for that layer any more
        block.written = DynamicCache()
        return args, {**kwargs, "past_key_values": block.written}

    def prepare(self) -> None:
        """Fold the weights that :meth:`attend_roughly` reads, where that was not done."""
        if not self._quick:
            self._quick = {index: QuickBlock(block.layer) for index, block in enumerate(self._blocks)}

    def attend_roughly(self, layer: int, hidden_BD: Tensor) -> Tensor | None:
        """As :meth:`attend` for one token of each sequence, up to rounding and by fewer operations."""
        block = self._blocks[layer]
        latest, index = self._latest.get(block.kind), block.cache_index
        if latest is None or latest.given is None or latest.cache_index is None or layer in self.refused:
            return None
        kwargs = latest.given[1]
        pasts = getattr(kwargs.get("past_key_values"), "layers", [])
        if not block.checked or index is None or index >= len(pasts):
            return self.attend(layer, hidden_BD)
        self.prepare()
        past, other = pasts[index], pasts[latest.cache_index]
        return self._quick[layer].run(hidden_BD, past, other, kwargs, partial(self.attend, layer, hidden_BD))

    def attend(self, layer: int, hidden_TD: Tensor, *, by_program: bool = True) -> Tensor | None:
        """The residual [T, D] before the norm of `layer`'s router, had its block been given `hidden_TD`: in a decode
        step, when the layer before has been reached. None where it cannot be had in this step: the layer is refused,
        its cache cannot be read or lacks tokens, for forwards have left its block out, or no block of its kind has run
        yet, whose mask it needs (gpt_oss's second layer).

        Args:
            layer, hidden_TD: MoE layer, and what stands for the input of its block.
            by_program: make a program of the block where there is none yet, which takes as long as ten of its runs.
        """
        block = self._blocks[layer]
        latest = self._latest.get(block.kind)
        call = None if latest is None else latest.call
        if layer in self.refused or latest is None or call is None or _lacks_tokens(block, latest, call):
            return None
        hidden_B1D = hidden_TD.unsqueeze(1)
        own = partial(self._run, block, hidden_B1D, call)
        try:
            found = self._programs[layer].run(hidden_B1D, call, own) if by_program else own()
        except Exception as error:
            if block.checked:
                raise
            self._refuse(block, error)
            return None
        return None if found is None else found.reshape(hidden_TD.shape)

    def attend_whole(self, layer: int, hidden_TD: Tensor) -> Tensor | None:
        """The same for every token of whole texts at once, each reading the true past of its own text: once `layer`'s
        own attention has run. None where it cannot be had."""
        block = self._blocks[layer]
        call = block.call
        if layer in self.refused or block.written is None or call is None or block.cache_index is None:
            return None
        sequences = block.written.layers[block.cache_index].keys.shape[0]
        hidden_BSD = hidden_TD.view(sequences, -1, hidden_TD.shape[-1])
        return self._run_whole(block, hidden_BSD, call, block.written).reshape(hidden_TD.shape)

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
            self._refuse(block, error)

    def _refuse(self, block: Block, error: Exception) -> None:
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


def _lacks_tokens(block: Block, latest: Block, call: Call) -> bool:
    """Whether the cache holds fewer tokens of a block than of one of its kind before this step, whose call it was."""
    past = call.kwargs.get("past_key_values")
    if past is None or block.cache_index is None or latest.cache_index is None:
        return False
    own, other = (growing_layer(past, index) for index in (block.cache_index, latest.cache_index))
    return own is not None and other is not None and own.get_seq_length() + 1 < other.get_seq_length()
