"""What a model will take is known before it is read, and said in one line where there is less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.cli import main
from expertcast.data.models import load_model
from expertcast.predictors import ExpertcastError
from tests.families.models import tiny_model
from tests.runtime.gguf_files import tiny, write
from tests.runtime.quantised import fp8, mxfp4

HOST_MEMORY = "expertcast.data.machine.available_memory"


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
    monkeypatch.setattr(HOST_MEMORY, lambda: needed)
    load_model(path, dtype=dtype)
    monkeypatch.setattr(HOST_MEMORY, lambda: needed - 1)
    with pytest.raises(ExpertcastError, match=f"needs {needed} bytes of memory and {needed - 1} are available"):
        load_model(path, dtype=dtype)


def test_more_than_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    needed = held(REFERENCE, "auto")
    monkeypatch.setattr(HOST_MEMORY, lambda: 1000)
    command = ["collect", REFERENCE, "--data", REFERENCE, "--tokens", "400", "--out", str(tmp_path / "traces")]
    assert main(command) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1] == (
        f"expertcast: 'reference' needs {needed} bytes of memory and 1000 are available: run it from a disk by "
        "--store-folder of generate, serve, collect, train or eval (in Python load_offloaded with store='disk')"
    )


@pytest.mark.parametrize("kind", ["plain", "fp8", "mxfp4", "gguf"])
def test_a_model_for_another_device_never_lies_in_host_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device `meta` stands in for a GPU; host memory, of which there is none left here, does not count."""
    path = str(tmp_path / "model")
    if kind == "plain":
        tiny_model("qwen2_moe").save_pretrained(path)
    elif kind == "gguf":
        path += ".gguf"
        write(Path(path), tiny("qwen3_moe"), "Q8_0")
    else:
        path = fp8("qwen3_moe", tmp_path / "model") if kind == "fp8" else mxfp4(tmp_path / "model")
    assert devices_while_loading(path, "cpu") == {"meta", "cpu"}
    monkeypatch.setattr(HOST_MEMORY, lambda: 0)
    assert devices_while_loading(path, "meta") == {"meta"}


def devices_while_loading(path: str, device: str) -> set[str]:
    """Where the parameters of a model lie while it is loaded, and what is in it afterwards."""
    found = set[str]()
    hook = register_module_parameter_registration_hook(
        lambda _module, _name, parameter: found.add(parameter.device.type)
    )
    try:
        model = load_model(path, device=device)
    finally:
        hook.remove()
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {device}
    return found


def test_a_model_for_a_gpu_is_checked_against_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = held(REFERENCE, "auto")
    monkeypatch.setattr(HOST_MEMORY, lambda: 1 << 50)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1000, 1 << 50))
    with pytest.raises(ExpertcastError, match=f"needs {needed} bytes of cuda memory and 1000 are available"):
        load_model(REFERENCE, device="cuda")
