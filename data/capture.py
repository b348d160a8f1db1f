"""What one forward of a model shows of its MoE layers: residuals, logits, and sums of what experts put out.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token, I inner width, S = T x K.
Hooks are attached for one forward at a time and only look (they return None): between batches, and after an error, the
model is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from expertcast.data.discovery import experts_implementation
from expertcast.data.early import EarlyAttention
from expertcast.data.means import MeanOutputs, adds_block, adds_experts
from expertcast.data.taps import RouterCall, RouterTaps
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.rule_check import RuleCheck
from expertcast.predictors.stand_in import StandIn
from expertcast.predictors.view import MoELayer, MoEView

COLLECT_EXPERTS = "expertcast_collect"
_ACTIVE: dict[nn.Module, LayerCapture] = {}
"""Experts modules whose layer is being captured."""


@dataclass(frozen=True, slots=True)
class EarlyRun:
    """Early attention, and what it runs on."""

    attention: EarlyAttention
    stand_in: StandIn


class Capture:
    """Captures one forward over windows: fills `residual_TLD` and `logits_TLE`, and adds to `means`.

    Args:
        view: the model's MoE layers.
        mask_BS: where the windows' real tokens are, T of them.
        means: where to add what experts put out; None leaves it out.
        check: asks each router once whether it goes by its logits.
        residual_dtype: what residuals are rounded to.
        early: fills `early_TLD`; None leaves it None.
    """

    def __init__(
        self,
        view: MoEView,
        mask_BS: Tensor,
        *,
        means: MeanOutputs | None,
        check: RuleCheck,
        residual_dtype: torch.dtype,
        early: EarlyRun | None = None,
    ) -> None:
        tokens = int(mask_BS.sum())
        self.keep_T = mask_BS.reshape(-1).nonzero().squeeze(1) if tokens < mask_BS.numel() else None
        """Indices of the real tokens in the flattened batch, None when there is no padding."""
        self.means, self._view, self._check = means, view, check
        device = view[0].experts.get_parameter("down_proj").device
        self.residual_TLD = torch.empty(
            (tokens, view.shape.layers, view.shape.hidden), dtype=residual_dtype, device=device
        )
        self.logits_TLE = torch.empty(0)
        self.early = early
        self.early_TLD: Tensor | None = None
        if early is not None:
            tokens, layers, hidden = self.residual_TLD.shape
            self.early_TLD = self.residual_TLD.new_empty(tokens, layers - 1, hidden)
        self._standing_TD = torch.empty(0)
        """What stands for the output of the layer before, rows of padding included."""

    def rows(self, flat: Tensor) -> Tensor:
        """The real tokens of [B, S, n] or [B*S, n]."""
        rows = flat.reshape(-1, flat.shape[-1])
        return rows if self.keep_T is None else rows[self.keep_T.to(rows.device)]

    def see(self, call: RouterCall) -> None:
        """Take what one layer's router was given and gave.

        Raises:
            ExpertcastError: the router goes by more than the logits that are kept.
        """
        if call.layer in self._check.unseen:
            self._check.require(call.layer, call.router_input_TD)
        if call.layer == 0:
            self.logits_TLE = call.logits_TE.new_empty(*self.residual_TLD.shape[:2], call.logits_TE.shape[-1])
        self.residual_TLD[:, call.layer] = self.rows(call.residual_TD)
        self.logits_TLE[:, call.layer] = self.rows(call.logits_TE)
        if self.early is not None and self.early_TLD is not None:
            if call.layer:
                found_TD = self.early.attention.attend_whole(call.layer, self._standing_TD)
                self.early_TLD[:, call.layer - 1] = self.rows(self._standing_TD if found_TD is None else found_TD)
            output_TD = self.early.stand_in.output(call.layer, call.router_input_TD, call.ids_TK, call.weights_TK)
            self._standing_TD = call.residual_TD.float() + output_TD

    def finish(self) -> None:
        """The model has run: the steps from residual to residual, for layers that add more than their block's output or
        another thing."""
        if self.means is None:
            return
        for layer in list(self._view)[:-1]:
            if not adds_block(layer):
                before_TD, after_TD = self.residual_TLD[:, layer.index].float(), self.residual_TLD[:, layer.index + 1]
                self.means.add_shared(layer.index, after_TD.float() - before_TD)


class LayerCapture:
    """What one layer's experts add to a capture's means."""

    def __init__(self, layer: MoELayer, capture: Capture) -> None:
        self.layer = layer
        self.capture = capture
        self.routed_TD: Tensor | None = None
        """Output of the routed experts, kept until the block has added the shared ones."""

    def after_block(self, _module: nn.Module, _args: tuple[object, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        """A hook on the block: what it puts out beyond its routed experts is the shared experts' output."""
        means = self.capture.means
        if means is None or self.routed_TD is None:
            return
        block = output[0] if isinstance(output, tuple) else output
        rows = self.capture.rows
        means.add_shared(self.layer.index, rows(block).float() - rows(self.routed_TD).float())
        self.routed_TD = None

    def ran(self, output_TD: Tensor) -> None:
        """The routed experts have put this out."""
        layer, means = self.layer, self.capture.means
        if adds_block(layer):
            self.routed_TD = output_TD if layer.has_shared else None
            return
        if means is None or layer.adds is None or not adds_experts(layer) or layer.index + 1 == len(means.inner_EI):
            return
        # of the step that `Capture.finish` adds
        means.add_shared(layer.index, -layer.adds.factor * self.capture.rows(output_TD).float())

    def add_inner(self, inner_SI: Tensor, ids_TK: Tensor) -> None:
        """Add inner activations of the routed experts, rows sorted by expert."""
        assert self.capture.means is not None
        count_E = torch.bincount(ids_TK.reshape(-1), minlength=self.layer.num_experts)
        self.capture.means.add_experts(self.layer.index, inner_SI, count_E)


