"""Access to a model's experts, in the model itself or in the slots of its offload.

An offloaded model holds a reference to its offload. Collection uses the interface here and works on both.

T tokens, D hidden size, E routed experts per layer, K experts per token, S = T x K, I inner width of an expert,
G groups of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from expertcast.data.moe_layers import experts_implementation, find_moe_layers
from expertcast.data.packed_experts import is_packed, iterate_plain, run_experts
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoELayer, MoEView

if TYPE_CHECKING:
    from expertcast.data.plan import WindowBatch

OFFLOAD = "_expertcast"
"""Key of the offload in an offloaded model's `__dict__`."""
WINDOWS = 8
"""Default windows per forward for a model that holds its experts."""
_ANSWERED = "expertcast_answered"
Answer: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Replacement of a layer's experts: from hidden [T, D], ids and weights [T, K] to the output [T, D]."""
Inner: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]
"""Observer of the down projection's input: called with rows [S, I], and expert and number of rows per group [G]."""
_ANSWERS: dict[nn.Module, Answer] = {}
"""Active replacements by experts module."""


class Experts(Protocol):
    """The experts of one model."""

    view: MoEView
    """The model's MoE layers."""

    def windows(self, window: int, beside: int = 0) -> int:
        """Return the default number of windows per forward, for windows of `window` tokens, where `beside` bytes are
        kept beside the forward."""

    def answered(self, answers: Mapping[nn.Module, Answer]) -> AbstractContextManager[object]:
        """Replace the experts of all layers in forwards over whole sequences; `answers` is by experts module."""

    def reading(self) -> AbstractContextManager[object]:
        """Run forwards over whole sequences with the experts as the model has them."""

    def run(
        self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, inner: Inner | None = None
    ) -> Tensor:
        """Run a layer's experts with transformers' grouped kernel; the bits do not depend on where the weights are.

        Args:
            layer: MoE layer.
            hidden_TD: input of the experts.
            ids_TK: experts of each token.
            weights_TK: combine weights of these experts.
            inner: called with the inner activations, once or for some experts at a time.

        Returns:
            The output [T, D].
        """

    def weights(self, layer: MoELayer, *names: str) -> Iterator[Mapping[str, Tensor]]:
        """Yield each expert's parameters by name, in order of experts; with `names`, of packed ones only these."""


class Offload(Protocol):
    """The part of an offload that collection needs."""

    model: PreTrainedModel
    experts: Experts


class ResidentExperts:
    """Experts that the model holds itself.

    Args:
        model: the model.
        view: its MoE layers; None finds them.
    """

    def __init__(self, model: PreTrainedModel, view: MoEView | None = None) -> None:
        self._model = model
        self.view = find_moe_layers(model) if view is None else view

    def windows(self, window: int, beside: int = 0) -> int:
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
            if is_packed(layer.experts):
                order_P = torch.sort(ids_TK.reshape(-1)).indices
                return run_experts(
                    layer.experts, hidden_TD, ids_TK, weights_TK, lambda: order_P, grouped=inner is not None
                )
            output_TD: Tensor = grouped_mm_experts_forward(layer.experts, hidden_TD, ids_TK, weights_TK)
            return output_TD

    def weights(self, layer: MoELayer, *names: str) -> Iterator[Mapping[str, Tensor]]:
        return iterate_plain(layer.experts, layer.num_experts, *names)


class ShownExperts(ABC):
    """One layer's experts in forwards over padded windows: runs real tokens only and returns zero for padding.

    Args:
        layer: MoE layer.
        shares: whether to call :meth:`see_shared` with the output of the block's shared experts.
    """

    def __init__(self, layer: MoELayer, shares: bool) -> None:
        self.layer, self.shares = layer, shares
        self.keep_T: Tensor | None = None
        """Indices of the batch's real tokens; None for all."""
        self._routed: tuple[Tensor, Tensor] | None = None

    @abstractmethod
    def run(self, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the experts' output [T, D] for real tokens."""

    @abstractmethod
    def see_shared(self, hidden_TD: Tensor, shared_TD: Tensor) -> None:
        """Observe what the block added to its routed experts' output, for real tokens, in fp32."""

    def answer(self, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Replace the experts' forward."""
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
        """Observe the block's output (forward hook)."""
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
    """Run forwards in eval mode with `layers` in place of the experts of all layers."""
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
    """Run one forward without the head, because collection reads no next-token logits."""
    model.base_model(
        input_ids=batch.input_ids_BS.to(model.device),
        attention_mask=batch.mask_BS.to(model.device),
        use_cache=False,
    )


def model_of(given: PreTrainedModel | Offload) -> PreTrainedModel:
    """Return the model of an offload; a model is returned as it is."""
    # the real type, because `isinstance` accepts an offload as its model
    return given if issubclass(type(given), PreTrainedModel) else given.model  # type: ignore[return-value]


def experts_of(model: PreTrainedModel, view: MoEView | None = None) -> Experts:
    """Return access to a model's experts, in the model or in its offload's slots.

    Args:
        model: model, which may be offloaded.
        view: its MoE layers; None finds them. An offload ignores this argument.

    Raises:
        ExpertcastError: the model is not supported.
    """
    offload: Offload | None = model.__dict__.get(OFFLOAD)
    return ResidentExperts(model, view) if offload is None else offload.experts


@contextmanager
def inner_activations(experts: nn.Module, observe: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `observe` with the down projection's input [S, I], rows in the kernel's order."""
    with ExitStack() as stack:
        if experts.has_gate:
            gate: Callable[[Tensor], Tensor] = experts._apply_gate  # type: ignore[assignment]

            def observed(gate_up: Tensor) -> Tensor:
                inner_SI = gate(gate_up)
                observe(inner_SI)
                return inner_SI

            experts.__dict__["_apply_gate"] = observed  # shadows the method of the class
            stack.callback(experts.__dict__.pop, "_apply_gate")
        elif isinstance(experts.act_fn, nn.Module):
            hook = experts.act_fn.register_forward_hook(lambda _m, _args, output: observe(output))
            stack.callback(hook.remove)
        else:
            raise ExpertcastError(f"{type(experts).__name__} is not supported: its activation is not a module")
        yield


def _answered_experts(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return _ANSWERS[experts](hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(_ANSWERED, _answered_experts)
