"""Tensors of a checkpoint, whole and by rows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from expertcast.data.source import ModelSource
from expertcast.data.weights.files import SafetensorsFiles

_NUMBERS = torch.arange(7 * 3 * 5, dtype=torch.float32).view(7, 3, 5)
_TENSORS = {
    str(dtype).removeprefix("torch."): (_NUMBERS % 2 if dtype == torch.bool else _NUMBERS).to(dtype)
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.uint8, torch.int8, torch.int64, torch.bool,
    )
}  # fmt: skip


@pytest.mark.parametrize("part", [..., slice(0, 1), slice(2, 5), slice(6, 7), slice(0, 7), slice(3, 3), slice(5, None)])
def test_rows_are_those_of_the_tensor(part: slice, tmp_path: Path) -> None:
    save_file({**_TENSORS, "vector": torch.arange(9.0)}, tmp_path / "model.safetensors")
    with SafetensorsFiles(ModelSource.of(tmp_path)) as files:
        for name, tensor in _TENSORS.items():
            found = files.tensors[name][part]
            assert found.dtype == tensor.dtype
            assert torch.equal(found.double(), tensor[part].double())
        assert torch.equal(files.tensors["vector"][part], torch.arange(9.0)[part])


def test_no_more_than_the_rows_is_read(tmp_path: Path) -> None:
    """The file ends behind the second row: the two are there, and a third is one error."""
    path = tmp_path / "model.safetensors"
    save_file({"fused": _NUMBERS}, path)
    with SafetensorsFiles(ModelSource.of(tmp_path)) as files:
        os.truncate(path, path.stat().st_size - 5 * 3 * 5 * 4)
        assert torch.equal(files.tensors["fused"][0:2], _NUMBERS[:2])
        with pytest.raises(OSError, match="is cut off"):
            files.tensors["fused"][2:3]


def test_reads_that_give_less_than_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux does above 2 GiB, and network file systems at any size."""
    preadv = os.preadv
    save_file(_TENSORS, tmp_path / "model.safetensors")
    monkeypatch.setattr(os, "preadv", lambda file, views, at: preadv(file, [memoryview(views[0])[:50]], at))
    with SafetensorsFiles(ModelSource.of(tmp_path)) as files:
        assert torch.equal(files.tensors["float32"][1:6], _NUMBERS[1:6])
