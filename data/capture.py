"""What one forward of a model shows of its MoE layers: residuals, logits, and sums of what experts put out.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
Hooks are attached for one forward at a time and only look (they return None): between batches, and after an error, the
model is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.batch import RouterCall
from expertcast.data.early import EarlyAttention
from expertcast.data.experts import Experts, ShownExperts, experts_of, shown
from expertcast.data.means import MeanOutputs, adds_block, adds_experts
from expertcast.data.stand_in import Outputs
from expertcast.data.taps import RouterTaps
from expertcast.predictors.early_attention import StandIn
from expertcast.predictors.view import MoELayer, MoEView, RuleCheck


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
        outputs: answers for routed experts where it can; None: they run.
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
        outputs: Outputs | None = None,
    ) -> None:
        tokens = int(mask_BS.sum())
        self.keep_T = mask_BS.reshape(-1).nonzero().squeeze(1) if tokens < mask_BS.numel() else None
        """Indices of the real tokens in the flattened batch, None when there is no padding."""
        self.means, self.outputs = means, outputs
        self._view, self._check = view, check
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


class LayerCapture(ShownExperts):
    """What one layer's experts add to a capture's means."""

    def __init__(self, layer: MoELayer, capture: Capture, experts: Experts) -> None:
        super().__init__(layer, capture.means is not None and layer.has_shared and adds_block(layer))
        self.keep_T, self._capture, self._experts = capture.keep_T, capture, experts

    def run(self, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        layer, index = self.layer, self.layer.index
        means = self._capture.means if adds_experts(layer) else None
        kept = None if self._capture.outputs is None else self._capture.outputs.read(layer, hidden_TD)
        if kept is None:
            inner = None if means is None else partial(means.add_experts, index)
            output_TD = self._experts.run(layer, hidden_TD, ids_TK, weights_TK, inner)
        else:
            output_TD = kept.output_TD
            if means is not None:
                every_E = torch.arange(layer.num_experts, device=kept.count_E.device)
                means.add_sums(index, kept.inner_EI, every_E, kept.count_E)
        if means is not None and layer.adds is not None and not adds_block(layer) and index + 1 < len(means.inner_EI):
            # of the step that `Capture.finish` adds
            means.add_shared(index, -layer.adds.factor * output_TD.float())
        return output_TD

    def see_shared(self, hidden_TD: Tensor, shared_TD: Tensor) -> None:
        assert self._capture.means is not None
        self._capture.means.add_shared(self.layer.index, shared_TD)


@contextmanager
def attached(model: PreTrainedModel, view: MoEView, capture: Capture) -> Iterator[None]:
    """Capture the forwards run inside."""
    experts = experts_of(model, view)
    with ExitStack() as stack:
        if capture.early is not None:
            capture.early.attention.start()
            capture.early.attention.attach()
            stack.callback(capture.early.attention.close)
        stack.callback(RouterTaps(model, view, capture.see).close)
        stack.enter_context(shown(model, experts, [LayerCapture(layer, capture, experts) for layer in view]))
        yield
