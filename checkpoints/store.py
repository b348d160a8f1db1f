"""Saving, verifying and loading predictor checkpoints.

    folder/config.json         predictor name, its config, model id, fingerprint of routers and norms, one of a sample
                               of the experts' weights where they were at hand, L, D, E, K, tap point, calibration,
                               expertcast version, command, git revision, versions; digests of the next three files,
                               and one of itself
    folder/model.safetensors   the predictor's state dict (default vectors included)
    folder/metrics.json        what evaluation found, with the data it came from
    folder/documents.json      hashes of the documents that it learned or was chosen from, where these are known
    folder/README.md           model card

Nothing here is pickled. A folder appears whole or not at all: it is written beside its place and renamed.
"""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import save

from expertcast.checkpoints import files
from expertcast.checkpoints.calibration import calibrate, readings_of
from expertcast.checkpoints.card import model_card
from expertcast.checkpoints.documents import documents_text, read_documents
from expertcast.checkpoints.downloads import blamed, located
from expertcast.checkpoints.fingerprints import check_fingerprints, fingerprints
from expertcast.checkpoints.kind import CHECKPOINT, holds_predictor
from expertcast.checkpoints.provenance import provenance, without_folders
from expertcast.checkpoints.replacing import recover, replace_folder
from expertcast.checkpoints.schema import REMEDY, ConfigFile, read_config, read_metrics
from expertcast.checkpoints.weights import check_tensors, load_into
from expertcast.predictors import ExpertcastError, ModelShape, MoEView, Predictor, predictor_class
from expertcast.predictors.artefacts import SEAL, check_file, digest, seal, warn_unsealed
from expertcast.predictors.fields import from_values
from expertcast.predictors.plain import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorCheckpoint:
    """What a checkpoint says about itself, checked; its weights are not loaded."""

    folder: Path
    config: Json
    """config.json"""
    metrics: Json
    """metrics.json"""

    @classmethod
    def open(cls, folder: str | Path, *, revision: str | None = None) -> PredictorCheckpoint:
        """Read config.json and metrics.json, and compare every file with its digest.

        A checkpoint from before there were digests is opened with a warning.

        Args:
            folder: of the checkpoint; where there is none, `user/repo` or `user/repo@revision` of the hub.
            revision: branch, tag or commit of that.

        Raises:
            ExpertcastError: no folder or repository, a file missing, unreadable, changed, or not by its schema.
        """
        recover(Path(folder))
        found, name = located(folder, CHECKPOINT, revision)
        with blamed(name, found, CHECKPOINT):
            return cls._read(found)

    @classmethod
    def _read(cls, folder: Path) -> PredictorCheckpoint:
        if not folder.is_dir():
            raise ExpertcastError(f"no predictor checkpoint at {folder}: give the folder that `expertcast train` wrote")
        missing = [name for name in (files.CONFIG, files.WEIGHTS, files.METRICS) if not (folder / name).is_file()]
        if missing:
            raise ExpertcastError(f"{folder} is no whole predictor checkpoint, {', '.join(missing)} missing: {REMEDY}")
        config = read_config(folder / files.CONFIG)
        if SEAL not in config:
            warn_unsealed(folder / files.CONFIG)
        for name, expected in config.get("files", {}).items():
            check_file(folder / name, expected, REMEDY)
        return cls(folder=folder, config=config, metrics=read_metrics(folder / files.METRICS, config["shape"]["L"]))

    @property
    def name(self) -> str:
        """Registry name of the predictor."""
        return str(self.config["predictor"])

    @property
    def learned_from(self) -> frozenset[str] | None:
        """Hashes of the documents that the predictor learned or was chosen from; None where they are not known.

        Raises:
            ExpertcastError: their file is not right.
        """
        known = files.DOCUMENTS in self.config.get("files", {})
        return read_documents(self.folder / files.DOCUMENTS, REMEDY) if known else None

    def verify(self, view: MoEView) -> None:
        """Check that the predictor was made for this very model.

        Raises:
            ExpertcastError: the fingerprint of routers and norms differs, or that of the experts, where both are known.
        """
        check_fingerprints(self.config, view, str(self.folder))

    def load(self, view: MoEView | None = None) -> Predictor:
        """The predictor in eval mode, bound to the model when one is given.

        Raises:
            ExpertcastError: unknown predictor, config fields or weights that do not fit it, a damaged file, or as
                :meth:`verify`.
        """
        if view is not None:
            self.verify(view)
        path = self.folder / files.CONFIG
        try:
            cls = predictor_class(self.name)
        except ExpertcastError as error:
            raise ExpertcastError(f"{path}: {error}; or register the predictor before it is loaded") from None
        what = f"{path}: predictor_config of {self.name!r}"
        config = from_values(cls.config_class, self.config["predictor_config"], what, REMEDY)
        shape = ModelShape.from_dict(self.config["shape"])
        predictor = load_into(lambda: cls(config, shape), self.folder / files.WEIGHTS, REMEDY)
        calibrate(predictor, self.config, path, REMEDY)
        predictor.learned_from = self.learned_from
        return predictor if view is None else predictor.bind(view)


