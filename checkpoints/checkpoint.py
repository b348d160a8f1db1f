"""Saving, verifying and loading predictor checkpoints.

    folder/config.json         predictor name, its config, model id, fingerprint of routers and norms, one of a sample
                               of the experts' weights where they were at hand, L, D, E, K, tap point, calibration,
                               expertcast version, command, git revision, versions; digests of the next three files,
                               and one of itself
    folder/model.safetensors   the predictor's state dict (default vectors included)
    folder/metrics.json        what evaluation found, with the data it came from
    folder/documents.json      hashes of the documents that it learned or was chosen from
    folder/README.md           model card

Nothing here is pickled. A folder appears whole or not at all: it is written beside its place and renamed.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NotRequired

import torch
from huggingface_hub import ModelCard
from pydantic import ConfigDict, Field, JsonValue
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from typing_extensions import TypedDict

from expertcast.checkpoints.card import model_card
from expertcast.checkpoints.hub import HubName, Kind, blamed, located, push
from expertcast.checkpoints.provenance import check_fingerprints, fingerprints, provenance, without_folders
from expertcast.predictors import ModelShape, MoEView, predictor_class
from expertcast.predictors.artefacts import CLOSED, check_file, digest, open_file, read_json, seal
from expertcast.predictors.base import PREDICTORS, LogOdds, Predictor, PredictorConfig
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.options import from_values

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
METRICS = "metrics.json"
DOCUMENTS = "documents.json"
CARD = "README.md"

ALL = (CONFIG, WEIGHTS, METRICS, DOCUMENTS, CARD)

FORMAT = 1
"""Raised when a reader of the old form could misread the new one."""

TAP_POINT = "input of the norm before the router (residual stream after attention)"
"""Where residual_TD is taken; config.json has it, and what is read besides, so that a checkpoint says what it reads."""


# Schemas of config.json, metrics.json and documents.json, and their readers.

REMEDY = "train it again with `expertcast train`"
_CONFIG_REMEDY = REMEDY + ", or upgrade expertcast if a newer one wrote it"

_Free = dict[str, JsonValue]
_Share = Annotated[float, Field(ge=0, le=1)]
_Readings = Annotated[list[Annotated[list[float], Field(min_length=3, max_length=3)]], Field(max_length=10_000)]
_Digest = Annotated[str, Field(pattern="^xxh3:[0-9a-f]{32}$")]


class _Shape(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    L: Annotated[int, Field(ge=1, le=10_000)]
    E: Annotated[int, Field(ge=1, le=65_536)]
    K: Annotated[int, Field(ge=1, le=65_536)]
    D: Annotated[int, Field(ge=1, le=1_000_000)]


_Files = TypedDict("_Files", {WEIGHTS: _Digest, METRICS: _Digest, DOCUMENTS: _Digest})  # type: ignore[misc]
_Files.__pydantic_config__ = CLOSED  # type: ignore[attr-defined]


class ConfigFile(TypedDict):
    """config.json; `experts_fingerprint` is missing where the experts were not at hand."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    format: Annotated[int, Field(ge=1, le=FORMAT)]
    predictor: str
    predictor_config: _Free
    model_id: str
    fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    experts_fingerprint: NotRequired[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]
    shape: _Shape
    tap_point: str
    expertcast_version: str
    command: str
    git_revision: str | None
    python_version: str
    versions: dict[str, str | None]
    calibration: dict[str, _Readings]
    """By distance, slope, root and offset of each layer pair (:class:`LogOdds`)."""
    member_calibration: dict[str, dict[str, _Readings]]
    """The same of each predictor that it is made of, by name."""
    training: NotRequired[_Free]
    files: _Files
    digest: str


