"""Batches of windows through the running model, out comes one TraceBatch each.

T tokens, B windows, S the tokens of the longest of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from expertcast.data.batch import TraceBatch
from expertcast.data.capture import Capture, EarlyRun, attached
from expertcast.data.early import EarlyAttention
from expertcast.data.early_layers import told
from expertcast.data.experts import WINDOWS
from expertcast.data.kept_outputs import Outputs
from expertcast.data.means import MeanOutputs
from expertcast.data.plan import Window
from expertcast.data.window_batch import WindowBatch, window_batches
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.rule_check import RuleCheck
from expertcast.predictors.stand_in import StandIn
from expertcast.predictors.view import MoEView


class ActivationStream:
    """Iterates TraceBatch over windows, in order, from a running model; nothing is stored.

    Args:
        model: is run, in eval mode; its own mode comes back afterwards. It may be offloaded.
        view: the model's MoE layers.
        windows: what iteration runs over, in order.
        batch_size: windows per forward; None: 8.
        means: where to add expert outputs, for default vectors; None leaves them out.
        stand_in: what early attention runs on; None leaves it out.
        early: runs it, where it has been tried before, and must go on at the layers that it runs at then; None makes it
            anew.
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
        batch_size: int | None = None,
        means: MeanOutputs | None = None,
        stand_in: StandIn | None = None,
        early: EarlyAttention | None = None,
        residual_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        batch_size = WINDOWS if batch_size is None else batch_size
        if batch_size < 1:
            raise ExpertcastError(f"batch_size={batch_size}: give at least 1 window per forward")
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        longest = max((len(window.token_ids) for window in windows), default=0)
        if limit is not None and longest > limit:
            raise ExpertcastError(f"window={longest} is longer than the model's context of {limit} tokens: shorten it")
        self.model, self.view, self.windows = model, view, windows
        self.batch_size, self.means, self.residual_dtype = batch_size, means, residual_dtype
        self._early: EarlyRun | None = None
        self._refused = None if early is None else dict(early.refused)
        if stand_in is not None:
            self._early = EarlyRun(early or EarlyAttention(model, view, whole=True), stand_in.to(model.device))
        self._check = RuleCheck(view)

    @property
    def early(self) -> EarlyAttention | None:
        """Runs early attention, where there is a stand-in for it."""
        return None if self._early is None else self._early.attention

    def __iter__(self) -> Iterator[TraceBatch]:
        for batch in window_batches(self.windows, self.batch_size):
            yield self.run(batch)

    @torch.no_grad()
    def run(self, batch: WindowBatch, outputs: Outputs | None = None) -> TraceBatch:
        """One forward. Rows are the batch's real tokens in order, on the CPU.

        Args:
            batch: is run.
            outputs: answers for routed experts where it can; None: they run.

        Raises:
            ExpertcastError: a router goes by more than the logits that are kept of it, or early attention stopped at a
                layer.
        """
        model = self.model
        capture = Capture(
            self.view, batch.mask_BS, means=self.means, check=self._check, residual_dtype=self.residual_dtype,
            early=self._early, outputs=outputs,
        )  # fmt: skip
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
        if self.early is not None and self._refused is not None and self.early.refused != self._refused:
            lines = told({layer: why for layer, why in self.early.refused.items() if layer not in self._refused})
            raise ExpertcastError(
                f"early attention stopped half-way at {'; '.join(lines)}: run the text anew without it "
                "(--early-rank none)"
            )
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
