"""What vLLM says about the forward that is running."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward over the tokens of some requests."""

    tokens: int
    """Of requests; rows behind them are padding."""
    requests: int
    decodes: bool
    """One token of each request."""
    starts: Tensor
    """[requests + 1] where each request's tokens begin."""


def running_step() -> Step | None:
    """The forward that is running; None: one that only measures memory or warms up, over no request's tokens."""
    metadata = get_forward_context().attn_metadata if is_forward_context_available() else None
    if not metadata:
        return None
    assert isinstance(metadata, dict), "one batch at a time"
    of_layers = [each for each in metadata.values() if hasattr(each, "num_actual_tokens")]
    if not of_layers:
        return None
    first = of_layers[0]
    starts = first.query_start_loc
    return Step(
        tokens=first.num_actual_tokens, requests=len(starts) - 1, decodes=first.max_query_len == 1, starts=starts
    )