@contextmanager
def attached(model: PreTrainedModel, view: MoEView, capture: Capture) -> Iterator[ExitStack]:
    """Capture the forwards run inside; what is given is closed afterwards."""
    with ExitStack() as stack:
        if capture.early is not None:
            capture.early.attention.start()
            capture.early.attention.attach()
            stack.callback(capture.early.attention.close)
        stack.callback(RouterTaps(model, view, capture.see).close)
        for layer in view:
            own = LayerCapture(layer, capture)
            if layer.has_shared and adds_block(layer):
                stack.callback(layer.block.register_forward_hook(own.after_block).remove)
            _ACTIVE[layer.experts] = own
            stack.callback(_ACTIVE.pop, layer.experts)
        stack.enter_context(experts_implementation(model, COLLECT_EXPERTS))
        yield stack


def _collecting_experts(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' grouped_mm over the real tokens only; rows of padding come out as zero."""
    own = _ACTIVE[experts]
    keep_T = own.capture.keep_T
    if keep_T is None:
        output_TD = _grouped(own, experts, hidden_states, top_k_index, top_k_weights)
    else:
        keep_T = keep_T.to(hidden_states.device)
        output_TD = torch.zeros_like(hidden_states)
        output_TD[keep_T] = _grouped(own, experts, hidden_states[keep_T], top_k_index[keep_T], top_k_weights[keep_T])
    own.ran(output_TD)
    return output_TD


def _grouped(own: LayerCapture, experts: nn.Module, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    with ExitStack() as stack:
        if own.capture.means is not None and adds_experts(own.layer):
            stack.enter_context(_inner_activations(experts, lambda inner_SI: own.add_inner(inner_SI, ids_TK)))
        output_TD: Tensor = grouped_mm_experts_forward(experts, hidden_TD, ids_TK, weights_TK)
    return output_TD


@contextmanager
def _inner_activations(experts: nn.Module, observe: Callable[[Tensor], None]) -> Iterator[None]:
    """Show what enters the down projection: the gate's result, rows sorted by expert."""
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


ALL_EXPERTS_FUNCTIONS.register(COLLECT_EXPERTS, _collecting_experts)