class _Recall(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    mean: _Share
    per_layer: Annotated[list[_Share], Field(max_length=10_000)]


class _Scores(TypedDict):
    """An evaluation: what is computed from, and whatever else there is to read."""

    __pydantic_config__ = ConfigDict(CLOSED, extra="allow")  # type: ignore[misc]
    recall_at_k: NotRequired[dict[str, _Recall]]
    baselines: NotRequired[dict[str, _Recall]]
    """Recall@k of what needs no training, on the same tokens."""
    targets: NotRequired[list[Annotated[int, Field(ge=0, lt=10_000)]]]
    ahead: NotRequired[Annotated[int, Field(ge=1, le=10_000)]]


class _Evaluation(_Scores):
    further: NotRequired[Annotated[dict[Annotated[str, Field(pattern="^[0-9]{1,5}$")], _Scores], Field(max_length=64)]]
    """The same at longer distances, by distance."""


class MetricsFile(_Evaluation):
    """metrics.json: one evaluation, or that of the test split with that of the validation split in it."""

    validation: NotRequired[_Evaluation]


def read_config(path: Path) -> Json:
    """config.json by its schema.

    Raises:
        ExpertcastError: it cannot be read, is not by its schema, or was changed after it was written.
    """
    config = read_json(path, ConfigFile, _CONFIG_REMEDY)
    if config["shape"]["K"] > config["shape"]["E"]:
        raise ExpertcastError(f"{path}: shape has K={config['shape']['K']} of E={config['shape']['E']}; {REMEDY}")
    return dict(config)


def read_metrics(path: Path, layers: int) -> Json:
    """metrics.json of a model with so many MoE layers, by its schema.

    Raises:
        ExpertcastError: it cannot be read or is not by its schema.
    """
    metrics: Json = dict(read_json(path, MetricsFile, REMEDY))
    for evaluation in (metrics, metrics.get("validation", {})):
        for scores in (evaluation, *evaluation.get("further", {}).values()):
            _check_targets(path, scores, layers)
    return metrics


def _check_targets(path: Path, scores: Json, layers: int) -> None:
    """Each recall must belong to a layer.

    Raises:
        ExpertcastError: more or fewer of them than targets, or targets that are no rising layers of the model.
    """
    recall = {**scores.get("recall_at_k", {}), **scores.get("baselines", {})}
    longest = max((len(values["per_layer"]) for values in recall.values()), default=0)
    targets: list[int] = list(scores.get("targets", range(1, longest + 1)))
    if targets != sorted(set(targets)) or (targets and targets[-1] >= layers):
        raise ExpertcastError(f"{path}: targets are no rising layers of 0..{layers - 1}; {REMEDY}")
    for name, values in recall.items():
        if len(values["per_layer"]) != len(targets):
            raise ExpertcastError(
                f"{path}: recall_at_k.{name!r} has {len(values['per_layer'])} layers of {len(targets)}; {REMEDY}"
            )


def holds_predictor(folder: str | Path) -> bool:
    """Whether a folder is a predictor's checkpoint, be it a damaged one: not a model's, which has a config.json too."""
    config = Path(folder) / CONFIG
    if not config.is_file():
        return all((Path(folder) / name).is_file() for name in (METRICS, WEIGHTS))
    try:
        values = read_json(config, dict[str, JsonValue], REMEDY)
    except ExpertcastError:
        return (Path(folder) / METRICS).is_file()
    return "predictor" in values or "predictor_config" in values


def is_name(given: str | Path) -> bool:
    """Whether a word is a registered predictor's name; a path never is.

    Raises:
        ExpertcastError: a checkpoint lies here in a folder of that name.
    """
    if given not in PREDICTORS.names():
        return False
    if any((Path(given) / name).is_file() for name in (CONFIG, METRICS)):
        raise ExpertcastError(
            f"{given!r} is a predictor's name and a checkpoint's folder here: give ./{given} for the checkpoint, or "
            "rename the folder for the predictor"
        )
    return True


CHECKPOINT = Kind(
    what="predictor checkpoint", repo_type="model", files=ALL, marks=(CONFIG, METRICS),
    holds=holds_predictor, remedy=REMEDY,
)  # fmt: skip


_Hash = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


class DocumentsFile(TypedDict):
    """documents.json"""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    learned_from: list[_Hash]
    """In no order that says anything."""


# Tensors: compared with those of the predictor before memory is taken for either.

_Outline = dict[str, tuple[list[int], bool]]
"""By tensor: its shape, and whether it holds floating-point numbers."""


def load_into(make: Callable[[], Predictor], path: Path, remedy: str) -> Predictor:
    """The predictor that `make` makes, with the tensors of a safetensors file, in eval mode.

    It is made on the meta device first, which takes no memory: so a file's few bytes are enough to refuse a
    configuration that asks for more of them.

    Args:
        make: makes the predictor, the same one each time.
        path: of the file.
        remedy: for messages.

    Raises:
        ExpertcastError: the file is damaged, holds other tensors than the predictor has, or numbers that are not
            finite; or as `make`.
    """
    wanted = _outline(make)
    try:
        found = _outline_of(path)
        if found != wanted:
            name = next(name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name))
            raise ExpertcastError(
                f"{path} does not hold the tensors of the predictor as its config describes it ({name} is "
                f"{_told(found.get(name))}, not {_told(wanted.get(name))}); {remedy}"
            )
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ExpertcastError(f"{path} is damaged or cut short ({str(error).splitlines()[0]}); {remedy}") from error
    check_tensors(tensors, str(path), remedy)
    predictor = make()
    predictor.load_state_dict(tensors)
    return predictor.eval()


