"""What does not fit the host is said before it is loaded."""

from __future__ import annotations

import pytest

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.predictors import ExpertcastError
from expertcast.runtime import OffloadedModel, load_offloaded


def test_more_experts_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 28 MB a quarter would be slots, which are host memory too."""
    monkeypatch.setattr("expertcast.runtime.loading.available_memory", lambda: 1_000_000)
    with pytest.raises(ExpertcastError, match="28311552 bytes of host memory and 1000000 are available: use store="):
        load_offloaded(REFERENCE, device="cpu")
    with pytest.raises(ExpertcastError, match="192 slots need 7077888 bytes of host memory and 1000000 are available"):
        load_offloaded(REFERENCE, device="cpu", store="disk")
    with load_offloaded(REFERENCE, device="cpu", store="disk", slots=8) as offloaded:
        assert isinstance(offloaded, OffloadedModel)
    monkeypatch.setattr("expertcast.runtime.loading.available_memory", lambda: 30_000_000)
    with pytest.raises(ExpertcastError, match="the experts' 28311552 and 30000000 are available: give fewer slots"):
        load_offloaded(REFERENCE, device="cpu")
