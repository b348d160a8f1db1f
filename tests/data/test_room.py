"""What a model will take is known before it is read, and said in one line where there is less."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertcast.cli import main
from expertcast.data.models import REFERENCE, load_model
from expertcast.predictors import ExpertcastError
from tests.families.models import tiny_model
from tests.runtime.quantised import fp8, mxfp4


def held(path: str, dtype: str) -> int:
    """Bytes of a loaded model."""
    model = load_model(path, dtype=dtype)
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
@pytest.mark.parametrize("kind", ["plain", "fp8", "mxfp4"])
def test_bytes_are_those_of_the_loaded_model(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "model")
    if kind == "plain":
        tiny_model("qwen2_moe").save_pretrained(path)
    else:
        path = fp8("qwen3_moe", tmp_path / "model") if kind == "fp8" else mxfp4(tmp_path / "model")
    needed = held(path, dtype)
    monkeypatch.setattr("expertcast.data.models.available_memory", lambda: needed)
    load_model(path, dtype=dtype)
    monkeypatch.setattr("expertcast.data.models.available_memory", lambda: needed - 1)
    with pytest.raises(ExpertcastError, match=f"needs {needed} bytes of memory and {needed - 1} are available"):
        load_model(path, dtype=dtype)


def test_more_than_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    needed = held(REFERENCE, "auto")
    monkeypatch.setattr("expertcast.data.models.available_memory", lambda: 1000)
    command = ["collect", REFERENCE, "--data", REFERENCE, "--tokens", "400", "--out", str(tmp_path / "traces")]
    assert main(command) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1] == (
        f"expertcast: 'reference' needs {needed} bytes of memory and 1000 are available: run it from a disk by "
        "--store-folder of generate, serve, collect, train or eval (in Python load_offloaded with store='disk')"
    )
