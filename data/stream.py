"""Batches of windows through the running model, out comes one TraceBatch each.

T tokens, B windows, S the tokens of the longest of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.batch import TraceBatch
from expertcast.data.capture import Capture, attached
from expertcast.data.means import MeanOutputs
from expertcast.data.plan import Window
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.rule_check import RuleCheck
from expertcast.predictors.view import MoEView


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
        self._check = RuleCheck(view)

    def __iter__(self) -> Iterator[TraceBatch]:
        for batch in window_batches(self.windows, self.batch_size):
            yield self.run(batch)

    @torch.no_grad()
    def run(self, batch: WindowBatch) -> TraceBatch:
        """One forward. Rows are the batch's real tokens in order, on the CPU.

        Raises:
            ExpertcastError: a router goes by more than the logits that are kept of it.
        """
        model = self.model
        capture = Capture(
            self.view, batch.mask_BS, means=self.means, check=self._check, residual_dtype=self.residual_dtype
        )
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
