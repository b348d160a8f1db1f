"""Capture activations of a running model: residuals, logits, early attention, and sums of experts' outputs.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
Hooks are attached for one forward at a time and change nothing: between batches, and after an error, the model has no
hooks.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.batch import RouterCall, TraceBatch
from expertcast.data.early import EarlyAttention, refusal_lines
from expertcast.data.experts import WINDOWS, Experts, ShownExperts, experts_of, run_windows, shown
from expertcast.data.means import MeanOutputs, adds_block, adds_experts
from expertcast.data.packed_experts import down_projection
from expertcast.data.plan import Plan, Window, WindowBatch, pad_windows, window_batches
from expertcast.data.processes import training_share
from expertcast.data.stand_in import LayerOutput, Outputs
from expertcast.data.taps import RouterTaps
from expertcast.data.trace_format import rounded
from expertcast.predictors.early_attention import StandIn
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoELayer, MoEView, RuleCheck


@dataclass(frozen=True, slots=True)
class EarlyRun:
    """Early attention over whole sequences."""

    attention: EarlyAttention
    stand_in: StandIn
    """Stand-in for the layers' outputs."""
    refused: Mapping[int, str] | None = None
    """Layers that early attention refused in its trial, the only ones it may refuse later; None during the trial."""

    def check(self) -> None:
        """Check that early attention has refused no further layer.

        Raises:
            ExpertcastError: early attention stopped at another layer after its trial.
        """
        if self.refused is None:
            return
        found = {layer: why for layer, why in self.attention.refused.items() if layer not in self.refused}
        if found:
            raise ExpertcastError(
                f"early attention stopped half-way at {'; '.join(refusal_lines(found))}: collect again without it "
                "(--early-rank none)"
            )


class ActivationStream:
    """Runs a model over windows and iterates over their TraceBatch in order; stores nothing.

    Args:
        model: model, which may be offloaded; runs in eval mode and gets its own mode back afterwards.
        view: its MoE layers.
        windows: windows to run, in order.
        batch_size: windows per forward.
        means: sums of experts' outputs to add to, for default vectors; None for no sums.
        early: early attention; None for no early attention.
        residual_dtype: dtype of the residuals; bf16 ones are rounded as traces hold them
            (:func:`expertcast.data.trace_format.rounded`).

    Raises:
        ExpertcastError: `batch_size` under 1, or a window longer than the model's context.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        view: MoEView,
        windows: Sequence[Window],
        *,
        batch_size: int = WINDOWS,
        means: MeanOutputs | None = None,
        early: EarlyRun | None = None,
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
        self.early = early
        self.check = RuleCheck(view)

    def __iter__(self) -> Iterator[TraceBatch]:
        for batch in window_batches(self.windows, self.batch_size):
            yield self.run(batch)

    @torch.no_grad()
    def run(self, batch: WindowBatch, outputs: Outputs | None = None) -> TraceBatch:
        """Run one forward and return the batch's real tokens in order, on the CPU.

        Args:
            batch: windows to run.
            outputs: known outputs of the routed experts; None runs the experts.

        Raises:
            ExpertcastError: a router's choice does not follow from its logits, or early attention stopped at a layer.
        """
        capture = Capture(self, batch.mask_BS, outputs)
        with capture.attached():
            run_windows(self.model, batch)
        capture.finish()
        if self.early is not None:
            self.early.check()
        if self.means is not None:
            self.means.token_count += len(batch)
        return TraceBatch(
            residual_TLD=capture.residual_TLD.cpu(),
            logits_TLE=capture.logits_TLE.cpu(),
            early_TLD=None if capture.early_TLD is None else capture.early_TLD.cpu(),
            document_T=batch.document_T,
            position_T=batch.position_T,
            token_T=batch.token_T,
        )


class Capture:
    """Captures one forward over windows: fills `residual_TLD`, `logits_TLE` and `early_TLD`, and adds to the means.

    Args:
        stream: model and settings.
        mask_BS: marks the T real tokens of the windows.
        outputs: known outputs of the routed experts; None runs the experts.
    """

    def __init__(self, stream: ActivationStream, mask_BS: Tensor, outputs: Outputs | None) -> None:
        tokens = int(mask_BS.sum())
        self.keep_T = mask_BS.reshape(-1).nonzero().squeeze(1) if tokens < mask_BS.numel() else None
        """Indices of the real tokens in the flattened batch; None without padding."""
        self._stream, self.means, self.outputs = stream, stream.means, outputs
        view = stream.view
        device = down_projection(view[0].experts).device
        layers, hidden = view.shape.layers, view.shape.hidden
        self.residual_TLD = torch.empty((tokens, layers, hidden), dtype=stream.residual_dtype, device=device)
        self.logits_TLE = torch.empty(0)
        self.early_TLD = None if stream.early is None else self.residual_TLD.new_empty(tokens, layers - 1, hidden)
        self._standing_TD = torch.empty(0)
        """Residual of the layer before plus the stand-in for its output, including rows of padding."""

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Capture the forward that runs inside."""
        model, view, early = self._stream.model, self._stream.view, self._stream.early
        experts = experts_of(model, view)
        with ExitStack() as stack:
            if early is not None:
                early.attention.start()
                early.attention.attach()
                stack.callback(early.attention.close)
            stack.callback(RouterTaps(model, view, self._see).close)
            stack.enter_context(shown(model, experts, [LayerCapture(layer, self, experts) for layer in view]))
            yield

    def _rows(self, flat_TX: Tensor) -> Tensor:
        """Return the rows of real tokens."""
        return flat_TX if self.keep_T is None else flat_TX[self.keep_T.to(flat_TX.device)]

    def _keep(self, kept_TLD: Tensor, layer: int, flat_TD: Tensor) -> None:
        """Keep the rows of real tokens."""
        rows_TD = self._rows(flat_TD).to(kept_TLD.dtype)
        kept_TLD[:, layer] = rounded(rows_TD) if rows_TD.dtype == torch.bfloat16 else rows_TD

    def _see(self, call: RouterCall) -> None:
        """Keep input and output of one layer's router.

        Raises:
            ExpertcastError: the router's choice does not follow from its logits.
        """
        if call.layer in self._stream.check.unseen:
            self._stream.check.require(call.layer, call.router_input_TD)
        if call.layer == 0:
            self.logits_TLE = call.logits_TE.new_empty(*self.residual_TLD.shape[:2], call.logits_TE.shape[-1])
        self._keep(self.residual_TLD, call.layer, call.residual_TD)
        self.logits_TLE[:, call.layer] = self._rows(call.logits_TE)
        early = self._stream.early
        if early is not None and self.early_TLD is not None:
            if call.layer:
                found_TD = early.attention.attend_whole(call.layer, self._standing_TD)
                self._keep(self.early_TLD, call.layer - 1, self._standing_TD if found_TD is None else found_TD)
            output_TD = early.stand_in.output(call.layer, call.router_input_TD, call.ids_TK, call.weights_TK)
            self._standing_TD = call.residual_TD.float() + output_TD

    def finish(self) -> None:
        """Add the steps from residual to residual to the means, for layers that add more than their block's output."""
        if self.means is None:
            return
        for layer in list(self._stream.view)[:-1]:
            if not adds_block(layer):
                before_TD, after_TD = self.residual_TLD[:, layer.index].float(), self.residual_TLD[:, layer.index + 1]
                self.means.add_shared(layer.index, after_TD.float() - before_TD)


