"""The core imports without transformers; code for its models names the release that it needs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers import PreTrainedModel

import expertcast
from expertcast.cli import main
from expertcast.data import source as release
from expertcast.data.collect import collect
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.source import OLDEST, check_release
from expertcast.data.text import load_documents
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import install_command
from tests.families.models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
CORE = (
    "checkpoints", "data.batch", "data.plan", "data.machine", "data.trace_format", "data.trace_writer", "data.traces",
    "predictors", "runtime.config", "runtime.engine.cache", "runtime.engine.engine",
    "runtime.engine.speculation", "runtime.links", "runtime.policies", "runtime.pools", "runtime.recording",
    "runtime.storage.codecs", "runtime.storage.disk_store",
    "runtime.storage.layout", "runtime.storage.memory", "runtime.storage.slots", "runtime.storage.store",
)  # fmt: skip
"""Modules, and packages with all their modules, that other engines' fronts use."""
SEAM = ("accelerate", "datasets", "lightning", "matplotlib", "tensorboard", "torchmetrics", "transformers")
"""Libraries that the core does not import: a front may bring another release of them, or none."""
IMPORT = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(sys.argv[2].split()))  # None: importing it raises ModuleNotFoundError
names = [f"expertcast.{name}" for name in sys.argv[1].split()]
for name in list(names):
    places = getattr(importlib.import_module(name), "__path__", [])
    names += [each.name for each in pkgutil.walk_packages(places, f"{name}.")]
for name in names:
    importlib.import_module(name)
print(len(names), "modules")
import expertcast.runtime.engine.front
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)


def test_imports_are_not_garbage_collected() -> None:
    """The oldest objects are not searched for garbage while a public name is imported, and are afterwards."""
    code = (
        "import gc, expertcast; before = gc.get_stats()[2]['collections']; expertcast.load_offloaded; "
        "print(gc.get_stats()[2]['collections'] - before, gc.isenabled())"
    )
    done = run("-c", code)
    assert done.stdout.split() == ["0", "True"], done.stderr


def test_threads_of_torch_spin_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """GNU OpenMP reads its spin count when torch is imported; a user's own settings stay."""
    shown = "import expertcast, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    for name, value, expected in (
        ("GOMP_SPINCOUNT", "7", "7"),
        ("OMP_WAIT_POLICY", "active", "None"),
        (None, "", "1000"),
    ):
        monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if name:
            monkeypatch.setenv(name, value)
        assert run("-c", shown).stdout.split() == [expected]
    late = """
import os, torch
torch.set_num_threads(2)
before = len(os.listdir("/proc/self/task"))
import expertcast
print(len(os.listdir("/proc/self/task")) - before)
"""
    assert run("-c", late).stdout.split() == ["2"]  # more threads than processors


def test_the_core_imports_without_transformers() -> None:
    """The block works: it stops the front of transformers' models, which is not part of the core."""
    found = run("-c", IMPORT, " ".join(CORE), " ".join(SEAM))
    assert int(found.stdout.split()[0]) > 50, found.stderr
    assert "ModuleNotFoundError: import of transformers halted" in found.stderr


def test_torch_and_the_runtime_are_imported_when_they_are_used() -> None:
    """Not by the package itself, nor with the commands' modules."""
    code = (
        "import importlib, sys, expertcast, expertcast.runtime\n"
        "assert not {'torch', 'transformers'} & set(sys.modules); import expertcast.runtime.links.base\n"
        "assert 'torch' in sys.modules and 'transformers' not in sys.modules\n"
        "runtime = {name for name in sys.modules if name.startswith('expertcast.runtime')}\n"
        "from expertcast.cli import COMMANDS\n"
        "for name in COMMANDS: importlib.import_module(f'expertcast.commands.{name}')\n"
        "assert runtime == {name for name in sys.modules if name.startswith('expertcast.runtime')}"
    )
    assert run("-c", code).stderr == ""


