"""Early attention: run the next block's attention on a stand-in for its input while this layer's experts wait or run.

The key-value cache holds the true keys and values of the past, so only the newest position is approximate. The model's
own block runs, up to the norm before its router; norms, residuals and multipliers are therefore right in every family.
The block reads a copy of the cache that shares the past, so nothing is written to the model's cache.

A block runs in one of two ways: as the model has it, or as a traced program with the same bits.

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

from expertcast.data.kv_cache import appended_layer, reading_copy
from expertcast.data.machine import one_row, without_onednn
from expertcast.data.means import adds_block
from expertcast.data.taps import OBSERVES, unrecorded
from expertcast.data.tracing import Program, traced
from expertcast.predictors.view import MoELayer, MoEView

# Masks for whole sequences: each token reads the true past and its own stand-in


def stand_in_mask(mask: Tensor | None, hidden_BSD: Tensor) -> Tensor:
    """Return the mask [B or 1, 1, S, 2S] for keys that are the S true ones followed by the S stand-ins.

    A query sees the true keys before its own position and its own stand-in.

    Args:
        mask: mask that the model calls the block with, [B or 1, 1, S, S]; None means causal attention.
        hidden_BSD: stand-in for the block's input.
    """
    length = hidden_BSD.shape[1]
    own_SS = torch.eye(length, dtype=torch.bool, device=hidden_BSD.device)
    if mask is None:
        before_SS = torch.ones_like(own_SS).tril(-1)
        return torch.cat([before_SS, own_SS], dim=1)[None, None]
    never = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    parts = [mask.masked_fill(own_SS, never), mask.masked_fill(~own_SS, never)]
    return torch.cat(parts, dim=-1)


def tokens_that_see_themselves(mask: Tensor | None, hidden_BSD: Tensor) -> Tensor | None:
    """Return [B, S] bools; tokens of padding need not see themselves. None means all tokens."""
    if mask is None:
        return None
    seen = mask if mask.dtype == torch.bool else mask == 0
    return seen.diagonal(dim1=-2, dim2=-1)[:, 0].expand(hidden_BSD.shape[:2])


# Layers that cannot run early, by the structure of the model

FIRST = "it is the first MoE layer"
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers in configurations whose cache holds keys and values."""
_MASKED = ("sdpa", "eager")
"""Attention implementations that take any mask, which whole sequences need."""


def static_refusals(model: PreTrainedModel, view: MoEView, *, whole: bool = False) -> dict[int, str]:
    """Return the MoE layers that cannot run early, with the reason for each.

    Args:
        model: model; it may be on the meta device.
        view: its MoE layers.
        whole: whether blocks will run over whole sequences, as in a collection.
    """
    paths = {module: name for name, module in model.named_modules()}
    refused = {0: FIRST}
    for layer in view.layers[1:]:
        before, own = paths[view[layer.index - 1].decoder], paths[layer.decoder]
        reason = _refusal(before, own, kind_of(model, layer.decoder), cache_index(layer.decoder))
        if not reason and not adds_block(view[layer.index - 1]):
            reason = "the layer before it does not add exactly its block's output to the residual stream"
        if not reason and not layer.norm_name:
            reason = "its router has no norm before it, where its block could stop"
        if not reason and whole and not takes_masks(model):
            reason = f"attention by {_implementation(model)} does not take arbitrary masks (sdpa does)"
        if reason:
            refused[layer.index] = reason
    return refused


def takes_masks(model: PreTrainedModel) -> bool:
    """Return whether the model's attention follows an arbitrary mask."""
    return _implementation(model) in _MASKED


def _implementation(model: PreTrainedModel) -> str:
    return str(model.config.get_text_config()._attn_implementation)


def _refusal(before: str, own: str, kind: str | None, index: int | None) -> str:
    if index is None:
        return "its block has no layer_idx, so its cache cannot be read"
    stem, _, number = own.rpartition(".")
    if not number.isdigit() or before != f"{stem}.{int(number) - 1}":
        return "another layer is between it and the MoE layer before it"
    if kind is not None and kind not in _ATTENTION:
        return f"{kind.replace('_', ' ')} keeps a state that a read would change"
    return ""


