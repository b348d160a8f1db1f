"""Save, verify and load predictor checkpoints.

    folder/config.json         predictor name and config, model id, fingerprint of routers and norms, fingerprint of
                               the experts if available, L, D, E, K, inputs, calibration, expertcast version, command,
                               git revision, versions; digests of the next three files and of itself
    folder/model.safetensors   the predictor's state dict, including default vectors
    folder/metrics.json        evaluation results and the data behind them
    folder/documents.json      hashes of the documents used for training or selection
    folder/README.md           model card

No file is pickled. Saving is atomic: the folder is written under a temporary name and then renamed.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NotRequired

import torch
from pydantic import ConfigDict, Field, JsonValue
from safetensors.torch import save
from typing_extensions import TypedDict

from expertcast.checkpoints.hub import Kind, located, real_folder, repository_in_errors
from expertcast.checkpoints.provenance import check_fingerprints, fingerprints, provenance, without_folders
from expertcast.predictors import ModelShape, MoEView, predictor_class
from expertcast.predictors.artefacts import CLOSED, check_file, digest, is_finite, locked, read_json, read_tensors, seal
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
"""Version of the file format; increased when older code could misread a new file."""

TAP_POINT = "input of the norm before the router (residual stream after attention)"
"""Source of residual_TD; config.json lists it among the predictor's inputs."""


# Schemas and readers of config.json, metrics.json and documents.json

REMEDY = "train it again with `expertcast train`"
_CONFIG_REMEDY = REMEDY + ", or upgrade expertcast if a newer version wrote it"

_Free = dict[str, JsonValue]
_Share = Annotated[float, Field(ge=0, le=1)]
_Readings = Annotated[list[Annotated[list[float], Field(min_length=4, max_length=4)]], Field(max_length=10_000)]
_Digest = Annotated[str, Field(pattern="^xxh3:[0-9a-f]{32}$")]


class ShapeValues(TypedDict):
    """The result of :meth:`ModelShape.as_dict`."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    L: Annotated[int, Field(ge=1, le=10_000)]
    E: Annotated[int, Field(ge=1, le=65_536)]
    K: Annotated[int, Field(ge=1, le=65_536)]
    D: Annotated[int, Field(ge=1, le=1_000_000)]


_Files = TypedDict("_Files", {WEIGHTS: _Digest, METRICS: _Digest, DOCUMENTS: _Digest})  # type: ignore[misc]
_Files.__pydantic_config__ = CLOSED  # type: ignore[attr-defined]


class ConfigFile(TypedDict):
    """config.json; `experts_fingerprint` is missing if the experts were not available."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    format: Annotated[int, Field(ge=1, le=FORMAT)]
    predictor: str
    predictor_config: _Free
    model_id: str
    fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    experts_fingerprint: NotRequired[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]
    shape: ShapeValues
    tap_point: str
    expertcast_version: str
    command: str
    git_revision: str | None
    python_version: str
    versions: dict[str, str | None]
    calibration: dict[str, _Readings]
    """Slope, bend, offset and unit of each layer pair (:class:`LogOdds`), by distance."""
    member_calibration: dict[str, dict[str, _Readings]]
    """Calibration of the predictor's members, by name."""
    code: dict[str, str]
    """MODULE:CLASS of the predictor and members that are not this package's, by name; loading never imports them."""
    training: NotRequired[_Free]
    files: _Files
    digest: str


