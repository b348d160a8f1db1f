"""Going on with a training that was killed: what is kept on disk while it runs, in safetensors and JSON, no pickle.

`expertcast train ... --out CKPT` keeps it in CKPT.partial, a file per training (a distance, a trial of a temperature),
and removes the folder when CKPT is written. A file holds the network, the optimiser's state, the learning rate's, the
step, the best round's network and its score, the random states, the position in the order of the tokens, and the
folder of its TensorBoard logs. It replaces the one before it whole, so that a kill at any moment leaves one that can be
used. A training goes on only from a file of its very configuration, data and versions. On the CPU it ends bit for bit
as if nothing had happened.

Under torchrun the first rank writes and all ranks read: the folder must be one that they share, as --out is.

A save takes about 80 ms for the default estimator on the bundled model (0.76 M parameters, 12 MB with the optimiser's
state and the best round's) on a busy machine of two cores: 20 saves are under 1% of its training of minutes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import lightning
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from typing_extensions import TypedDict

from expertcast.data.writer import write_atomically
from expertcast.predictors.artefacts import CLOSED, digest, open_file, parse_json, seal
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json

SAVES = 20
"""Times that a training's state is saved."""
_RANDOM = "expertcast_random_states"
_LOGS = "expertcast_logs"

log = logging.getLogger(__name__)