def check_tensors(tensors: Mapping[str, Tensor], what: str, remedy: str) -> None:
    """Refuse numbers that no computation can go on from.

    Args:
        tensors: by name.
        what: they belong to, for the message.
        remedy: for the message.

    Raises:
        ExpertcastError: NaN or an infinity in one of them.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ExpertcastError(f"{what}: {name} holds numbers that are not finite; {remedy}")


def _outline(make: Callable[[], Predictor]) -> _Outline:
    try:
        with torch.device("meta"):
            predictor = make()
    except (RuntimeError, OverflowError) as error:
        raise ExpertcastError(
            f"a predictor of that config and shape cannot be: {str(error).splitlines()[0]}"
        ) from error
    return {name: (list(tensor.shape), tensor.is_floating_point()) for name, tensor in predictor.state_dict().items()}


def _outline_of(path: Path) -> _Outline:
    open_file(path).close()
    with safe_open(path, framework="pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return {name: (part.get_shape(), "F" in part.get_dtype()) for name, part in parts.items()}


def _told(tensor: tuple[list[int], bool] | None) -> str:
    if tensor is None:
        return "not there"
    return f"{tensor[0]} of {'floating-point' if tensor[1] else 'whole'} numbers"


# Replacing a folder.

_OLD = ".old"
"""Ends the name of a checkpoint that a new one is about to replace."""


def replace_folder(new: Path, folder: Path) -> None:
    """Put `new` in the place of `folder`: each step is one rename, so a reader sees the old or the new whole."""
    aside: list[Path] = []
    while new.exists():
        if folder.exists():
            aside.append(new.with_name(f"{new.name}.{len(aside)}{_OLD}"))
            os.rename(folder, aside[-1])
        try:
            os.rename(new, folder)
        except OSError:
            if not folder.exists():  # else a reader has just put the old one back
                raise
    for old in aside:
        shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """A save that was killed between two renames left the checkpoint that it was to replace aside: it is put back."""
    with contextlib.suppress(OSError, ValueError):  # whatever else is wrong is said where the folder is read
        if not os.path.lexists(folder):
            aside = folder.parent.glob(f".{glob.escape(folder.name)}.*{_OLD}")
            os.rename(max(aside, key=os.path.getmtime), folder)


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
        missing = [name for name in (CONFIG, WEIGHTS, METRICS) if not (folder / name).is_file()]
        if missing:
            raise ExpertcastError(f"{folder} is no whole predictor checkpoint, {', '.join(missing)} missing: {REMEDY}")
        config = read_config(folder / CONFIG)
        for name, expected in config["files"].items():
            check_file(folder / name, expected, REMEDY)
        return cls(folder=folder, config=config, metrics=read_metrics(folder / METRICS, config["shape"]["L"]))

    @property
    def name(self) -> str:
        """Registry name of the predictor."""
        return str(self.config["predictor"])

    @property
    def learned_from(self) -> frozenset[str]:
        """Hashes of the documents that the predictor learned or was chosen from.

        Raises:
            ExpertcastError: their file is not right.
        """
        return frozenset(read_json(self.folder / DOCUMENTS, DocumentsFile, REMEDY)["learned_from"])

    def verify(self, view: MoEView) -> None:
        """Check that the predictor was made for this very model.

        Raises:
            ExpertcastError: the fingerprint of routers and norms differs, or that of the experts, where both are known.
        """
        check_fingerprints(self.config, view, str(self.folder))

    def predictor(self) -> tuple[type[Predictor], PredictorConfig]:
        """Class and configuration of the predictor.

        Raises:
            ExpertcastError: unknown predictor, or fields that are not its own.
        """
        path = self.folder / CONFIG
        try:
            cls = predictor_class(self.name)
        except ExpertcastError as error:
            raise ExpertcastError(f"{path}: {error}; or register the predictor before it is loaded") from None
        what = f"{path}: predictor_config of {self.name!r}"
        return cls, from_values(cls.config_class, self.config["predictor_config"], what, REMEDY)

    def load(self, view: MoEView | None = None) -> Predictor:
        """The predictor in eval mode, bound to the model when one is given.

        Raises:
            ExpertcastError: unknown predictor, config fields or weights that do not fit it, a damaged file, or as
                :meth:`verify`.
        """
        if view is not None:
            self.verify(view)
        cls, config = self.predictor()
        shape = ModelShape.from_dict(self.config["shape"])
        predictor = load_into(lambda: cls(config, shape), self.folder / WEIGHTS, REMEDY)
        self._calibrate(predictor)
        predictor.learned_from = self.learned_from
        return predictor if view is None else predictor.bind(view)

    def _calibrate(self, predictor: Predictor) -> None:
        """Give a predictor, and those that it is made of, their calibration.

        Raises:
            ExpertcastError: that of a member is missing, or there is no such member; or as :meth:`_readings`.
        """
        predictor.calibration = self._readings(predictor, "calibration", self.config["calibration"])
        members, given = _members(predictor), self.config["member_calibration"]
        if members.keys() != given.keys():
            raise ExpertcastError(
                f"{self.folder / CONFIG}: member_calibration is of {[name[:20] for name in given]}, not of "
                f"{list(members)}; {REMEDY}"
            )
        for name, member in members.items():
            member.calibration = self._readings(member, f"member_calibration.{name}", given[name])

    def _readings(
        self, predictor: Predictor, field: str, values: Mapping[str, Sequence[Sequence[float]]]
    ) -> dict[int, Sequence[LogOdds]]:
        """Calibration of the predictor's logits: by distance, one reading per layer pair.

        Args:
            predictor: whose.
            field: of config.json that has it.
            values: of that.

        Raises:
            ExpertcastError: a distance that the predictor does not look, or too few or too many pairs.
        """
        path, distances = self.folder / CONFIG, {str(ahead): ahead for ahead in predictor.ahead}
        for name, pairs in values.items():
            if name not in distances:
                raise ExpertcastError(f"{path}: {field}.{name[:20]!r} is no distance of {list(distances)}; {REMEDY}")
            expected = predictor.shape.layers - distances[name]
            if len(pairs) != expected:
                raise ExpertcastError(f"{path}: {field}.{name} has {len(pairs)} layer pairs of {expected}; {REMEDY}")
        return {distances[name]: [LogOdds(*pair) for pair in pairs] for name, pairs in values.items()}


def _members(predictor: Predictor) -> dict[str, Predictor]:
    """Predictors that one is made of, by name."""
    parts = ((path, part) for path, part in predictor.named_modules() if path)
    return {path.rpartition(".")[2]: part for path, part in parts if isinstance(part, Predictor)}


def save_predictor(
    predictor: Predictor,
    folder: str | Path,
    *,
    view: MoEView,
    metrics: Json | None = None,
    training: Json | None = None,
) -> PredictorCheckpoint:
    """Write a checkpoint (the folder is drawn in the module's docstring); an older checkpoint there is replaced.

    Args:
        predictor: what to save.
        folder: where to; made with its parents.
        view: the model it was trained for; gives model id and fingerprint.
        metrics: evaluation results, plain JSON values; empty when None.
        training: how it was trained, plain JSON values.

    Raises:
        ExpertcastError: `folder` holds something that is not a checkpoint, or the predictor's tensors hold numbers that
            are not finite; or the metrics are not what a reader takes.
    """
    folder = Path(folder)
    _refuse_foreign(folder)
    config = describe(predictor, view)
    if training is not None:
        config["training"] = training
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
        "format": FORMAT,
        "predictor": predictor.name,
        "predictor_config": predictor.config.as_dict(),
        "model_id": without_folders(view.model_id),
        **fingerprints(view),
        "shape": predictor.shape.as_dict(),
        "tap_point": _reads(predictor),
        "calibration": _values(predictor),
        "member_calibration": {name: _values(member) for name, member in _members(predictor).items()},
        **provenance(),
    }


def _values(predictor: Predictor) -> dict[str, list[list[float]]]:
    """Its calibration as config.json has it."""
    return {
        str(ahead): [[own.slope, own.root, own.offset] for own in each] for ahead, each in predictor.calibration.items()
    }


def _reads(predictor: Predictor) -> str:
    parts = [TAP_POINT]
    if predictor.uses_previous_token:
        parts.append("router logits of the token before")
    if predictor.uses_early:
        parts.append("early attention")
    return "; ".join(parts)


def write_files(folder: Path, predictor: Predictor, config: Json, metrics: Json, *, where: str) -> PredictorCheckpoint:
    """Write a checkpoint's files into `folder`: the predictor's weights, `config` and `metrics` as JSON, the documents
    that it learned from, and the card made of these, which names the checkpoint by `where`. Numbers in JSON that are
    not finite become null.

    Raises:
        ExpertcastError: the predictor's tensors hold numbers that are not finite, or `config` or `metrics` are not by
            their schema.
    """
    # clones: safetensors refuses tensors that share memory
    tensors = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in predictor.state_dict().items()}
    check_tensors(tensors, f"predictor {predictor.name}", "train it again, with a lower learning rate if it has one")
    # safetensors' own file would be its owner's alone, whatever the umask is
    data = {WEIGHTS: save(tensors, metadata={"format": "pt"}), METRICS: _text(_plain(metrics))}
    learned_from = {"learned_from": sorted(predictor.learned_from or ())}
    data[DOCUMENTS] = (json.dumps(learned_from, separators=(",", ":")) + "\n").encode()
    digests = {name: digest(content) for name, content in data.items()}
    data[CONFIG] = _text(seal(_plain(config) | {"files": digests}))
    for name, content in data.items():
        (folder / name).write_bytes(content)
    written = PredictorCheckpoint.open(folder)
    (folder / CARD).write_text(model_card(written.config, written.metrics, where))
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
    if (folder / CONFIG).is_file():
        raise ExpertcastError(f"{folder} holds another kind of model: give another output folder")
    raise ExpertcastError(f"{folder} is not empty and no predictor checkpoint: give another output folder")


def push_checkpoint(
    folder: str | Path,
    name: HubName,
    *,
    private: bool = False,
    message: str | None = None,
    license: str | None = None,
) -> Json:
    """Send a checkpoint to a model repository, with a card that names it by that; files are compared with their digests
    first, and weights are read.

    Args:
        folder: of the checkpoint.
        name: of the repository, made where it is missing; its revision is a branch.
        private: whether nobody else may see it.
        message: of the commit.
        license: of the predictor, for the card.

    Returns:
        As :func:`expertcast.checkpoints.hub.push`, and the card's `license`.

    Raises:
        ExpertcastError: the checkpoint is not right; or as there.
    """
    checkpoint = PredictorCheckpoint.open(folder)
    checkpoint.load()
    card = model_card(checkpoint.config, checkpoint.metrics, str(name), license)
    kept = (CONFIG, *checkpoint.config["files"])
    content: dict[str, Path | bytes] = {path: checkpoint.folder / path for path in kept}
    content[CARD] = card.encode()
    sent = push(name, CHECKPOINT, content, private=private, message=message)
    return {**sent, "license": ModelCard(card).data.license}
