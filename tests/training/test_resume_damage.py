"""A training's state that was damaged."""

from __future__ import annotations

import logging
import math
import random
from pathlib import Path

import pytest
import torch

from expertcast.predictors import ExpertcastError
from expertcast.training.loop import note_of, read_state, write_state
from tests.irregular import IRREGULAR, in_seconds, put


def test_a_damaged_state_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Any byte of it: the training starts over, and says so, or nothing has changed."""
    path = tmp_path / "state.safetensors"
    state = {"score": -math.inf, "step": 3, "network": {"weight": torch.rand(3, 5), "count": torch.arange(4)}}
    write_state(path, state, {"fingerprint": "x", "step": 3, "finished": False})
    content, whole = path.read_bytes(), read_state(path)
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << random.randrange(8)
        path.write_bytes(changed)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            note = note_of(path, "x")
        if note is None:
            assert "this training starts over" in caplog.text
            with pytest.raises(ExpertcastError, match=r"damaged|note"):
                read_state(path)
        else:
            assert note["step"] == 3
            assert str(read_state(path)) == str(whole)


@pytest.mark.parametrize("kind", IRREGULAR)
def test_what_is_no_file(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "state.safetensors"
    put(kind, path)
    with in_seconds(20), caplog.at_level(logging.WARNING):
        assert note_of(path, "x") is None
        with pytest.raises(ExpertcastError, match=r"state.safetensors is damaged"):
            read_state(path)
