"""The folder mapping: nothing may work only because the install is editable; which package a clone beside it leaves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from benchmarks.__main__ import NAMES as BENCHMARKS

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("predictors", "data", "training", "runtime", "checkpoints")


def setuptools_table() -> dict[str, object]:
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return table


def test_every_package_folder_is_listed() -> None:
    """A folder missing from the list works when editable and vanishes from the wheel."""
    found = {"expertcast", "expertcast.commands"}
    for folder in FOLDERS:
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join(("expertcast", *init.parent.relative_to(ROOT).parts)))
    table = setuptools_table()
    assert set(table["packages"]) == found  # type: ignore[call-overload]
    assert {*table["package-dir"]} == found - {"expertcast.commands"}  # type: ignore[misc]


def test_one_version_everywhere() -> None:
    """Releases, citations and the plug-in name the same version, and the changelog begins with it."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name, line in (
        ("src/expertcast/__init__.py", f'__version__ = "{version}"'),
        ("CITATION.cff", f"version: {version}"),
        ("integrations/vllm/pyproject.toml", f'version = "{version}"'),
    ):
        assert line in (ROOT / name).read_text().splitlines()
    first = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert first.split()[1] == version


def test_symlinks_point_at_the_root_folders() -> None:
    for folder in FOLDERS:
        link = ROOT / "src" / "expertcast" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder


def test_gitignore_swallows_no_source() -> None:
    paths = [f"{folder}/x.py" for folder in FOLDERS] + ["checkpoints/reference/model.safetensors", "data/x.json"]
    result = subprocess.run(["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout == ""


def test_every_file_that_is_named_exists() -> None:
    """In pages, docstrings, comments and programs, benchmarks too; a name without its folder may be any file's."""
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    read = [name for name in tracked if name.endswith((".py", ".md", ".toml", "Makefile")) and name != "CHANGELOG.md"]
    named = r"(?<![\w/.:{}*-])((?:[\w-]+/)+(?:\w[\w.-]*\.(?:py|md)|NOTICE[.\w]*)|test_\w+\.py)\b"
    missing = []
    for name in read:
        text = (ROOT / name).read_text()
        ran = re.findall(r"python -m benchmarks ([a-z]\w*)", text)
        missing += [f"{name}: benchmark {each}" for each in ran if each not in BENCHMARKS]
        for found in re.findall(named, text):
            if not found.startswith("folder/") and not any(
                each == found or each.endswith("/" + found) for each in tracked
            ):
                missing.append(f"{name}: {found}")
    assert not missing, "\n".join(missing)


def test_every_test_folder_is_a_package() -> None:
    """Without __init__.py two test files of one name would hide each other."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert (path.parent / "__init__.py").exists(), path


@pytest.mark.slow
def test_wheel_holds_every_module_and_the_reference_model(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in tracked:  # a copy without symlinks, as a clone on a system without them would be
        path = ROOT / name
        if path.is_file() and not path.is_symlink() and not name.startswith(("tests/", "benchmarks/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    wheel = zipfile.ZipFile(next(tmp_path.glob("expertcast-*.whl")))
    packed = set(wheel.namelist())
    for folder in FOLDERS:
        for module in (ROOT / folder).glob("*.py"):
            assert f"expertcast/{folder}/{module.name}" in packed
    assert {
        "expertcast/cli.py",
        "expertcast/commands/bench.py",
        "expertcast/py.typed",
        *(f"expertcast/training/report.{part}" for part in ("html", "css", "js")),
        "expertcast/checkpoints/reference/model.safetensors",
    } <= packed


def test_the_installed_package_is_found_before_a_clone_of_its_name(tmp_path: Path) -> None:
    """As from a wheel: a regular package on any later path wins over a folder without __init__.py."""
    (tmp_path / "expertcast").mkdir()
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and not path.name.endswith(".egg-info"):
            (tmp_path / "expertcast" / path.name).symlink_to(path)
    code = f"""import site, sys
sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in str(each)]
site.addsitedir({str(ROOT / "src")!r})
import expertcast.runtime; print(expertcast.runtime.__name__)"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (found.stderr, found.stdout) == ("", "expertcast.runtime\n")
