"""One layer's block as early attention runs it: from its input to the norm before its router."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from expertcast.data.unrecorded import unrecorded
from expertcast.predictors.view import MoELayer

_CLOSE = 2e-2
"""How far a residual may be from the block's own, in parts of its size, when the block is given its own input."""


class ReachedError(Exception):
    """The norm before the router has its input: as far as a block is run."""

    def __init__(self, residual: Tensor) -> None:
        super().__init__()
        self.residual = residual


@dataclass(slots=True)
class Call:
    """How a block was called: everything but its input."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    """Of its input."""


@dataclass(slots=True)
class Block:
    """One layer's block, and what is known of it in the forward that runs."""

    layer: MoELayer
    kind: str | None
    """Blocks of one kind are called with the same masks and positions."""
    cache_index: int | None
    checked: bool = False
    """Whether it has given its own residual for its own input."""
    running: bool = False
    """Now, beside the model."""
    expected: Tensor | None = None
    """In a check: what early attention made of the block's own input."""
    rows: Tensor | None = None
    """In a check: which rows count; None for all."""
    written: Cache | None = field(default=None, repr=False)
    """Of a forward over whole texts: what holds the true keys and values."""
    call: Call | None = None

    def clear(self) -> None:
        """Forget the forward."""
        self.written = self.expected = self.rows = self.call = None

    def reach(self, hidden: Tensor, call: Call, past: Cache | None) -> Tensor:
        """The residual that the block reaches its router's norm with, whose hook ends the run by a `ReachedError`.

        Args:
            hidden: its input [B, S, D].
            call: what it is called with besides.
            past: the cache that it is called with in place of the call's own; is written to.
        """
        with unrecorded(), torch.no_grad():
            self.running = True
            try:
                self.layer.decoder(hidden.to(call.dtype), *call.args, **{**call.kwargs, "past_key_values": past})
            except ReachedError as reached:
                return reached.residual
            finally:
                self.running = False
        raise AssertionError("the block ran without its router's norm")

    def check(self, residual: Tensor) -> bool:
        """Whether what the block made of its own input early is what it makes of it in the model, `residual`."""
        expected, rows = self.expected, self.rows
        self.expected, self.rows, self.checked = None, None, True
        assert expected is not None
        if rows is not None:
            expected, residual = expected[rows], residual[rows]
        size = residual.float().square().mean().sqrt()
        off = (expected.float() - residual.float()).square().mean().sqrt()
        return bool(off <= _CLOSE * size)