class _Recall(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    mean: _Share
    per_layer: Annotated[list[_Share], Field(max_length=10_000)]


class _Scores(TypedDict):
    """An evaluation: the fields that code reads, and any others."""

    __pydantic_config__ = ConfigDict(CLOSED, extra="allow")  # type: ignore[misc]
    recall_at_k: NotRequired[dict[str, _Recall]]
    baselines: NotRequired[dict[str, _Recall]]
    """Recall@k of predictors without training, on the same tokens."""
    targets: NotRequired[list[Annotated[int, Field(ge=0, lt=10_000)]]]
    ahead: NotRequired[Annotated[int, Field(ge=1, le=10_000)]]


class _Evaluation(_Scores):
    further: NotRequired[Annotated[dict[Annotated[str, Field(pattern="^[0-9]{1,5}$")], _Scores], Field(max_length=64)]]
    """Evaluations at longer distances, by distance."""


class MetricsFile(_Evaluation):
    """metrics.json: the evaluation on the test split, optionally with that on the validation split inside."""

    validation: NotRequired[_Evaluation]


def read_config(path: Path) -> Json:
    """Read config.json.

    Raises:
        ExpertcastError: the file is unreadable, violates its schema, or changed after it was written.
    """
    config = read_json(path, ConfigFile, _CONFIG_REMEDY)
    if config["shape"]["K"] > config["shape"]["E"]:
        raise ExpertcastError(f"{path}: K={config['shape']['K']} exceeds E={config['shape']['E']}; {REMEDY}")
    return dict(config)


def read_metrics(path: Path, layers: int) -> Json:
    """Read metrics.json.

    Args:
        path: the file.
        layers: number of MoE layers of the model.

    Raises:
        ExpertcastError: the file is unreadable or violates its schema.
    """
    metrics: Json = dict(read_json(path, MetricsFile, REMEDY))
    for evaluation in (metrics, metrics.get("validation", {})):
        for scores in (evaluation, *evaluation.get("further", {}).values()):
            _check_targets(path, scores, layers)
    return metrics


def _check_targets(path: Path, scores: Json, layers: int) -> None:
    """Check that every recall belongs to a target layer, and that target layers are ascending layers of the model."""
    recall = {**scores.get("recall_at_k", {}), **scores.get("baselines", {})}
    longest = max((len(values["per_layer"]) for values in recall.values()), default=0)
    targets: list[int] = list(scores.get("targets", range(1, longest + 1)))
    if targets != sorted(set(targets)) or (targets and targets[-1] >= layers):
        raise ExpertcastError(f"{path}: targets are not ascending layers of 0..{layers - 1}; {REMEDY}")
    for name, values in recall.items():
        if len(values["per_layer"]) != len(targets):
            raise ExpertcastError(
                f"{path}: recall_at_k.{name!r} has {len(values['per_layer'])} layers instead of {len(targets)}; "
                f"{REMEDY}"
            )


def holds_predictor(folder: str | Path) -> bool:
    """Return whether a folder is a predictor checkpoint, possibly damaged, and not a model."""
    config = Path(folder) / CONFIG
    if not config.is_file():
        return all((Path(folder) / name).is_file() for name in (METRICS, WEIGHTS))
    try:
        values = read_json(config, dict[str, JsonValue], REMEDY)
    except ExpertcastError:
        return (Path(folder) / METRICS).is_file()
    return "predictor" in values or "predictor_config" in values


def is_name(given: str | Path) -> bool:
    """Return whether `given` is the name of a registered predictor.

    Raises:
        ExpertcastError: the working directory also has a checkpoint of that name.
    """
    if given not in PREDICTORS.names():
        return False
    if any((Path(given) / name).is_file() for name in (CONFIG, METRICS)):
        raise ExpertcastError(
            f"{given!r} is a predictor and also a checkpoint folder: use ./{given} for the checkpoint, or rename the "
            "folder"
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
    """Document hashes, sorted."""


def load_into(make: Callable[[], Predictor], path: Path, remedy: str) -> Predictor:
    """Build a predictor in eval mode with the tensors of a safetensors file.

    A first instance on the meta device takes no memory, so a config that requests huge tensors fails early.

    Args:
        make: builds the predictor; called twice.
        path: safetensors file.
        remedy: end of error messages.

    Raises:
        ExpertcastError: the file is damaged, its tensors differ from the predictor's, or it contains non-finite
            numbers.
    """
    try:
        with torch.device("meta"):
            like = make().state_dict()
    except (RuntimeError, OverflowError) as error:
        raise ExpertcastError(
            f"cannot build a predictor of this config and shape: {str(error).splitlines()[0]}"
        ) from error
    tensors, _ = read_tensors(path, like, remedy)
    with torch.random.fork_rng(devices=[]):  # initial weights are drawn: sampled generation must not change
        predictor = make()
    predictor.load_state_dict(tensors)
    return predictor.eval()


# Replacing a folder

_OLD = ".old"
"""Suffix of a checkpoint that is being replaced."""


def replace_folder(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`; readers see either the old folder or the new one, never a mixture."""
    aside: list[Path] = []
    while new.exists():
        if folder.exists():
            aside.append(new.with_name(f"{new.name}.{len(aside)}{_OLD}"))
            shutil.move(folder, aside[-1])  # copies where an overlay file system refuses to rename
        try:
            os.rename(new, folder)
        except OSError:
            if not folder.exists():  # else a reader has restored the old folder
                raise
    for old in aside:
        shutil.rmtree(old, ignore_errors=True)


def _remove_left_over(folder: Path) -> None:
    """Remove the folders that killed processes left beside a complete checkpoint."""
    own = re.compile(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{32}}(\.\d+{_OLD})?")
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        with contextlib.suppress(OSError):
            if own.fullmatch(left.name) and any(left.iterdir()):  # an empty one may be about to be locked
                with locked(left):
                    shutil.rmtree(left)


def recover(folder: Path) -> None:
    """Restore the old checkpoint if a save was killed between its two renames."""
    with contextlib.suppress(OSError, ValueError):  # reading the folder reports other problems
        folder = Path(os.path.realpath(folder))
        if not os.path.lexists(folder):
            aside = folder.parent.glob(f".{glob.escape(folder.name)}.*{_OLD}")
            os.rename(max(aside, key=os.path.getmtime), folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorCheckpoint:
    """A verified checkpoint: its config and metrics. :meth:`load` reads the weights.

    Example:
        >>> import expertcast
        >>> expertcast.PredictorCheckpoint.open("checkpoint")
        PredictorCheckpoint('quasi_hidden', model='reference', L=12, E=64, K=4, D=192, folder='checkpoint')
    """

    folder: Path
    config: Json
    """Contents of config.json."""
    metrics: Json
    """Contents of metrics.json."""

    def __repr__(self) -> str:
        config = self.config
        shape = ", ".join(f"{key}={value}" for key, value in config["shape"].items())
        return f"PredictorCheckpoint({self.name!r}, model={config['model_id']!r}, {shape}, folder={str(self.folder)!r})"

    @classmethod
    def open(cls, folder: str | Path, *, revision: str | None = None) -> PredictorCheckpoint:
        """Read config.json and metrics.json, and compare every file with its digest.

        Args:
            folder: checkpoint folder, or the hub repository `user/repo` or `user/repo@revision`.
            revision: branch, tag or commit of the repository.

        Raises:
            ExpertcastError: the folder or repository does not exist, or a file is missing, unreadable, changed or
                invalid.
        """
        recover(Path(folder))
        found, name = located(folder, CHECKPOINT, revision)
        with repository_in_errors(name, found, CHECKPOINT):
            return cls._read(found)

    @classmethod
    def _read(cls, folder: Path) -> PredictorCheckpoint:
        needed = (CONFIG, WEIGHTS, METRICS)
        missing = [name for name in needed if not (folder / name).is_file()]
        if len(missing) == len(needed):
            raise ExpertcastError(f"no predictor checkpoint at {folder}: use a folder written by `expertcast train`")
        if missing:
            raise ExpertcastError(f"{folder} is an incomplete checkpoint without {', '.join(missing)}: {REMEDY}")
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
        """Hashes of the documents used for training or selection.

        Raises:
            ExpertcastError: documents.json is unreadable or invalid.
        """
        return frozenset(read_json(self.folder / DOCUMENTS, DocumentsFile, REMEDY)["learned_from"])

    def verify(self, view: MoEView) -> None:
        """Raise an error unless the predictor was trained for this model.

        Raises:
            ExpertcastError: the fingerprint of routers and norms differs, or that of the experts if both exist.
        """
        check_fingerprints(self.config, view, str(self.folder))

    def predictor(self) -> tuple[type[Predictor], PredictorConfig]:
        """Return the predictor's class and configuration.

        Raises:
            ExpertcastError: the predictor is unknown, or its config has invalid fields.
        """
        path = self.folder / CONFIG
        for name, code in self.config["code"].items():
            if name not in PREDICTORS.names():
                module, _, own = code.partition(":")
                if module == "__main__" or "<locals>" in own:
                    what, how = f"{own} of the program that saved it", "move it to a module"
                else:
                    what, how = f"{code}, which is not this package's", f"give {code}@{self.folder} on the command line"
                raise ExpertcastError(
                    f"{self.folder} needs the class {what}: {how}, or register it first by expertcast.register"
                )
        try:
            cls = predictor_class(self.name)
        except ExpertcastError as error:
            raise ExpertcastError(f"{path}: {error}; {REMEDY}") from None
        what = f"{path}: predictor_config of {self.name!r}"
        return cls, from_values(cls.config_class, self.config["predictor_config"], what, REMEDY)

    def load(self, view: MoEView | None = None) -> Predictor:
        """Load the predictor in eval mode.

        Args:
            view: model to verify and bind; without it the predictor stays unbound.

        Raises:
            ExpertcastError: the predictor is unknown, its config or weights are invalid, or it was trained for another
                model.
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
        """Set the calibration of a predictor and of its members from config.json."""
        predictor.calibration = self._readings(predictor, "calibration", self.config["calibration"])
        members, stored = _members(predictor), self.config["member_calibration"]
        if members.keys() != stored.keys():
            raise ExpertcastError(
                f"{self.folder / CONFIG}: member_calibration has {[name[:20] for name in stored]} instead of "
                f"{list(members)}; {REMEDY}"
            )
        for name, member in members.items():
            member.calibration = self._readings(member, f"member_calibration.{name}", stored[name])

    def _readings(
        self, predictor: Predictor, field: str, values: Mapping[str, Sequence[Sequence[float]]]
    ) -> dict[int, Sequence[LogOdds]]:
        """Parse the `values` of a `field` in config.json: by distance, one :class:`LogOdds` per layer pair.

        Raises:
            ExpertcastError: a distance is not the predictor's, or the number of layer pairs is wrong.
        """
        path, distances = self.folder / CONFIG, {str(ahead): ahead for ahead in predictor.ahead}
        for name, pairs in values.items():
            if name not in distances:
                raise ExpertcastError(f"{path}: {field} has distance {name[:20]!r}, not in {list(distances)}; {REMEDY}")
            expected = predictor.shape.layers - distances[name]
            if len(pairs) != expected:
                raise ExpertcastError(
                    f"{path}: {field}.{name} has {len(pairs)} layer pairs instead of {expected}; {REMEDY}"
                )
        return {distances[name]: [LogOdds(*pair) for pair in pairs] for name, pairs in values.items()}


def _members(predictor: Predictor) -> dict[str, Predictor]:
    """Return the predictors inside a predictor, by name."""
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
    """Write a checkpoint folder; it replaces an older checkpoint atomically.

    Args:
        predictor: predictor to save.
        folder: destination; missing parents are created.
        view: model that the predictor was trained for; provides model id and fingerprints.
        metrics: evaluation results as JSON values.
        training: description of the training as JSON values.

    Returns:
        The new checkpoint.

    Raises:
        ExpertcastError: `folder` contains other files, a tensor contains NaN or infinity, or the metrics are invalid.

    Example:
        >>> import expertcast
        >>> traces = expertcast.TraceDataset.open("traces")
        >>> predictor = expertcast.fit("quasi_hidden", traces).predictor
        >>> expertcast.save_predictor(predictor, "checkpoint", view=traces.view).name
        'quasi_hidden'
    """
    folder = Path(folder)
    real = real_folder(folder)
    _refuse_foreign(folder)
    config = describe(predictor, view)
    if training is not None:
        config["training"] = training
    real.parent.mkdir(parents=True, exist_ok=True)
    temporary = real.parent / f".{real.name}.{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # a file system without locks, where no folder is removed
                stack.enter_context(locked(temporary))
            written = write_files(temporary, predictor, config, metrics or {}, where=str(folder))
            replace_folder(temporary, real)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _remove_left_over(real)
    return replace(written, folder=folder)


def load_predictor(folder: str | Path, view: MoEView | None = None, *, revision: str | None = None) -> Predictor:
    """Load the predictor of a checkpoint, and bind it to a model if one is given.

    Args:
        folder, revision: as for :meth:`PredictorCheckpoint.open`.
        view: the model's MoE layers.

    Raises:
        ExpertcastError: a file is missing, damaged or of a newer format, or the predictor was trained for another
            model.

    Example:
        >>> import expertcast
        >>> expertcast.load_predictor("checkpoint").name
        'quasi_hidden'
    """
    return PredictorCheckpoint.open(folder, revision=revision).load(view)


def describe(predictor: Predictor, view: MoEView) -> Json:
    """Return the contents of config.json for a predictor trained for the model of `view`."""
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
        "code": {
            each.name: f"{type(each).__module__}:{type(each).__qualname__}"
            for each in (predictor, *_members(predictor).values())
            if not type(each).__module__.startswith("expertcast.")
        },
        **provenance(),
    }


def _values(predictor: Predictor) -> dict[str, list[list[float]]]:
    """Return the calibration as config.json stores it."""
    return {
        str(ahead): [[own.slope, own.bend, own.offset, own.unit] for own in each]
        for ahead, each in predictor.calibration.items()
    }


def _reads(predictor: Predictor) -> str:
    parts = [TAP_POINT]
    if predictor.uses_previous_token:
        parts.append("previous token's router logits")
    if predictor.uses_early:
        parts.append("early attention")
    return "; ".join(parts)


def write_files(folder: Path, predictor: Predictor, config: Json, metrics: Json, *, where: str) -> PredictorCheckpoint:
    """Write a checkpoint's files into an empty folder.

    Args:
        folder: destination.
        predictor: provides the weights and the hashes of its documents.
        config: contents of config.json.
        metrics: contents of metrics.json; NaN and infinity become null.
        where: name of the checkpoint in the card's commands.

    Raises:
        ExpertcastError: a tensor contains NaN or infinity, or `config` or `metrics` violate their schemas.
    """
    # clone: safetensors rejects tensors that share memory
    tensors = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in predictor.state_dict().items()}
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not is_finite(tensor):
            raise ExpertcastError(
                f"predictor {predictor.name}: {key} contains NaN or infinity; train it again, with a lower learning "
                "rate if it has one"
            )
    # safetensors' own writer ignores the umask
    data = {WEIGHTS: save(tensors, metadata={"format": "pt"}), METRICS: _text(_plain(metrics))}
    learned_from = {"learned_from": sorted(predictor.learned_from or ())}
    data[DOCUMENTS] = (json.dumps(learned_from, separators=(",", ":")) + "\n").encode()
    digests = {name: digest(content) for name, content in data.items()}
    data[CONFIG] = _text(seal(_plain(config) | {"files": digests}))
    for name, content in data.items():
        (folder / name).write_bytes(content)
    written = PredictorCheckpoint.open(folder)
    from expertcast.checkpoints.card import model_card

    (folder / CARD).write_text(model_card(written.config, written.metrics, where))
    return written


def _plain(values: Json) -> Json:
    """Convert to JSON types: string keys, null for NaN and infinity."""
    plain: Json = json.loads(json.dumps(values), parse_constant=lambda _: None)
    return plain


def _text(values: Json) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _refuse_foreign(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ExpertcastError(f"{folder} is a file: use a folder for the predictor checkpoint")
    if not folder.is_dir() or not any(folder.iterdir()) or holds_predictor(folder):
        return
    if (folder / CONFIG).is_file():
        raise ExpertcastError(f"{folder} contains another model: use another output folder")
    raise ExpertcastError(f"{folder} is not empty and not a predictor checkpoint: use another output folder")
