"""Where an artefact comes from: command, git revision and the versions that made it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import expertcast
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.view import MoEView

PACKAGES = ("torch", "transformers", "lightning", "datasets", "safetensors")


def provenance(command: str | None = None) -> Json:
    """Command line (the running one when None, its absolute paths by their last names), git revision of the code (None
    outside a work tree) and versions, as plain JSON values."""
    running = " ".join([Path(sys.argv[0]).name, *map(_without_folders_in, sys.argv[1:])])
    return {
        "expertcast_version": expertcast.__version__,
        "command": running if command is None else command,
        "git_revision": _git_revision(),
        "python_version": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def without_folders(name: str) -> str:
    """The last name of an absolute path, whose folders are this machine's and may be published; other names as they
    are."""
    return Path(name).name or name if os.path.isabs(name) else name


def _without_folders_in(word: str) -> str:
    """A word of a command line, also of the form option=path."""
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}{without_folders(value)}"


@cache
def _git_revision() -> str | None:
    """HEAD of the work tree this code is in, with `-dirty` after it when there are changes."""
    # the directory of the package's root file: a wheel in site-packages has no work tree of ours around it
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
    """Members `fingerprint` and, where the experts' weights are at hand or known, `experts_fingerprint`."""
    experts = view.experts_fingerprint()
    return {"fingerprint": view.fingerprint()} | ({} if experts is None else {"experts_fingerprint": experts})


def check_fingerprints(recorded: Json, view: MoEView, what: str) -> None:
    """Compare what :func:`fingerprints` gave for the model that a predictor was trained for with those of another.

    Experts are compared where both sides know theirs: a model that is read straight into its offloaded form does not,
    nor does one in fp16 or with packed experts.

    Args:
        recorded: has these members, and `model_id`.
        view: of the other model.
        what: for messages, the checkpoint.

    Raises:
        ExpertcastError: it is another model.
    """
    different = different_part(recorded, view)
    if different:
        raise ExpertcastError(
            f"{what} was trained for {recorded['model_id']!r} and its {different} are not those of {view.model_id!r}: "
            "train a predictor for this model with `expertcast train`"
        )


def different_part(recorded: Json, view: MoEView) -> str:
    """What of a model is not as recorded, for messages; empty where it is the one. Takes and compares what
    :func:`check_fingerprints` does."""
    if recorded["fingerprint"] != view.fingerprint():
        return "routers' or norms' weights"
    experts = recorded.get("experts_fingerprint")
    return "experts' weights" if experts is not None and view.experts_fingerprint() not in (None, experts) else ""