class _Note(TypedDict):
    """What a state says of itself."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    fingerprint: str
    step: int
    finished: bool
    content: str
    digest: str


def resume_folder(out: Path) -> Path:
    """Where the trainings of the checkpoint `out` keep their states: beside it."""
    return out.with_name(out.name + ".partial")


def forget(out: Path) -> None:
    """Remove what the trainings of the checkpoint `out` have kept: it is complete."""
    shutil.rmtree(resume_folder(out), ignore_errors=True)


def note_of(path: Path, wanted: str) -> Json | None:
    """What a state's file says of itself (`step`, `finished`), or None where none can be gone on from, which is logged.

    `wanted` is the fingerprint of the training that is to go on. The whole file is read and compared with its digest.
    """
    if not os.path.lexists(path):
        return None
    try:
        note, _, _ = _read(path)
    except ExpertcastError as error:
        log.warning("%s: this training starts over", error)
        return None
    if note["fingerprint"] != wanted:
        log.warning("%s is of another configuration, other data or other versions: this training starts over", path)
        return None
    log.warning("%s: %s", path, "finished before" if note["finished"] else f"going on at step {note['step']}")
    return dict(note)


def write_state(path: Path, state: Mapping[str, object], note: Json) -> None:
    """Write plain values, tensors, and lists and mappings of these as one safetensors file, whole or not at all.

    Args:
        path: of the file; its folder is made.
        state: what to write.
        note: what :func:`note_of` gives back: `fingerprint`, `step` and `finished`.

    Raises:
        TypeError: a value of another kind.
    """
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_packed(state, tensors))
    sealed = json.dumps(seal({**note, "content": _content(tree, tensors)}))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(tensors, metadata={"tree": tree, "note": sealed}))


def read_state(path: Path) -> Json:
    """What :func:`write_state` wrote, with lists for tuples.

    Raises:
        ExpertcastError: it is not there, or is damaged.
    """
    _, tree, tensors = _read(path)
    state = _unpacked(json.loads(tree), tensors)
    assert isinstance(state, dict)
    return state


def _read(path: Path) -> tuple[_Note, str, dict[str, Tensor]]:
    remedy = "remove it"
    try:
        open_file(path).close()
        with safe_open(path, framework="pt") as file:
            texts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise ExpertcastError(f"{path} is damaged ({str(error).splitlines()[0]}); {remedy}") from error
    tree = texts.get("tree", "")
    note = parse_json(texts.get("note", ""), _Note, f"{path}: its note", remedy)
    if note["content"] != _content(tree, tensors):
        raise ExpertcastError(f"{path} is damaged: it was changed after it was written; {remedy}")
    return note, tree, tensors


def _content(tree: str, tensors: Mapping[str, Tensor]) -> str:
    """Digest of a state: of its plain values, and of each tensor's name, type, shape and bytes."""
    parts = [tree]
    for name, tensor in sorted(tensors.items()):
        own = digest(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        parts.append(f"{name} {tensor.dtype} {list(tensor.shape)} {own}")
    return digest("\n".join(parts).encode())


def _packed(value: object, tensors: dict[str, Tensor]) -> object:
    """JSON values, with each tensor's place in `tensors` in its stead; mappings as pairs, as keys may be numbers."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"pairs": [[key, _packed(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_packed(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} in a training's state: only tensors and plain values can be kept")


def _unpacked(value: object, tensors: Mapping[str, Tensor]) -> object:
    if isinstance(value, list):
        return [_unpacked(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    return {key: _unpacked(item, tensors) for key, item in value["pairs"]}


class PlainCheckpoints(CheckpointIO):  # type: ignore[misc]
    """How Lightning writes and reads its checkpoints here: as safetensors and JSON instead of a pickle."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint

    def save_checkpoint(
        self, checkpoint: Mapping[str, object], path: Path | str, storage_options: object = None
    ) -> None:
        """Write a state, atomically; `storage_options` are of other kinds of storage."""
        note = {"fingerprint": self._fingerprint, "step": checkpoint["global_step"], "finished": False}
        write_state(Path(path), checkpoint, note)

    def load_checkpoint(
        self, path: Path | str, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, object]:
        """The state, its tensors on the CPU; Lightning moves them to where they belong."""
        return read_state(Path(path))

    def remove_checkpoint(self, path: Path | str) -> None:
        """Remove one state."""
        Path(path).unlink(missing_ok=True)


class KeepState(Callback):  # type: ignore[misc]
    """Saves a training's state every few steps, between one step (and its validation round) and the next."""

    def __init__(self, path: Path, every: int) -> None:
        """Save to the file `path` after every `every` steps."""
        self._path, self._every = path, every
        self._random: Json | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Set the random states of a training that goes on."""
        if self._random is not None:
            torch.set_rng_state(self._random["cpu"])
            if self._random["cuda"]:
                torch.cuda.set_rng_state_all(self._random["cuda"])

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Save, where it is time to, and count the steps of the logs right.

        Of Lightning's arguments only `trainer` is looked at, not `pl_module`, `batch` and `batch_idx`.
        """
        # Lightning counts one too many when it goes on from a state that a validation round came just before
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
        if trainer.global_step and trainer.global_step % self._every == 0:
            trainer.save_checkpoint(self._path)

    def on_save_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, object]
    ) -> None:
        """Add the random states and the folder of the logs, and take back that the next batch was fetched."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        checkpoint[_RANDOM] = {"cpu": torch.get_rng_state(), "cuda": cuda}
        if trainer.logger is not None:
            checkpoint[_LOGS] = os.path.abspath(trainer.logger.log_dir)
        _before_the_batch(checkpoint)

    def on_load_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: Json
    ) -> None:
        """Keep the random states until the data is set up, which draws from them."""
        self._random = checkpoint[_RANDOM]


def logger_of(folder: Path | None, name: str, start: Path | None) -> TensorBoardLogger | None:
    """TensorBoard's logger of a training; None without a folder.

    Args:
        folder: of all logs.
        name: the training's.
        start: the state that it goes on from. If it logged in this folder it keeps its version there, and TensorBoard
            leaves out what was logged after the state. Without a state the version is a new one.

    Raises:
        ExpertcastError: the state is damaged.
    """
    if folder is None:
        return None
    state = {} if start is None else read_state(start)
    logs = Path(state.get(_LOGS, ""))
    if logs.parent != Path(os.path.abspath(folder / name)):
        return TensorBoardLogger(str(folder), name=name)
    return TensorBoardLogger(str(folder), name=name, version=logs.name, purge_step=state["global_step"])


def _before_the_batch(checkpoint: Json) -> None:
    """Set Lightning's counters to where they were between two steps.

    When a batch starts they count it as made ready, and, if it is the epoch's last, the epoch as being at its end.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    progress["is_last_batch"] = False
    for counters in (progress["total"], progress["current"]):
        counters["ready"] = counters["completed"]
