"""Runs of a model's modules that its outputs do not show.

transformers gathers hidden states, attentions and router logits by hooks on the modules themselves: whoever runs a
router or a block beside the model's own forward would add entries that are not of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

try:
    from transformers.utils.output_capturing import _active_collector as _collector
except ImportError:  # another release, which may gather otherwise
    _collector = None  # type: ignore[assignment]


def recording() -> bool:
    """Whether the forward that runs now gathers anything: without it, :func:`unrecorded` changes nothing."""
    return _collector is not None and _collector.get() is not None


@contextmanager
def unrecorded() -> Iterator[None]:
    """What runs inside is not gathered for the model's output."""
    if not recording():
        yield
        return
    token = _collector.set(None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        _collector.reset(token)  # type: ignore[no-untyped-call]
