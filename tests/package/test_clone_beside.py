"""Python started in the folder that holds a clone named `expertcast`: which package `import expertcast` finds."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = "import expertcast; print(expertcast.offload.__module__)"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of that name, alone in its folder."""
    folder = tmp_path_factory.mktemp("beside") / "expertcast"
    folder.mkdir()
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and not path.name.endswith(".egg-info"):
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def editable(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install -e` puts into an environment."""
    out = tmp_path_factory.mktemp("editable")
    build = f"from setuptools import build_meta; build_meta.build_editable({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True, timeout=120)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        wheel.extractall(out)
    return out


def imported(where: Path, installed: Path, code: str = CODE) -> subprocess.CompletedProcess[str]:
    """Run in `where` with what lies in `installed`, and whatever else the environment holds but expertcast."""
    hide = "import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in str(each)]"
    add = f"import site; site.addsitedir({str(installed)!r})"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-c", "\n".join((hide, add, code))], cwd=where, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_installed_package_is_found_before_the_clone(clone: Path) -> None:
    """As from a wheel: a regular package on any later path wins over a folder without __init__.py."""
    found = imported(clone.parent, ROOT / "src")
    assert (found.stderr, found.stdout) == ("", "expertcast.runtime.offloading\n")


def test_an_editable_install_is_found_from_anywhere_else(clone: Path, editable: Path, tmp_path: Path) -> None:
    for where in (tmp_path, clone):
        found = imported(where, editable)
        assert (found.stderr, found.stdout) == ("", "expertcast.runtime.offloading\n")


def test_the_readme_says_what_an_editable_install_finds_beside_the_clone(clone: Path, editable: Path) -> None:
    """Its finder comes behind the one that takes the folder. Once this passes no more, the README's sentence can go."""
    said = imported(clone.parent, editable).stderr.splitlines()[-1]
    assert said == "AttributeError: module 'expertcast' has no attribute 'offload'"
    assert said.partition(": ")[2] in " ".join((ROOT / "README.md").read_text().split())
