"""The experts of a model that is looked at: in the model itself, or in the slots of an offload.

A model that is offloaded knows its offload, and what is here asks that: the rest of collection knows no difference.

T tokens, D hidden size, E routed experts per layer, K experts per token, S = T x K, I inner width of an expert,
G groups of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertcast.compat import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from expertcast.data.moe_layers import experts_implementation, find_moe_layers
from expertcast.data.packed_experts import iterate_plain
from expertcast.data.plan import WindowBatch
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoELayer, MoEView

OFFLOAD = "_expertcast"
"""Where in its `__dict__` a model that is offloaded has its offload."""
WINDOWS = 8
"""Windows per forward of a model that holds its experts."""
_ANSWERED = "expertcast_answered"
Answer: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""In place of a layer's experts: hidden [T, D], ids and weights [T, K] to the output [T, D]."""
Inner: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]
"""Gets what enters the down projection [rows, I], and whose rows they are: expert and number of rows by group [G]."""
_ANSWERS: dict[nn.Module, Answer] = {}
"""By experts module that is answered for."""


class Experts(Protocol):
    """The experts of one model."""

    view: MoEView
    """The model's MoE layers."""

    def windows(self, window: int) -> int:
        """Windows of so many tokens that a forward takes, where nobody says how many."""

    def answered(self, answers: Mapping[nn.Module, Answer]) -> AbstractContextManager[object]:
        """Forwards of whole texts inside ask these, by experts module of every layer, in the experts' place."""

    def reading(self) -> AbstractContextManager[object]:
        """Forwards inside are of whole texts, and run the experts as the model has them."""

    def run(
        self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, inner: Inner | None = None
    ) -> Tensor:
        """A layer's experts by transformers' grouped kernel, [T, D]; the same bits wherever they lie.

        Args:
            layer, hidden_TD, ids_TK, weights_TK: what the experts' function is given.
            inner: gets the inner activations, in one call or several; each expert is a group in one of them.
        """

    def weights(self, layer: MoELayer) -> Iterator[Mapping[str, Tensor]]:
        """Each expert's own parameters by name, one expert after another."""


class Offload(Protocol):
    """A model's offload."""

    model: PreTrainedModel
    experts: Experts


class ResidentExperts:
    """Those that a model holds itself.

    Args:
        view: its MoE layers; None: they are looked for.
    """

    def __init__(self, model: PreTrainedModel, view: MoEView | None = None) -> None:
        self._model = model
        self.view = find_moe_layers(model) if view is None else view

    def windows(self, window: int) -> int:
        del window
        return WINDOWS

    @contextmanager
    def answered(self, answers: Mapping[nn.Module, Answer]) -> Iterator[None]:
        _ANSWERS.update(answers)
        try:
            with experts_implementation(self._model, _ANSWERED):
                yield
        finally:
            for experts in answers:
                del _ANSWERS[experts]

    def reading(self) -> AbstractContextManager[object]:
        return nullcontext()

    def run(
        self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, inner: Inner | None = None
    ) -> Tensor:
        def seen(inner_SI: Tensor) -> None:
            assert inner is not None
            ids_S = ids_TK.reshape(-1)
            every_E = torch.arange(layer.num_experts, device=ids_S.device)
            inner(inner_SI, every_E, torch.bincount(ids_S, minlength=layer.num_experts))

        with nullcontext() if inner is None else inner_activations(layer.experts, seen):
            output_TD: Tensor = grouped_mm_experts_forward(layer.experts, hidden_TD, ids_TK, weights_TK)
        return output_TD

    def weights(self, layer: MoELayer) -> Iterator[Mapping[str, Tensor]]:
        return iterate_plain(layer.experts, layer.num_experts)


