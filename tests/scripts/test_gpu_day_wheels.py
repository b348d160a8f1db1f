"""What the GPU script does about packages that a machine has not: said in one line, or installed from wheels."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from expertcast.data.release import OLDEST

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("gpu_steps.wheels")


def test_missing_packages_are_refused_in_one_line(tmp_path: Path) -> None:
    old = tmp_path / "packages" / "transformers-5.17.0.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.17.0\n")
    command = [sys.executable, "scripts/gpu_day.py", "--small", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(old.parent), str(ROOT / "src")])}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert "missing: transformers<6,>=5.16,>=5.23" in line
    assert "pip download --no-deps" in line
    assert line.endswith(" transformers==5.23.0")
    assert f"--python-version {sys.version_info.major}.{sys.version_info.minor} " in line
    assert "--platform manylinux_2_28_x86_64" in line
    assert not (tmp_path / "out").exists()


def test_the_day_needs_what_models_need(wheels: ModuleType) -> None:
    assert f"transformers>={'.'.join(map(str, OLDEST))}" == wheels.FOR_MODELS


def test_the_whole_list_says_versions_and_leaves_out_torch(tmp_path: Path) -> None:
    there = tmp_path / "there.txt"
    there.write_text("transformers==5.17.0\nlightning\nxxhash==4.0.0\nPyYAML==6.0.3\n")
    command = [sys.executable, "scripts/gpu_day.py", "--list-wheels"]
    whole, rest = (
        subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        for more in ([], ["--there", str(there)])
    )
    for name in ("transformers", "datasets", "dill", "multiprocess", "xxhash", "lightning", "pyyaml"):
        assert f"{name}=={metadata.version(name)}" in whole
    assert not any(word.startswith("torch==") for word in whole)
    assert f"transformers=={metadata.version('transformers')}" in rest, "of a version that will not do"
    assert not {"xxhash", "lightning", "pyyaml"} & {word.partition("==")[0] for word in rest}


def wheel(folder: Path, name: str, version: str, *needs: str) -> Path:
    """A wheel with one module."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needs)]
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_wheels_are_asked_for_their_needs_and_installed(
    wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path, "madeup", "2.1", "madeup-helper>=1; python_version >= '3'", "other; extra == 'all'", "torch")
    monkeypatch.setattr(wheels, "needed", lambda: [wheels.Requirement("madeup>=2,<3")])
    assert wheels.look().missing == {"madeup": "madeup<3,>=2"}
    packages = wheels.look(tmp_path)
    assert packages.missing == {"madeup": "madeup<3,>=2", "madeup-helper": "madeup-helper>=1"}
    assert packages.stops == ["madeup", "madeup-helper"]
    wheel(tmp_path, "madeup_helper", "1.5")
    site = wheels.install(tmp_path, wheels.look(tmp_path).missing)
    monkeypatch.setattr(sys, "path", list(sys.path))
    wheels.use(site)
    assert wheels.look(tmp_path).found == {"madeup": "2.1", "madeup-helper": "1.5"}
    assert importlib.import_module("madeup").version == "2.1"


def test_without_datasets_it_goes_on(wheels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "needed", lambda: [wheels.Requirement("datasets>=999")])
    packages = wheels.look()
    assert packages.missing == {"datasets": "datasets>=999"}
    assert packages.stops == []