def kind_of(model: PreTrainedModel, decoder: nn.Module) -> str | None:
    """Return the configuration's name for a block's attention, None if it has one name for all blocks.

    A model calls all blocks of one kind with the same mask and positions.
    """
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    index = cache_index(decoder)
    return str(kinds[index]) if kinds and index is not None and index < len(kinds) else None


def cache_index(decoder: nn.Module) -> int | None:
    """Return the number of a block's layer in a cache, None if the block has no such number."""
    for module in decoder.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            return index
    return None


def refusal_lines(refused: Mapping[int, str]) -> list[str]:
    """Return one line per reason with its layers, without the first MoE layer, which never runs early."""
    by_reason: dict[str, list[int]] = {}
    for layer, reason in sorted(refused.items()):
        if reason != FIRST:
            by_reason.setdefault(reason, []).append(layer)
    return [f"layer{'s' * (len(layers) > 1)} {ranges(layers)}: {reason}" for reason, layers in by_reason.items()]


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as ranges: `1-3, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


# One block, run from its input to the norm before its router

_CLOSE = 2e-2
"""Largest error of a residual relative to its norm, for the check of a block."""


class ReachedError(Exception):
    """Ends an early run at the norm before the router; holds the norm's input."""

    def __init__(self, residual: Tensor) -> None:
        super().__init__()
        self.residual = residual


@dataclass(slots=True)
class Call:
    """Arguments of a block without its input."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    """Dtype of the input."""


@dataclass(slots=True)
class Block:
    """One layer's block and its state in the current forward."""

    layer: MoELayer
    kind: str | None
    """Kind of attention; a model calls blocks of one kind with the same masks and positions."""
    cache_index: int | None
    checked: bool = False
    """Whether an early run on the block's own input has been compared with the model's run."""
    running: bool = False
    """Whether the block runs early at this moment."""
    expected: Tensor | None = None
    """During the check: residual of the early run on the block's own input."""
    rows: Tensor | None = None
    """During the check: rows to compare; None for all."""
    written: Cache | None = field(default=None, repr=False)
    """True keys and values of a forward over whole sequences."""
    given: tuple[tuple[Any, ...], dict[str, Any]] | None = field(default=None, repr=False)
    """Arguments of the last call in this forward."""

    @property
    def call(self) -> Call | None:
        """Arguments of the last call in this forward without the input; None before the first call."""
        if self.given is None:
            return None
        args, kwargs = self.given
        hidden = args[0] if args else kwargs["hidden_states"]
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        return Call(args[1:], rest, hidden.dtype)

    def clear(self) -> None:
        """Forget the current forward."""
        self.written = self.expected = self.rows = self.given = None

    def reach(self, hidden: Tensor, call: Call, past: Cache | None) -> Tensor:
        """Run the block and return the residual before its router's norm.

        The hook on that norm ends the run by a `ReachedError`.

        Args:
            hidden: input [B, S, D].
            call: the other arguments.
            past: cache that replaces the call's own; the block writes to it.
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
        """Return whether the early run on the block's own input gave the model's `residual`."""
        expected, rows = self.expected, self.rows
        self.expected, self.rows, self.checked = None, None, True
        assert expected is not None
        if rows is not None:
            expected, residual = expected[rows], residual[rows]
        size = residual.float().square().mean().sqrt()
        off = (expected.float() - residual.float()).square().mean().sqrt()
        return bool(off <= _CLOSE * size)


class _BeforeNorm:
    """Hook before the norm of a block's router: ends an early run, or compares the model's run with it.

    Args:
        block: the block.
        refused: takes the reason if the two differ.
    """

    def __init__(self, block: Block, refused: dict[int, str]) -> None:
        self._block, self._refused = block, refused

    def __call__(self, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Read what the norm takes."""
        block = self._block
        if block.running:
            raise ReachedError(args[0])
        if block.expected is not None and not block.check(args[0]):
            self._refused[block.layer.index] = "its attention gave another result when it was run early"


# an early run is of the layer's own code
setattr(_BeforeNorm, OBSERVES, property(lambda hook: not hook._block.running))


# A decode step as a traced program whose inputs include the keys and values of the past. A program replaces the block
# after it has given the block's bits in several steps.

_IN_A_ROW, _IN_ALL = 3, 16
"""Forwards in a row that run a block early, or such forwards in all, before it is traced: tracing takes as long as 40
runs of a small block, and a trial of the governor of forecasts is a single forward."""
_CHECKED = 3
"""Calls in which a program is compared with the block, the traced one included."""
_AGAIN = 256
"""Steps between later comparisons, for behaviour that depends on the length of a sequence."""
_TRIALS = 4
"""Maximum number of tracing attempts. A trace fails if the cache length equals another dimension of the model."""
_MOST = 8
"""Largest number of programs of one block, by shapes and flags."""


@dataclass(slots=True)
class _Made:
    """A program for calls of one form, if tracing works, with counts of calls and remaining attempts."""

    run: Program | None = None
    calls: int = 0
    """Calls of the program."""
    seen: int = 0
    """Calls of this form."""
    trials: int = _TRIALS


class EarlyProgram:
    """Traced programs of one block."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._made: dict[tuple[Any, ...], _Made] = {}
        self.compared = False
        """Whether the last run traced the block, or compared it with its program."""

    def run(self, hidden_B1D: Tensor, call: Call, own: Callable[[], Tensor | None], in_a_row: int) -> Tensor | None:
        """Return the residual [B, 1, D] before the router's norm.

        Args:
            hidden_B1D: input of the block.
            call: its other arguments.
            own: runs the block itself; called if there is no program for this call.
            in_a_row: forwards in a row, up to this one, that ran blocks early.
        """
        self.compared = False
        if one_row(hidden_B1D):
            own = partial(without_onednn, own)
        past, index = call.kwargs.get("past_key_values"), self._block.cache_index
        layer = None if past is None or index is None else appended_layer(past, index)
        if layer is None or not self._block.checked:
            return own()
        held = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
        tensors = [hidden_B1D, *held.values()]
        try:
            arguments = _formed((call.args, _without_cache(call)), tensors)
        except TypeError:  # an argument is neither a tensor nor a flag
            return own()
        form = hidden_B1D.shape, hidden_B1D.dtype, call.dtype, type(layer), *held, arguments
        made = self._made.get(form)
        if made is None:
            if len(self._made) == _MOST:
                untraced = [each for each, other in self._made.items() if other.run is None]
                if not untraced:
                    return own()
                del self._made[untraced[0]]
            made = self._made[form] = _Made()
        made.seen += 1
        if made.run is None and not (made.trials and (in_a_row >= _IN_A_ROW or made.seen > _IN_ALL)):
            return own()
        if made.run is None or made.calls < _CHECKED or made.calls % _AGAIN == 0:
            return self._checked(made, call, held, tensors, own)
        made.calls += 1
        return made.run(*tensors)[0]

    def _checked(
        self, made: _Made, call: Call, held: dict[str, Tensor], tensors: list[Tensor], own: Callable[[], Tensor | None]
    ) -> Tensor | None:
        """Return the result of `own` after comparing it with the program's; trace the block if there is no program.

        Args:
            made: the program.
            call: arguments of the block.
            held: tensors of the past by name.
            tensors: all inputs of the program.
            own: as in :meth:`run`.
        """
        self.compared, expected = True, own()
        if made.run is None:
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
            args, kwargs = _filled((call.args, _without_cache(call)), iter(given[len(held) :]))
            return (self._block.reach(hidden_B1D, Call(args, kwargs, call.dtype), reader),)

        lengths = {tensor.shape[-2] + more for tensor in held.values() if tensor.dim() > 2 for more in (0, 1)}
        return traced(reached, tuple(tensors), [self._block.layer.decoder], lengths=lengths)


def _without_cache(call: Call) -> dict[str, Any]:
    return {name: value for name, value in call.kwargs.items() if name != "past_key_values"}


def _formed(value: Any, tensors: list[Tensor]) -> Any:
    """Return a hashable description of a value and append its tensors to `tensors`.

    Raises:
        TypeError: it is neither a tensor, nor a flag, nor a collection of these.
    """
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
    """Replace the tensors in a value, in the order in which :func:`_formed` finds them."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple | list):
        return type(value)(_filled(each, tensors) for each in value)
    if isinstance(value, dict):
        return {name: _filled(each, tensors) for name, each in value.items()}
    return value


class EarlyAttention:
    """Runs blocks of a model early. Its hooks follow the model's forwards from :meth:`attach` to :meth:`close`.

    :attr:`refused` names the layers that cannot run early, with the reason. Some reasons follow from the model's
    structure. Others appear when a block is first called: it runs once early on its own input and must then give its
    own residual. A warning reports these after the forward. A cache that cannot be read refuses no layer, because the
    next sequence may have another cache; early attention pauses, with one warning for each class of caches.

    Args:
        model: model whose forwards are followed.
        view: its MoE layers.
        whole: whether blocks will run over whole sequences.
    """

    def __init__(self, model: PreTrainedModel, view: MoEView, *, whole: bool = False) -> None:
        self._model = model
        self.refused = static_refusals(model, view, whole=whole)
        self._reported = len(self.refused)
        """Refusals that a warning has reported or that follow from the structure."""
        self._masked = takes_masks(model)
        self._blocks = [Block(each, kind_of(model, each.decoder), cache_index(each.decoder)) for each in view]
        self._programs = [EarlyProgram(block) for block in self._blocks]
        self._latest: dict[str | None, Block] = {}
        """Latest block that the model has called, by kind."""
        self._masks: dict[int, tuple[Tensor, Tensor | None]] = {}
        """Masks of a forward over whole sequences, by the identity of the model's mask, which is kept alive here."""
        self._unreadable: set[type] = set()
        self._stack = ExitStack()
        self._following = False
        """Whether there are hooks."""
        self._ran, self._in_a_row = False, 0
        """Whether this forward has run a block early; forwards in a row that have."""
        self.compared = False
        """Whether this forward has traced blocks, or compared them with their programs: it takes longer than others."""

    @property
    def works(self) -> bool:
        """Whether any layer can run early, as far as is known."""
        return len(self.refused) < len(self._blocks)

    def close(self) -> None:
        """Remove the hooks."""
        self._stack.close()
        self.start()

    def follow(self, wanted: bool) -> None:
        """Start a forward; attach the hooks if `wanted`, else remove them so that the forward costs nothing."""
        self.start()
        self._in_a_row = self._in_a_row if wanted and self._ran else 0
        self._ran = self.compared = False
        if wanted != self._following:
            (self.attach if wanted else self._stack.close)()

    def start(self) -> None:
        """Forget the last forward."""
        self._latest.clear()
        self._masks.clear()
        for block in self._blocks:
            block.clear()

    def attach(self) -> None:
        """Attach the hooks."""
        self._following = True
        self._stack.callback(setattr, self, "_following", False)
        for block in self._blocks:

            def before_block(
                _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], block: Block = block
            ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
                return None if block.running else self._called(block, args, kwargs)

            decoder, norm = block.layer.decoder, block.layer.norm
            self._stack.callback(decoder.register_forward_pre_hook(before_block, with_kwargs=True).remove)
            self._stack.callback(norm.register_forward_pre_hook(_BeforeNorm(block, self.refused), prepend=True).remove)
        self._stack.callback(self._model.base_model.register_forward_hook(self._finished).remove)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _finished(self, *_: object) -> None:
        """End a forward: free its cache and report new refusals."""
        self.start()
        if len(self.refused) > self._reported:
            found = dict(list(self.refused.items())[self._reported :])
            warnings.warn(f"forecasts do without early attention at {'; '.join(refusal_lines(found))}", stacklevel=2)
        self._reported = len(self.refused)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _called(
        self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Note the model's call of a block, check the block on its first call, and return changed arguments or None.

        Over whole sequences the block gets a cache, which keeps its true keys and values.
        """
        block.given, self._latest[block.kind] = (args, kwargs), block
        if block.checked and kwargs.get("past_key_values") is not None:  # most decode steps need no more
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        call = block.call
        assert call is not None
        whole = call.kwargs.get("past_key_values") is None
        runs = self._masked if whole else hidden.shape[1] == 1
        if runs and not block.checked and block.layer.index not in self.refused:
            self._try(block, hidden, call)
        if not runs or not whole or block.layer.index in self.refused:
            return None
        self._blocks[block.layer.index - 1].written = None  # that layer's early run is over
        block.written = DynamicCache()
        return args, {**kwargs, "past_key_values": block.written}

    def attend(self, layer: int, hidden_TD: Tensor) -> Tensor | None:
        """Return the residual [T, D] before `layer`'s router norm for the block input `hidden_TD`.

        Call it in a decode step, after the router of the layer before. Returns None if the layer is refused, if its
        cache cannot be read, or if the model has not yet called a block of its kind in this step, whose mask it needs
        (the second layer of gpt_oss).

        Args:
            layer: MoE layer.
            hidden_TD: stand-in for the input of its block.
        """
        block = self._blocks[layer]
        latest = self._latest.get(block.kind)
        call = None if latest is None else latest.call
        if layer in self.refused or latest is None or call is None:
            return None
        hidden_B1D = hidden_TD.unsqueeze(1)
        own, program = partial(self._run, block, hidden_B1D, call), self._programs[layer]
        if not self._ran:
            self._ran, self._in_a_row = True, self._in_a_row + 1
        try:
            found = program.run(hidden_B1D, call, own, self._in_a_row)
            self.compared |= program.compared
        except Exception as error:
            if block.checked:
                raise
            self._refuse(block, error)
            return None
        return None if found is None else found.reshape(hidden_TD.shape)

    def attend_whole(self, layer: int, hidden_TD: Tensor) -> Tensor | None:
        """Return the residual [T, D] before `layer`'s router norm for every token of whole sequences at once.

        Call it after the layer's own attention has run: each token reads the true past of its own sequence. Returns
        None if the layer cannot run early.
        """
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
        """Run a block early over whole sequences.

        Args:
            block: the block.
            hidden_BSD: stand-in for its input.
            call: its other arguments.
            written: keys and values of its true input.
        """
        assert block.cache_index is not None
        given = call.kwargs.get("attention_mask")
        if id(given) not in self._masks:
            self._masks[id(given)] = stand_in_mask(given, hidden_BSD), given
        kwargs = {**call.kwargs, "attention_mask": self._masks[id(given)][0]}
        reader = reading_copy(written, block.cache_index)
        return block.reach(hidden_BSD, Call(call.args, kwargs, call.dtype), reader)

    def _try(self, block: Block, own: Tensor, call: Call) -> None:
        """Run a block early on its `own` input, and keep the result for :meth:`Block.check`."""
        try:
            if call.kwargs.get("past_key_values") is not None:
                block.expected = self._run(block, own, call)
                return
            written = DynamicCache()
            block.reach(own, call, written)
            block.expected = self._run_whole(block, own, call, written)
            block.rows = tokens_that_see_themselves(call.kwargs.get("attention_mask"), own)
        except Exception as error:  # the model's code may raise anything: it takes no cache, or another mask
            self._refuse(block, error)

    def _refuse(self, block: Block, error: Exception) -> None:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:100]
        self.refused[block.layer.index] = f"its block cannot be run beside the model ({what})"

    def _warn_unreadable(self, past: object) -> None:
        """Warn once per class of caches."""
        if type(past) not in self._unreadable:
            self._unreadable.add(type(past))
            warnings.warn(
                f"{type(past).__name__} cannot be read without being changed: forecasts do without early attention; "
                "use a DynamicCache or StaticCache",
                stacklevel=2,
            )
