"""What a killed collection has committed is gone on with if it is whole, and refused in one line if it is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from expertcast.data import trace_format as layout
from expertcast.data.collect import collect
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors.messages import ExpertcastError
from tests.data.small_traces import SETTINGS, content
from tests.families.models import tiny_model


def begun(
    folder: Path, model: PreTrainedModel, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], TraceDataset]:
    """A collection that was stopped before its end; returns what goes on with it."""

    def go_on() -> TraceDataset:
        return collect(model, tokenizer, load_documents("reference"), folder, **SETTINGS)

    with monkeypatch.context() as patch:
        patch.setattr("expertcast.data.collect._finish", lambda *_args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            go_on()
    return go_on


def test_damage_between_a_kill_and_going_on_is_noticed(
    reference_model: PreTrainedModel, reference_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    expected: list[Any],
) -> None:  # fmt: skip
    folder = tmp_path / "traces"
    go_on = begun(folder, reference_model, reference_tokenizer, monkeypatch)
    names = {path.name for path in folder.iterdir()}
    progress = folder / layout.PROGRESS_FOLDER / layout.progress_file(0)
    draw = random.Random(0)
    for path in (progress, folder / layout.shard_file(0, 1)):
        original = path.read_bytes()
        places = [draw.randrange(len(original)) for _ in range(6)]
        for content_now in [*(flipped(original, place) for place in places), original[:-9], b""]:
            path.write_bytes(content_now)
            with pytest.raises(ExpertcastError, match="delete the folder and collect again") as raised:
                go_on()
            assert "\n" not in str(raised.value)
            assert str(path) in str(raised.value)
            assert {path.name for path in folder.iterdir()} == names
        path.write_bytes(original)
    go_on()
    assert content(folder) == expected


def flipped(original: bytes, place: int) -> bytes:
    return original[:place] + bytes([original[place] ^ 4]) + original[place + 1 :]


def test_a_model_that_gives_nan_is_not_collected_from(reference_tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", torch.float32)
    model.get_input_embeddings().weight.data[200:] = float("nan")  # of no token that the probe gives
    with pytest.raises(ExpertcastError, match="gives NaN or infinity among its r"):
        collect(model, reference_tokenizer, load_documents("reference")[:40], tmp_path / "t", tokens=200, window=24)
