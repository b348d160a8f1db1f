"""The packages that the day needs, and how they come to a machine without a network.

torch and all that comes with it are the machine's own. What is missing is installed from a folder of wheels into a
folder beside it, which goes first on the path: the machine's own packages stay as they are, also those of an older
version, and a second call finds the folder there. (A virtual environment made from one would not see its packages.)
"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.parser import Parser
from importlib import metadata
from pathlib import Path

try:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet
    from packaging.utils import canonicalize_name
except ImportError:  # a bare machine: pip brings its own
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]
    from pip._vendor.packaging.specifiers import SpecifierSet  # type: ignore[assignment]
    from pip._vendor.packaging.utils import canonicalize_name  # type: ignore[assignment]

from gpu_steps.day import ROOT

OF_THE_MACHINE = "torch"
FOR_MODELS = "transformers>=5.23"
"""The package takes older ones, for what knows no model of theirs; `expertcast.data.release` says so, too."""
FOR_TESTS = ("pytest", "hypothesis", "accelerate")
"""Of the extra `dev`: the tests', and the peer."""
MAY_LACK = ("datasets", "accelerate")
"""Steps do without: tests that need them are skipped, the peer is left out."""
PYTHON = "3.12"
"""Of the machine for which wheels are listed elsewhere."""
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")
"""Tags that PyPI's wheels for x86-64 carry; pip matches each exactly."""


@dataclass(slots=True)
class Packages:
    """What a machine has of what is needed."""

    asked: dict[str, SpecifierSet] = field(default_factory=dict)
    """Name to the versions that will do."""
    found: dict[str, str] = field(default_factory=dict)
    """Name to the version that is installed, if it will do."""

    @property
    def missing(self) -> dict[str, str]:
        """Name to what is asked for, such as `transformers<6,>=5.16`."""
        return {name: f"{name}{versions}" for name, versions in self.asked.items() if name not in self.found}

    @property
    def stops(self) -> list[str]:
        """Names without which nothing runs."""
        return [name for name in self.missing if name not in MAY_LACK]


def needed() -> list[Requirement]:
    """What the project file asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dev = [Requirement(line) for line in project["optional-dependencies"]["dev"]]
    return [
        *map(Requirement, [*project["dependencies"], FOR_MODELS]),
        *(need for need in dev if need.name in FOR_TESTS),
    ]


def look(folder: Path | None = None) -> Packages:
    """What is installed of what is needed, and of what that needs in turn.

    Args:
        folder: of wheels, which say what a package needs that is not installed.
    """
    packages, queue, seen = Packages(), needed(), set[str]()
    while queue:
        need = queue.pop(0)
        name = canonicalize_name(need.name)
        if name == OF_THE_MACHINE:
            continue
        packages.asked[name] = packages.asked.get(name, SpecifierSet()) & need.specifier
        version = _version(name)
        if version is not None and packages.asked[name].contains(version, prereleases=True):
            packages.found[name] = version
            lines = metadata.requires(name) or []
        else:
            packages.found.pop(name, None)
            lines = [] if folder is None else _needs_of_wheel(name, folder)
        key = f"{name} {sorted(need.extras)} {name in packages.found}"
        if key not in seen:
            seen.add(key)
            queue += _wanted(lines, need.extras)
    return packages


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _needs_of_wheel(name: str, folder: Path) -> list[str]:
    """What the wheel of that name asks for; nothing where there is none."""
    for wheel in folder.glob("*.whl"):
        if _name_of(wheel) == name:
            with zipfile.ZipFile(wheel) as archive:
                inner = next(entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA"))
                return Parser().parsestr(archive.read(inner).decode()).get_all("Requires-Dist") or []
    return []


def _name_of(wheel: Path) -> str:
    return str(canonicalize_name(wheel.name.partition("-")[0]))


def _wanted(lines: list[str], extras: set[str]) -> Iterator[Requirement]:
    for line in lines:
        need = Requirement(line)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield need


def install(folder: Path, missing: dict[str, str]) -> Path:
    """Put wheels of the folder into a folder beside them; where that is.

    Args:
        folder: of wheels.
        missing: what to install, as :class:`Packages` has it; what the folder does not hold is left out.
    """
    site = folder / f"site-{sys.version_info.major}.{sys.version_info.minor}"
    there = {_name_of(wheel) for wheel in folder.glob("*.whl")}
    chosen = [line for name, line in missing.items() if name in there]
    if chosen:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps"]
        subprocess.run([*pip, "--upgrade", "--target", site, "--find-links", folder, *chosen], check=False)
    return site


def use(site: Path) -> None:
    """Look into this folder first."""
    if str(site) not in sys.path:
        sys.path.insert(0, str(site))
    importlib.invalidate_caches()


def download(names: dict[str, str], python: str, folder: Path | None = None) -> str:
    """The command that fetches wheels where there is a network.

    Args:
        names: package to version or to what is asked for of it.
        python: version of the machine's Python, such as 3.12.
        folder: where they go.
    """
    pinned = pins()
    wanted = [f"{name}=={pinned[name]}" if name in pinned else line for name, line in sorted(names.items())]
    platforms = " ".join(f"--platform {tag}_x86_64" for tag in PLATFORMS)
    return (
        f"python -m pip download --no-deps --only-binary=:all: --implementation cp --python-version {python} "
        f"{platforms} -d {folder or 'wheels'} {shlex.join(wanted)}"
    )


def pins() -> dict[str, str]:
    """Versions that were tested together."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {canonicalize_name(name): version for name, version in pairs}


def everything(there: Path | None = None) -> dict[str, str]:
    """All that is needed and installed here, as `name==version`: for a machine that has nothing but torch.

    Args:
        there: what that machine has, as `pip freeze` prints it: left out, unless it is of a version that will not do.
    """
    has = dict(re.findall(r"^([\w.-]+)(?:==(\S+))?", there.read_text(), re.MULTILINE)) if there else {}
    has = {canonicalize_name(name): version for name, version in has.items()}
    packages = look()
    return {
        name: f"{name}=={version}"
        for name, version in packages.found.items()
        if name not in has or (has[name] and not packages.asked[name].contains(has[name], prereleases=True))
    }
