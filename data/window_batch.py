"""Windows of text as batches for a model.

T tokens, B sequences, S tokens per sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from expertcast.data.plan import Window


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