def test_an_extra_is_installed_without_a_checkout() -> None:
    """By the names of its packages: expertcast is not on the package index."""
    assert install_command("gguf") == "pip install 'gguf>=0.17'"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("train", "report", "eval", "ggml", "gguf", "serve"):
        found = shlex.split(install_command(name))
        assert found[:2] == ["pip", "install"]
        assert set(map(Requirement, found[2:])) == set(map(Requirement, extras[name]))


@pytest.mark.parametrize(("package", "extra", "command"), [
    ("lightning", "train", "train traces --predictor linear --out checkpoint"),
    ("matplotlib", "report", "eval traces --predictor linear"),
])  # fmt: skip
def test_a_missing_extra_is_one_line(package: str, extra: str, command: str) -> None:
    """From the command line and from Python."""
    line = f"{package} is not installed: {install_command(extra)}"
    code = f"import sys; sys.modules[{package!r}] = None\nfrom expertcast.cli import main\n"
    code += f"print(main({command.split()}))\n"
    done = run("-c", code + ("import expertcast; expertcast.fit" if package == "lightning" else ""))
    first, *others = done.stderr.splitlines()
    assert (first, done.stdout) == (f"expertcast: {line}", "2\n")
    assert others[-1].endswith(line) if package == "lightning" else not others


def required(requirements: list[str], found: dict[str, Distribution]) -> dict[str, Distribution]:
    """Packages of some requirements, without their extras, and all that those need."""
    for each in map(Requirement, requirements):
        here = each.marker is None or each.marker.evaluate({"extra": ""})
        if here and canonicalize_name(each.name) not in found:
            package = found[canonicalize_name(each.name)] = distribution(each.name)
            required(package.requires or [], found)
    return found


@pytest.mark.slow
def test_generating_needs_no_extra(tmp_path: Path) -> None:
    """A folder with the required packages alone stands for the environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package in required(project["dependencies"], {}).values():
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(package.locate_file(top))
    words = ["generate", "reference", "--prompt", "It", "--slots", "192", "--new-tokens", "2"]
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"from expertcast.cli import main; print(main({words}))"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.endswith("\n0\n"), done.stderr


@pytest.fixture
def old_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release.transformers, "__version__", "5.19.0")


LINE = " a transformers model needs transformers 5.23 or newer, found 5.19.0: pip install -U transformers"


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("qwen3_moe")


@pytest.mark.usefixtures("old_release")
def test_an_old_release_is_refused_in_one_line(
    model: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is read or made."""
    before = dict(model.named_parameters())
    with pytest.raises(ExpertcastError, match=f"^offloading{LINE}$"):
        expertcast.offload(model)
    assert dict(model.named_parameters()) == before
    with pytest.raises(ExpertcastError, match=f"^offloading{LINE}$"):
        expertcast.load_offloaded("no/such-model")
    with pytest.raises(ExpertcastError, match=f"^loading{LINE}$"):
        load_model("reference")
    documents = list(load_documents("reference"))[:2]
    with pytest.raises(ExpertcastError, match=f"^reading the MoE layers of{LINE}$"):
        collect(model, load_tokenizer("reference"), documents, tmp_path / "traces", tokens=64)
    assert not (tmp_path / "traces").exists()
    assert main(["inspect", "reference"]) == 2
    assert capsys.readouterr().err.strip().endswith(LINE.strip())


def test_what_is_installed_loads_models() -> None:
    """The package asks for the release that loading does. The plug-in for vLLM, which holds another one, needs only
    what the core imports."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = (each for each in project["dependencies"] if each.startswith("transformers"))
    assert needed == f"transformers>={'.'.join(map(str, OLDEST))},<6"
    (pin,) = re.findall(r"^transformers==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin in Requirement(needed).specifier
    plug_in = tomllib.loads((ROOT / "integrations" / "vllm" / "pyproject.toml").read_text())["project"]
    assert not {Requirement(each).name for each in plug_in["dependencies"]} & {"expertcast", *SEAM}


@pytest.mark.parametrize("version", ["5.23.0", "5.23.0.dev0", "5.24.1", "6.0.0"])
def test_newer_releases_pass(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release.transformers, "__version__", version)
    check_release("offloading")
