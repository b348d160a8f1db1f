"""Options that several commands have, and what they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from expertcast.commands.options import Count, Option

DTYPES = ("auto", "bf16", "fp16", "fp32")
SPLITS = ("train", "validation", "test", "all")
MODEL_HELP = "local folder or hub id of a transformers model, or `reference` (the bundled model)"
BANDWIDTH_HELP = "emulate a link of this bandwidth: a number, or pcie3, pcie4, pcie5 (12, 25, 50 GB/s)"
DATA_HELP = "hub data set id, or local .parquet/.jsonl/.txt files with a column `text`, or `reference` (bundled text)"
Model = Annotated[str, Option(positional=True, metavar="MODEL", help=MODEL_HELP)]
Data = Annotated[tuple[str, ...], Option(metavar="D", help=DATA_HELP)]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is loaded."""

    dtype: Annotated[str, Option(choices=DTYPES)] = "auto"
    """Dtype to load in."""
    device: str = "auto"
    """cpu, cuda, cuda:1 ... (default: cuda when there is one)."""

    @property
    def device_name(self) -> str:
        """`device`, with `auto` resolved."""
        return device_of(self.device)


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """How text is run through a model."""

    window: Count = 256
    """Tokens per window."""
    batch_size: Count = 8
    """Windows per forward."""


def device_of(device: str) -> str:
    """`--device`, with `auto` resolved."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"
