"""What vLLM says about the forward that is running.

T tokens, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available

from expertcast.predictors.messages import ExpertcastError


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward over the tokens of some requests."""

    tokens: int
    """Of requests; rows behind them are padding. Where the forward becomes a CUDA graph, all rows."""
    requests: int
    decodes: bool
    """One token of each request."""


def running_step() -> Step | None:
    """The forward that is running; None: one that only measures memory or warms up, over no request's tokens.

    Raises:
        ExpertcastError: vLLM's attention does not say whose tokens they are.
    """
    metadata = get_forward_context().attn_metadata if is_forward_context_available() else None
    if not metadata:
        return None
    assert isinstance(metadata, dict), "one batch at a time"
    for each in metadata.values():
        step = _step(each)
        if step is not None:
            return step
    kinds = ", ".join(sorted({type(each).__name__ for each in metadata.values()}))
    raise ExpertcastError(
        f"vLLM's {kinds} does not say which tokens a step is over: choose another --attention-backend, or switch "
        "expertcast off"
    )


def _step(metadata: Any) -> Step | None:
    """What one layer's attention knows: backends name it in one of two ways."""
    tokens = getattr(metadata, "num_actual_tokens", 0)
    if not tokens:
        return None
    starts, longest = getattr(metadata, "query_start_loc", None), getattr(metadata, "max_query_len", 0)
    if starts is not None and longest:
        return Step(tokens=tokens, requests=len(starts) - 1, decodes=longest == 1)
    decodes, prefills = getattr(metadata, "num_decodes", None), getattr(metadata, "num_prefills", None)
    if decodes is None or prefills is None:
        return None
    only = not prefills and getattr(metadata, "num_decode_tokens", 0) == decodes
    return Step(tokens=tokens, requests=decodes + prefills, decodes=only)


def without_padding(rows_TX: Tensor) -> Tensor:
    """The first row in place of each of padding, so that no expert is brought or forecast for that. Asks the device for
    nothing: which rows are padding differs between replays of a CUDA graph."""
    padding_T = get_forward_context().is_padding
    return rows_TX if padding_T is None else rows_TX.where(~padding_T[: len(rows_TX), None], rows_TX[:1])
