"""Memory and processors at hand, and models that do not fit: refused in one line before they are read."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from expertcast import offload
from expertcast.checkpoints.bundled import REFERENCE
from expertcast.cli import main
from expertcast.data.machine import available_memory, usable_processors
from expertcast.data.models import load_model
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import format_bytes
from tests.families.models import tiny_model
from tests.runtime.gguf_files import tiny, write
from tests.runtime.quantised import fp8, mxfp4

MACHINE = 1000 * 1024
V1 = "31 23 0:32 {top} {mount} rw,nosuid shared:9 - cgroup cgroup rw,memory\n"
V2 = "31 23 0:28 {top} {mount} rw - cgroup2 cgroup2 rw,nsdelegate\n"
CPU = "31 23 0:29 / {mount} rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n"
OTHERS = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 23 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"


def system(root: Path, own: str, mounts: str) -> Path:
    """A root of a file system with what `/proc` says; without control groups' files."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:  9999 kB\nMemAvailable:  1000 kB\n")
    (root / "proc/self/cgroup").write_text(own)
    (root / "proc/self/mountinfo").write_text(OTHERS + mounts)
    return root


def group(folder: Path, version: int, limit: int | str, used: int, file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    prefix = "total_" if version == 1 else ""
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    statistics = (
        f"{prefix}anon {used - file}\n{prefix}inactive_file {file // 2}\n{prefix}active_file {file - file // 2}\n"
    )
    (folder / "memory.stat").write_text(statistics + ("" if version == 2 else "inactive_file 77777\n"))


def test_without_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    assert available_memory(system(tmp_path, "0::/\n", V2.format(top="/", mount="/sys/fs/cgroup"))) == MACHINE


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tightest", range(3))
def test_the_tightest_of_all_groups_above(version: int, tightest: int, tmp_path: Path) -> None:
    """File cache that counts against a group can be reclaimed; the group of another process does not matter."""
    mount = "/sys/fs/cgroup/memory" if version == 1 else "/sys/fs/cgroup"
    own = "5:cpu:/x\n4:memory,hugetlb:/user/a job\n0::/\n" if version == 1 else "0::/user/a job\n"
    root = system(tmp_path, own, (V1 if version == 1 else V2).format(top="/", mount=mount))
    folders = [tmp_path / mount[1:], tmp_path / mount[1:] / "user", tmp_path / mount[1:] / "user/a job"]
    for number, folder in enumerate(folders):
        group(folder, version, 500_000 if number == tightest else 900_000, 200_000, file=60_001)
    group(folders[1] / "other", version, 10, 9)
    assert available_memory(root) == 500_000 - 200_000 + 60_001
    unlimited = 9223372036854771712 if version == 1 else "max"
    group(folders[tightest], version, unlimited, 200_000)
    assert available_memory(root) == 900_000 - 200_000 + 60_001
    group(folders[2], version, 100_000, 100_001)
    assert available_memory(root) == 0


@pytest.mark.parametrize("top", ["/docker/abc", "/elsewhere"])
def test_a_container_sees_its_own_group_as_the_topmost(top: str, tmp_path: Path) -> None:
    """`/proc/self/cgroup` may have the path outside the container; mount points have octal escapes."""
    root = system(tmp_path, "9:memory:/docker/abc\n", V1.format(top=top, mount="/a\\040place/memory"))
    group(tmp_path / "a place/memory", 1, 300_000, 1_000)
    assert available_memory(root) == 299_000


@pytest.mark.parametrize(
    ("own", "mounts", "quotas", "expected"),
    [
        ("0::/job\n", V2, {"": None, "job": "max 100000"}, 64),
        ("0::/job\n", V2, {"": "400000 100000", "job": "250000 100000"}, 3),
        ("0::/job\n", V2, {"": "150000 100000", "job": "max 100000", "other": "1000 100000"}, 2),
        ("4:cpuacct,cpu:/job\n0::/\n", CPU, {"job": (-1, 100000)}, 64),
        ("4:cpuacct,cpu:/job\n0::/\n", CPU, {"": (800000, 100000), "job": (20000, 50000)}, 1),
    ],
)
def test_processors_are_those_of_affinity_and_quota(
    own: str, mounts: str, quotas: dict[str, Any], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: range(64))
    root = system(tmp_path, own, mounts.format(top="/", mount="/groups"))
    for name, quota in quotas.items():
        folder = tmp_path / "groups" / name
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(quota, str):
            (folder / "cpu.max").write_text(f"{quota}\n")
        elif quota is not None:
            (folder / "cpu.cfs_quota_us").write_text(f"{quota[0]}\n")
            (folder / "cpu.cfs_period_us").write_text(f"{quota[1]}\n")
    assert usable_processors(root) == expected


def test_both_versions_side_by_side(tmp_path: Path) -> None:
    mounts = V1.format(top="/", mount="/old") + V2.format(top="/", mount="/new")
    root = system(tmp_path, "4:memory:/a\n0::/b\n", mounts)
    group(tmp_path / "old/a", 1, 400_000, 0)
    group(tmp_path / "new/b", 2, 300_000, 0)
    assert available_memory(root) == 300_000


HOST_MEMORY = "expertcast.data.machine.available_memory"


def saved(kind: str, path: Path) -> str:
    """Write a checkpoint of a kind; return its path."""
    if kind in ("fp8", "mxfp4"):
        return fp8("qwen3_moe", path) if kind == "fp8" else mxfp4(path)
    tiny_model("qwen2_moe").save_pretrained(path) if kind == "plain" else write(path, tiny("qwen3_moe"), "Q8_0")
    return str(path)


def held(path: str, dtype: str) -> int:
    """Bytes of a loaded model."""
    model = load_model(path, dtype=dtype)
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize(("free", "slots"), [(1 << 40, 8), (3.5, 3), (0, 2)])
def test_default_slots_of_a_loaded_model_fit(free: float, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of 32 experts, or those whose number is free; a token needs 2."""
    with offload(tiny_model("qwen3_moe")) as offloaded:
        block = offloaded.store.layout.block_bytes
    monkeypatch.setattr("expertcast.data.machine.available_memory", lambda: int(free * block))
    with offload(tiny_model("qwen3_moe")) as offloaded:
        assert offloaded.pool.count == slots


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
@pytest.mark.parametrize("kind", ["plain", "fp8", "mxfp4"])
def test_bytes_are_those_of_the_loaded_model(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(kind, tmp_path / "model")
    needed = held(path, dtype)
    monkeypatch.setattr(HOST_MEMORY, lambda: needed)
    load_model(path, dtype=dtype)
    monkeypatch.setattr(HOST_MEMORY, lambda: needed - 1)
    with pytest.raises(ExpertcastError, match=f"needs {format_bytes(needed)} of memory, "):
        load_model(path, dtype=dtype)


def test_more_than_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(HOST_MEMORY, lambda: 1000)
    command = ["collect", REFERENCE, "--data", REFERENCE, "--tokens", "400", "--out", str(tmp_path / "traces")]
    assert main(command) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("expertcast: 1 kB of free memory hold 0 experts"), "not even offloaded"
    assert re.search(r"give \d+ bytes or more, such as [\d.]+[kM]?B$", lines[-1])


@pytest.mark.parametrize("command", [["bench"], ["bench", "--experts", "int8"], ["advise"]])
def test_measuring_more_than_memory_names_the_command_that_can(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(HOST_MEMORY, lambda: 1000)
    assert main([*command, REFERENCE]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "bench and advise hold all experts in memory" in line
    assert "`generate`" in line


@pytest.mark.parametrize("kind", ["plain", "fp8", "mxfp4", "gguf"])
def test_a_model_for_another_device_never_lies_in_host_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device `meta` replaces a GPU; the exhausted host memory does not count."""
    path = saved(kind, tmp_path / ("model.gguf" if kind == "gguf" else "model"))
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
    with pytest.raises(ExpertcastError, match=f"needs {format_bytes(needed)} of cuda memory, 1 kB are available"):
        load_model(REFERENCE, device="cuda")