def save_predictor(
    predictor: Predictor, folder: str | Path, *, view: MoEView, metrics: Json | None = None, extra: Json | None = None
) -> PredictorCheckpoint:
    """Write a checkpoint (the folder is drawn in the module's docstring); an older checkpoint there is replaced.

    Args:
        predictor: what to save.
        folder: where to; made with its parents.
        view: the model it was trained for; gives model id and fingerprint.
        metrics: evaluation results, plain JSON values; empty when None.
        extra: further plain values: what config.json has members for, such as `command` and how it was trained
            (`training`), stands there, the rest in its member `extra`.

    Raises:
        ExpertcastError: `folder` holds something that is not a checkpoint, or the predictor's tensors hold numbers that
            are not finite; or the metrics are not what a reader takes.
    """
    folder = Path(folder)
    _refuse_foreign(folder)
    config = describe(predictor, view)
    for name, value in (extra or {}).items():
        (config if name in ConfigFile.__annotations__ else config.setdefault("extra", {}))[name] = value
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        written = write_files(temporary, predictor, config, metrics or {}, where=str(folder))
        replace_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return replace(written, folder=folder)


def load_predictor(folder: str | Path, view: MoEView | None = None, *, revision: str | None = None) -> Predictor:
    """The predictor of a checkpoint, bound to the model when one is given.

    Args:
        folder, revision: as for :meth:`PredictorCheckpoint.open`.
        view: the model's MoE layers.

    Raises:
        ExpertcastError: a file missing, damaged or of a newer format, or a model whose routers, norms or experts are
            not those it was trained for.
    """
    return PredictorCheckpoint.open(folder, revision=revision).load(view)


def describe(predictor: Predictor, view: MoEView) -> Json:
    """The contents of config.json for a predictor that was trained for the model of `view`."""
    return {
        "format": files.FORMAT,
        "predictor": predictor.name,
        "predictor_config": predictor.config.as_dict(),
        "model_id": without_folders(view.model_id),
        **fingerprints(view),
        "shape": predictor.shape.as_dict(),
        "tap_point": _reads(predictor),
        **readings_of(predictor),
        **provenance(),
    }


def _reads(predictor: Predictor) -> str:
    parts = [files.TAP_POINT]
    if predictor.uses_previous_token:
        parts.append("router logits of the token before")
    if predictor.uses_early:
        parts.append("early attention")
    return "; ".join(parts)


def write_files(folder: Path, predictor: Predictor, config: Json, metrics: Json, *, where: str) -> PredictorCheckpoint:
    """Write a checkpoint's files into `folder`: the predictor's weights, `config` and `metrics` as JSON, the documents
    where they are known, and the card made of these, which names the checkpoint by `where`. Numbers in JSON that are
    not finite become null.

    Raises:
        ExpertcastError: the predictor's tensors hold numbers that are not finite, or `config` or `metrics` are not by
            their schema.
    """
    # clones: safetensors refuses tensors that share memory
    tensors = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in predictor.state_dict().items()}
    check_tensors(tensors, f"predictor {predictor.name}", "train it again, with a lower learning rate if it has one")
    # safetensors' own file would be its owner's alone, whatever the umask is
    data = {files.WEIGHTS: save(tensors, metadata={"format": "pt"}), files.METRICS: _text(_plain(metrics))}
    documents = documents_text(predictor)
    data |= {} if documents is None else {files.DOCUMENTS: documents}
    digests = {name: digest(content) for name, content in data.items()}
    data[files.CONFIG] = _text(seal(_plain(config) | {"files": digests}))
    for name, content in data.items():
        (folder / name).write_bytes(content)
    written = PredictorCheckpoint.open(folder)
    (folder / files.CARD).write_text(model_card(written.config, written.metrics, where))
    return written


def _plain(values: Json) -> Json:
    """Values as they are read back: with texts as names, and without numbers that JSON does not have."""
    plain: Json = json.loads(json.dumps(values), parse_constant=lambda _: None)
    return plain


def _text(values: Json) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _refuse_foreign(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ExpertcastError(f"{folder} is a file: give a folder for the predictor checkpoint")
    if not folder.is_dir() or not any(folder.iterdir()) or holds_predictor(folder):
        return
    if (folder / files.CONFIG).is_file():
        raise ExpertcastError(f"{folder} holds another kind of model: give another output folder")
    raise ExpertcastError(f"{folder} is not empty and no predictor checkpoint: give another output folder")