class LayerCapture(ShownExperts):
    """Runs one layer's experts and adds their outputs to a capture's means."""

    def __init__(self, layer: MoELayer, capture: Capture, experts: Experts) -> None:
        super().__init__(layer, capture.means is not None and layer.has_shared and adds_block(layer))
        self.keep_T, self._capture, self._experts = capture.keep_T, capture, experts

    def run(self, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        layer, index = self.layer, self.layer.index
        means = self._capture.means if adds_experts(layer) else None
        outputs = self._capture.outputs
        if outputs is None:
            inner = None if means is None else partial(means.add_experts, index)
            output_TD = self._experts.run(layer, hidden_TD, ids_TK, weights_TK, inner)
        else:
            kept = outputs(layer, hidden_TD)
            output_TD = kept.output_TD
            if means is not None:
                every_E = torch.arange(layer.num_experts, device=kept.count_E.device)
                means.add_sums(index, kept.inner_EI, every_E, kept.count_E)
        if means is not None and layer.adds is not None and not adds_block(layer) and index + 1 < len(means.inner_EI):
            # `Capture.finish` adds the whole step
            means.add_shared(index, -layer.adds.factor * output_TD.float())
        return output_TD

    def see_shared(self, hidden_TD: Tensor, shared_TD: Tensor) -> None:
        assert self._capture.means is not None
        self._capture.means.add_shared(self.layer.index, shared_TD)


# Trial of early attention on the first window


def try_early(model: PreTrainedModel, view: MoEView, plan: Plan) -> tuple[EarlyAttention | None, TraceBatch]:
    """Try early attention on the first window of a plan; print the layers that cannot run early to standard error.

    Returns:
        Early attention, or None if the plan leaves it out or no layer can run early; and the first window's batch.
    """
    early = None
    if plan.early_rank is not None:
        early = EarlyRun(EarlyAttention(model, view, whole=True), StandIn(view.shape, 0).to(model.device))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "forecasts do without early attention")  # printed below
        # the trial needs attention and routers only: experts might be read from a disk
        first = pad_windows(plan.windows_of(plan.documents)[:1])
        seen = ActivationStream(model, view, [], early=early).run(first, LayerOutput.zero)
    if early is None:
        return None, seen
    if training_share().rank == 0:
        lines = refusal_lines(early.attention.refused) if len(view) > 1 else ["a model of one MoE layer"]
        for line in lines:
            print(f"no early attention at {line}", file=sys.stderr)
    return early.attention if early.attention.works else None, seen
