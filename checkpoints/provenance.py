"""Provenance of a file: command, git revision and package versions; and fingerprints of models."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import expertcast
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.view import MoEView

PACKAGES = ("torch", "transformers", "lightning", "datasets", "safetensors")


def provenance() -> Json:
    """Return this process's command line (paths without folders), the git revision of the code and the versions.

    The git revision is None outside a work tree.
    """
    command = " ".join([Path(sys.argv[0]).name, *(shlex.quote(_without_folders_in(each)) for each in sys.argv[1:])])
    return {
        "expertcast_version": expertcast.__version__,
        "command": command,
        "git_revision": _git_revision(),
        "python_version": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def without_folders(name: str) -> str:
    """Return the last part of an absolute path, because folder names may be private; other names unchanged."""
    return Path(name).name or name if os.path.isabs(name) else name


def _without_folders_in(word: str) -> str:
    # the word may have the form option=path
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}{without_folders(value)}"


@cache
def _git_revision() -> str | None:
    """Return HEAD of the code's work tree, with the suffix `-dirty` if files have changed."""
    # start at the package's root file: a wheel in site-packages is not in a work tree of expertcast
    root = Path(str(expertcast.__file__)).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        return None
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10)
        if head.returncode:
            return None
        state = ["git", "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(state, cwd=root, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("-dirty" if changed else "")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def fingerprints(view: MoEView) -> dict[str, str]:
    """Return `fingerprint` and, if the experts are available, `experts_fingerprint`."""
    experts = view.experts_fingerprint()
    return {"fingerprint": view.fingerprint()} | ({} if experts is None else {"experts_fingerprint": experts})


def check_fingerprints(recorded: Json, view: MoEView, what: str) -> None:
    """Raise an error if a predictor was trained for another model.

    Experts are compared only if both fingerprints exist. A model loaded directly into its offloaded form, in fp16, or
    with packed experts has none.

    Args:
        recorded: result of :func:`fingerprints` with `model_id`, as recorded in a file.
        view: the model to compare.
        what: name of the checkpoint in the error message.

    Raises:
        ExpertcastError: the fingerprints differ.
    """
    different = different_part(recorded, view)
    if different:
        raise trained_for_another(recorded, view.model_id, what, f"different {different}")


def trained_for_another(recorded: Json, model_id: str, what: str, instead: str) -> ExpertcastError:
    """Return the error for a model that has something `instead` of what the recorded one has."""
    return ExpertcastError(
        f"{what} was trained for {recorded['model_id']!r}; {model_id!r} has {instead}: train a "
        "predictor for this model with `expertcast train`"
    )


def different_part(recorded: Json, view: MoEView) -> str:
    """Return which weights differ from the recorded model, or an empty string; see :func:`check_fingerprints`."""
    if recorded["fingerprint"] != view.fingerprint():
        return "router or norm weights"
    experts = recorded.get("experts_fingerprint")
    return "expert weights" if experts is not None and view.experts_fingerprint() not in (None, experts) else ""
