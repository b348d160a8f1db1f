"""Saving, verifying and loading predictor checkpoints.

    folder/config.json         predictor name, its config, model id, fingerprint of the routers, L, D, E, K,
                               tap point, expertcast version, command, git revision, versions
    folder/model.safetensors   the predictor's state dict (default vectors included)
    folder/metrics.json        what evaluation found, with the data it came from
    folder/README.md           model card

Nothing here is pickled. A folder appears whole or not at all: it is written beside its place and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from expertcast.checkpoints import files
from expertcast.checkpoints.card import model_card
from expertcast.checkpoints.provenance import provenance
from expertcast.predictors import ExpertcastError, ModelShape, MoEView, Predictor, predictor_class
from expertcast.predictors.plain import Json

REMEDY = "train it again with `expertcast train`"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorCheckpoint:
    """What a checkpoint says about itself; its weights are not read."""

    folder: Path
    config: Json
    """config.json"""
    metrics: Json
    """metrics.json"""

    @classmethod
    def open(cls, folder: str | Path) -> PredictorCheckpoint:
        """Read config.json and metrics.json, and check that every file is there.

        Raises:
            ExpertcastError: no folder, a file missing or unreadable, or a newer format.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ExpertcastError(f"no predictor checkpoint at {folder}: give the folder that `expertcast train` wrote")
        missing = [name for name in (files.CONFIG, files.WEIGHTS, files.METRICS) if not (folder / name).is_file()]
        if missing:
            raise ExpertcastError(f"{folder} is no whole predictor checkpoint, {', '.join(missing)} missing: {REMEDY}")
        config = _read_json(folder / files.CONFIG)
        wanted = ("predictor", "predictor_config", "format", "fingerprint", "shape", "model_id")
        absent = [key for key in wanted if key not in config]
        if absent:
            raise ExpertcastError(f"{folder / files.CONFIG} lacks {', '.join(absent)}: {REMEDY}")
        if config["format"] > files.FORMAT:
            raise ExpertcastError(
                f"{folder} has checkpoint format {config['format']}, this expertcast reads up to {files.FORMAT}: "
                "upgrade expertcast"
            )
        return cls(folder=folder, config=config, metrics=_read_json(folder / files.METRICS))

    @property
    def name(self) -> str:
        """Registry name of the predictor."""
        return str(self.config["predictor"])

    def verify(self, view: MoEView) -> None:
        """Check that the predictor was made for this very model.

        Raises:
            ExpertcastError: the fingerprint of the routers' weights differs.
        """
        if view.fingerprint() != self.config["fingerprint"]:
            raise ExpertcastError(
                f"{self.folder} was trained for {self.config['model_id']!r} and its routers' weights are not those of "
                f"{view.model_id!r}: train a predictor for this model with `expertcast train`"
            )

    def load(self) -> Predictor:
        """The predictor in eval mode, bound to no model yet.

        Raises:
            ExpertcastError: unknown predictor, config fields or weights that do not fit it, or a damaged file.
        """
        cls = predictor_class(self.name)
        path = self.folder / files.WEIGHTS
        try:
            config = cls.config_class(**self.config["predictor_config"])
        except TypeError as error:
            raise ExpertcastError(f"config of predictor {self.name!r} does not fit this expertcast: {error}") from error
        predictor = cls(config, ModelShape.from_dict(self.config["shape"]))
        try:
            predictor.load_state_dict(load_file(path))
        except SafetensorError as error:
            raise ExpertcastError(f"{path} is damaged or cut short ({str(error).splitlines()[0]}): {REMEDY}") from error
        except RuntimeError as error:
            raise ExpertcastError(
                f"{path} does not hold the tensors of predictor {self.name} as its config describes it: {REMEDY}"
            ) from error
        return predictor.eval()


def save_predictor(
    predictor: Predictor, folder: str | Path, *, view: MoEView, metrics: Json | None = None, extra: Json | None = None
) -> PredictorCheckpoint:
    """Write a checkpoint (the folder is drawn in the module's docstring); an older checkpoint there is replaced.

    Args:
        predictor: what to save.
        folder: where to; made with its parents.
        view: the model it was trained for; gives model id and fingerprint.
        metrics: evaluation results, plain JSON values; empty when None.
        extra: further plain values for config.json, such as how it was trained.

    Raises:
        ExpertcastError: `folder` holds something that is not a checkpoint.
    """
    folder = Path(folder)
    _refuse_foreign(folder)
    config = describe(predictor, view) | (extra or {})
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        write_files(temporary, predictor, config, metrics or {})
        _replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return PredictorCheckpoint.open(folder)


def load_predictor(folder: str | Path, view: MoEView | None = None) -> Predictor:
    """The predictor of a checkpoint, bound to the model when one is given.

    Raises:
        ExpertcastError: a file missing, damaged or of a newer format, or a model whose routers' weights are not those
            it was trained for.
    """
    checkpoint = PredictorCheckpoint.open(folder)
    if view is None:
        return checkpoint.load()
    checkpoint.verify(view)
    return checkpoint.load().bind(view)


def describe(predictor: Predictor, view: MoEView) -> Json:
    """The contents of config.json for a predictor that was trained for the model of `view`."""
    return {
        "format": files.FORMAT,
        "predictor": predictor.name,
        "predictor_config": predictor.config.as_dict(),
        "model_id": view.model_id,
        "fingerprint": view.fingerprint(),
        "shape": predictor.shape.as_dict(),
        "tap_point": files.TAP_POINT,
        **provenance(),
    }


def write_files(folder: Path, predictor: Predictor, config: Json, metrics: Json) -> None:
    """Write a checkpoint's four files into `folder`: the predictor's weights, `config` and `metrics` as JSON, and the
    card made of these."""
    # clones: safetensors refuses tensors that share memory
    tensors = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in predictor.state_dict().items()}
    # safetensors' own file would be its owner's alone, whatever the umask is
    (folder / files.WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
    (folder / files.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    (folder / files.METRICS).write_text(json.dumps(metrics, indent=2) + "\n")
    (folder / files.CARD).write_text(model_card(config, metrics))


def _refuse_foreign(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()) and not (folder / files.CONFIG).is_file():
        raise ExpertcastError(f"{folder} is not empty and no predictor checkpoint: give another output folder")
    if folder.exists() and not folder.is_dir():
        raise ExpertcastError(f"{folder} is a file: give a folder for the predictor checkpoint")
    if (folder / files.CONFIG).is_file() and "predictor_config" not in _read_json(folder / files.CONFIG):
        raise ExpertcastError(f"{folder} holds another kind of model: give another output folder")


def _replace(new: Path, folder: Path) -> None:
    """Put `new` in the place of `folder`: each step is one rename, so a reader sees the old or the new whole."""
    old = new.with_name(new.name + ".old")
    if folder.exists():
        os.rename(folder, old)
    os.rename(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def _read_json(path: Path) -> Json:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ExpertcastError(f"{path} is damaged or cut short: {REMEDY}") from error
    if not isinstance(values, dict):
        raise ExpertcastError(f"{path} is no JSON object: {REMEDY}")
    return values
