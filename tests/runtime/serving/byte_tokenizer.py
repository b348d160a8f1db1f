"""A tokenizer for models without one."""

from __future__ import annotations

import torch


class ByteTokenizer:
    """Bytes are ids, 0 to 63."""

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[byte % 64 for byte in text.encode()]])}