class ShownExperts(ABC):
    """One layer's experts in forwards over padded windows: real tokens alone run, rows of padding come out as zero.

    Args:
        layer: whose experts.
        shares: whether :meth:`see_shared` is told of the block's shared experts.
    """

    def __init__(self, layer: MoELayer, shares: bool) -> None:
        self.layer, self.shares = layer, shares
        self.keep_T: Tensor | None = None
        """Indices of the batch's real tokens; None for all."""
        self._routed: tuple[Tensor, Tensor] | None = None

    @abstractmethod
    def run(self, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The experts' output [T, D] for real tokens."""

    @abstractmethod
    def see_shared(self, hidden_TD: Tensor, shared_TD: Tensor) -> None:
        """What the block has added to its routed experts' output, for real tokens, in fp32."""

    def answer(self, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """In place of the experts' forward."""
        if self.keep_T is None:
            routed_TD = self.run(hidden_TD, ids_TK, weights_TK)
        else:
            keep_T = self.keep_T.to(hidden_TD.device)
            routed_TD = torch.zeros_like(hidden_TD)
            routed_TD[keep_T] = self.run(hidden_TD[keep_T], ids_TK[keep_T], weights_TK[keep_T])
        if self.shares:
            self._routed = hidden_TD, routed_TD
        return routed_TD

    def after_block(self, _module: nn.Module, _args: tuple[object, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        """A hook on the block."""
        if self._routed is None:
            return
        (hidden_TD, routed_TD), self._routed = self._routed, None
        block = output[0] if isinstance(output, tuple) else output
        shared_TD = block.reshape(routed_TD.shape).float() - routed_TD.float()
        if self.keep_T is not None:
            keep_T = self.keep_T.to(routed_TD.device)
            hidden_TD, shared_TD = hidden_TD[keep_T], shared_TD[keep_T]
        self.see_shared(hidden_TD, shared_TD)


@contextmanager
def shown(model: PreTrainedModel, experts: Experts, layers: Sequence[ShownExperts]) -> Iterator[None]:
    """Forwards inside, in eval mode, run the experts of all layers by these."""
    with ExitStack() as stack:
        if model.training:
            stack.callback(model.train)
            model.eval()
        for own in layers:
            if own.shares:
                stack.callback(own.layer.block.register_forward_hook(own.after_block).remove)
        stack.enter_context(experts.answered({own.layer.experts: own.answer for own in layers}))
        yield


def run_windows(model: PreTrainedModel, batch: WindowBatch) -> None:
    """One forward, without the head: nothing that looks at it reads next-token logits."""
    model.base_model(
        input_ids=batch.input_ids_BS.to(model.device),
        attention_mask=batch.mask_BS.to(model.device),
        use_cache=False,
    )


def model_of(given: PreTrainedModel | Offload) -> PreTrainedModel:
    """The model of an offload; a model is its own."""
    # by its real type: `isinstance` takes an offload for its model
    return given if issubclass(type(given), PreTrainedModel) else given.model  # type: ignore[return-value]


def experts_of(model: PreTrainedModel, view: MoEView | None = None) -> Experts:
    """A model's experts, in it or in its offload's slots.

    Args:
        model: may be offloaded.
        view: its MoE layers, where they are known; an offload knows them itself.

    Raises:
        ExpertcastError: the model is not supported.
    """
    offload: Offload | None = model.__dict__.get(OFFLOAD)
    return ResidentExperts(model, view) if offload is None else offload.experts


@contextmanager
def inner_activations(experts: nn.Module, observe: Callable[[Tensor], None]) -> Iterator[None]:
    """Show what enters the down projection, [S, I]: the gate's result, rows as the kernel sorts them."""
    with ExitStack() as stack:
        if experts.has_gate:
            gate: Callable[[Tensor], Tensor] = experts._apply_gate  # type: ignore[assignment]

            def observed(gate_up: Tensor) -> Tensor:
                inner_SI = gate(gate_up)
                observe(inner_SI)
                return inner_SI

            experts.__dict__["_apply_gate"] = observed  # shadows the class's own for this call
            stack.callback(experts.__dict__.pop, "_apply_gate")
        elif isinstance(experts.act_fn, nn.Module):
            hook = experts.act_fn.register_forward_hook(lambda _m, _args, output: observe(output))
            stack.callback(hook.remove)
        else:
            raise ExpertcastError(f"{type(experts).__name__} is not supported: its activation is no module")
        yield


def _answered_experts(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return _ANSWERS[experts](hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(_ANSWERED, _answered_experts)
