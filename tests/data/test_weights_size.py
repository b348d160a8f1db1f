"""What a checkpoint will take is known from its headers, and refused before it is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from expertcast.cli import main
from expertcast.data.models import REFERENCE, load_model, resolve_model
from expertcast.data.weights_size import loaded_bytes
from expertcast.predictors import ExpertcastError
from tests.families.models import tiny_model
from tests.runtime.quantised import fp8, mxfp4


def held(path: str, dtype: str) -> int:
    """Bytes of a loaded model's own parameters and buffers of its checkpoint."""
    return sum(tensor.nbytes for tensor in load_model(path, dtype=dtype).state_dict().values())


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
@pytest.mark.parametrize("kind", ["one file", "shards", "fp8", "mxfp4"])
def test_bytes_are_those_of_the_loaded_model(kind: str, dtype: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if kind in ("fp8", "mxfp4"):
        path = fp8("qwen3_moe", folder) if kind == "fp8" else mxfp4(folder)
    else:
        path = str(folder)
        tiny_model("qwen2_moe").save_pretrained(path, max_shard_size="100KB" if kind == "shards" else "1GB")
    said = loaded_bytes(path, torch.float32 if dtype == "fp32" else torch.bfloat16)
    assert said == pytest.approx(held(path, dtype), rel=0.02 if kind in ("fp8", "mxfp4") else 0)


def test_what_is_not_at_hand_is_not_known(tmp_path: Path) -> None:
    assert loaded_bytes(str(tmp_path), None) is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert loaded_bytes(str(tmp_path), None) is None
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "no.safetensors"}}')
    assert loaded_bytes(str(tmp_path), None) is None


def test_more_than_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    needed = loaded_bytes(resolve_model(REFERENCE), None)
    assert needed is not None
    monkeypatch.setattr("expertcast.data.weights_size.available_memory", lambda: needed)
    load_model(REFERENCE)
    with pytest.raises(ExpertcastError, match=f"needs {2 * needed} bytes of memory and {needed} are available"):
        load_model(REFERENCE, dtype="fp32")
    monkeypatch.setattr("expertcast.data.weights_size.available_memory", lambda: 1000)
    command = ["collect", REFERENCE, "--data", REFERENCE, "--tokens", "400", "--out", str(tmp_path / "traces")]
    assert main(command) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1] == (
        f"expertcast: 'reference' needs {needed} bytes of memory and 1000 are available: offload it by --memory and "
        "--store-folder (in Python load_offloaded with store='disk')"
    )
