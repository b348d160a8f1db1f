"""Predictor checkpoints on the Hugging Face hub: sent from their folders, and by huggingface_hub's own mixin.

Whatever takes a checkpoint's folder takes `user/repo` and `user/repo@revision` as well
(:meth:`expertcast.checkpoints.store.PredictorCheckpoint.open`).
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelCard, ModelHubMixin, snapshot_download

from expertcast.checkpoints import files
from expertcast.checkpoints.card import model_card
from expertcast.checkpoints.kind import CHECKPOINT
from expertcast.checkpoints.repositories import HubName
from expertcast.checkpoints.store import PredictorCheckpoint, describe, write_files
from expertcast.checkpoints.uploads import push, require_digests
from expertcast.predictors import MoEView, Predictor
from expertcast.predictors.artefacts import SEAL
from expertcast.predictors.plain import Json

_DOWNLOAD = ("revision", "cache_dir", "force_download", "local_files_only", "token")
"""Options of `from_pretrained` that say how files are downloaded."""


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
        As :func:`expertcast.checkpoints.uploads.push`, and the card's `license`.

    Raises:
        ExpertcastError: the checkpoint is not right, or from before there were digests; or as there.
    """
    checkpoint = PredictorCheckpoint.open(folder)
    checkpoint.load()
    require_digests(folder, SEAL in checkpoint.config, CHECKPOINT)
    card = model_card(checkpoint.config, checkpoint.metrics, str(name), license)
    kept = (files.CONFIG, *checkpoint.config["files"])
    content: dict[str, Path | bytes] = {path: checkpoint.folder / path for path in kept}
    content[files.CARD] = card.encode()
    sent = push(name, CHECKPOINT, content, private=private, message=message)
    return {**sent, "license": ModelCard(card).data.license}


class HubPredictor(ModelHubMixin):  # type: ignore[misc]
    """A predictor with what its checkpoint says about it.

    `save_pretrained`, `push_to_hub` and `from_pretrained` are the mixin's; the folder is the one that
    :func:`expertcast.checkpoints.store.save_predictor` writes.
    """

    def __init__(self, loaded: Predictor, description: Json, results: Json | None = None) -> None:
        self.predictor = loaded
        self.description = description
        self.results = results or {}
        self._repo: str | None = None
        """Where it is being sent."""

    @classmethod
    def of(cls, predictor: Predictor, view: MoEView, metrics: Json | None = None) -> HubPredictor:
        """A fitted predictor ready for `push_to_hub("user/name")`."""
        return cls(predictor, describe(predictor, view), metrics)

    def push_to_hub(self, repo_id: str, **options: object) -> str:
        """As the mixin's; the card names the repository."""
        self._repo = repo_id
        try:
            return str(super().push_to_hub(repo_id, **options))
        finally:
            self._repo = None

    def _save_pretrained(self, save_directory: Path) -> None:
        where = self._repo or str(save_directory)
        write_files(save_directory, self.predictor, self.description, self.results, where=where)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: object) -> HubPredictor:
        given = {name: options[name] for name in _DOWNLOAD if options.get(name) is not None}
        local = Path(model_id).is_dir()
        folder = model_id if local else snapshot_download(model_id, allow_patterns=list(files.ALL), **given)
        checkpoint = PredictorCheckpoint.open(folder)
        return cls(checkpoint.load(), checkpoint.config, checkpoint.metrics)
