"""Batches of windows through the running model, out comes one TraceBatch each.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token, I inner width, S = T x K.
Hooks are attached for one forward at a time and only look (they return None): between batches, and after an error, the
model is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from expertcast.data.batch import TraceBatch
from expertcast.data.discovery import experts_implementation
from expertcast.data.means import MeanOutputs, adds_block, adds_experts
from expertcast.data.plan import Window
from expertcast.data.taps import RouterCall, RouterTaps
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import MoELayer, MoEView

COLLECT_EXPERTS = "expertcast_collect"
_ACTIVE: dict[nn.Module, LayerCapture] = {}
"""Experts modules whose layer is being captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBatch:
    """Windows padded on the right to the longest; the T real tokens in order."""

    input_ids_BS: Tensor
    mask_BS: Tensor
    token_T: Tensor
    document_T: Tensor
    position_T: Tensor

    def __len__(self) -> int:
        return int(self.token_T.shape[0])


def window_batches(windows: Sequence[Window], batch_size: int) -> Iterator[WindowBatch]:
    """Batches of `batch_size` windows, in order; the last one may be smaller."""
    for begin in range(0, len(windows), batch_size):
        yield pad_windows(windows[begin : begin + batch_size])


def pad_windows(windows: Sequence[Window]) -> WindowBatch:
    """Some windows as one batch."""
    longest = max(len(window.token_ids) for window in windows)
    ids_BS, mask_BS = (np.zeros((len(windows), longest), dtype=np.int64) for _ in range(2))
    for row, window in enumerate(windows):
        ids_BS[row, : len(window.token_ids)] = window.token_ids
        mask_BS[row, : len(window.token_ids)] = 1
    return WindowBatch(
        input_ids_BS=torch.from_numpy(ids_BS),
        mask_BS=torch.from_numpy(mask_BS),
        token_T=torch.from_numpy(np.concatenate([w.token_ids for w in windows]).astype(np.int64)),
        document_T=torch.from_numpy(np.repeat([w.document for w in windows], [len(w.token_ids) for w in windows])),
        position_T=torch.from_numpy(np.concatenate([w.start + np.arange(len(w.token_ids)) for w in windows])),
    )


class ActivationStream:
    """Iterates TraceBatch over windows, in order, from a running model; nothing is stored.

    Args:
        model: is run, in eval mode; its own mode comes back afterwards.
        view: the model's MoE layers.
        windows: what iteration runs over, in order.
        batch_size: windows per forward.
        means: where to add expert outputs, for default vectors; None leaves them out.
        residual_dtype: what residuals are rounded to; traces hold bf16.

    Raises:
        ExpertcastError: `batch_size` under 1, or a window longer than the model's context.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        view: MoEView,
        windows: Sequence[Window],
        *,
        batch_size: int = 8,
        means: MeanOutputs | None = None,
        residual_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if batch_size < 1:
            raise ExpertcastError(f"batch_size={batch_size}: give at least 1 window per forward")
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        longest = max((len(window.token_ids) for window in windows), default=0)
        if limit is not None and longest > limit:
            raise ExpertcastError(f"window={longest} is longer than the model's context of {limit} tokens: shorten it")
        self.model, self.view, self.windows = model, view, windows
        self.batch_size, self.means, self.residual_dtype = batch_size, means, residual_dtype

    def __iter__(self) -> Iterator[TraceBatch]:
        for batch in window_batches(self.windows, self.batch_size):
            yield self.run(batch)

    @torch.no_grad()
    def run(self, batch: WindowBatch) -> TraceBatch:
        """One forward. Rows are the batch's real tokens in order, on the CPU."""
        model = self.model
        capture = Capture(self, batch)
        with attached(model, self.view, capture) as stack:
            if model.training:
                stack.callback(model.train)
                model.eval()
            model.base_model(  # without the head: nothing here reads next-token logits
                input_ids=batch.input_ids_BS.to(model.device),
                attention_mask=batch.mask_BS.to(model.device),
                use_cache=False,
            )
        capture.finish()
        if self.means is not None:
            self.means.token_count += len(batch)
        return TraceBatch(
            residual_TLD=capture.residual_TLD.cpu(),
            logits_TLE=capture.logits_TLE.cpu(),
            document_T=batch.document_T,
            position_T=batch.position_T,
        )


class Capture:
    """Captures one batch of a stream: fills `residual_TLD` and `logits_TLE`, and adds to `means` when there is one."""

    def __init__(self, stream: ActivationStream, batch: WindowBatch) -> None:
        padded = len(batch) < batch.mask_BS.numel()
        self.keep_T = batch.mask_BS.reshape(-1).nonzero().squeeze(1) if padded else None
        """Indices of the real tokens in the flattened batch, None when there is no padding."""
        self.means, self._view = stream.means, stream.view
        size = (len(batch), stream.view.shape.layers, stream.view.shape.hidden)
        device = stream.view[0].experts.get_parameter("down_proj").device
        self.residual_TLD = torch.empty(size, dtype=stream.residual_dtype, device=device)
        self.logits_TLE = torch.empty(0)

    def rows(self, flat: Tensor) -> Tensor:
        """The real tokens of [B, S, n] or [B*S, n]."""
        rows = flat.reshape(-1, flat.shape[-1])
        return rows if self.keep_T is None else rows[self.keep_T.to(rows.device)]

    def see(self, call: RouterCall) -> None:
        """Take what one layer's router was given and gave."""
        if call.layer == 0:
            self.logits_TLE = call.logits_TE.new_empty(*self.residual_TLD.shape[:2], call.logits_TE.shape[-1])
        self.residual_TLD[:, call.layer] = self.rows(call.residual_TD)
        self.logits_TLE[:, call.layer] = self.rows(call.logits_TE)

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
        elif means is not None and layer.adds is not None and adds_experts(layer):
            if layer.index + 1 < len(means.inner_EI):  # of the step that `Capture.finish` adds
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
