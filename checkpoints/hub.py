"""Predictor checkpoints on the Hugging Face hub, by huggingface_hub's own mixin."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import ModelHubMixin, snapshot_download

from expertcast.checkpoints import files
from expertcast.checkpoints.store import PredictorCheckpoint, describe, load_predictor, write_files
from expertcast.predictors import ExpertcastError, MoEView, Predictor
from expertcast.predictors.plain import Json

_DOWNLOAD = ("revision", "cache_dir", "force_download", "local_files_only", "token")
"""Options of `from_pretrained` that say how files are downloaded."""


class HubPredictor(ModelHubMixin):  # type: ignore[misc]
    """A predictor with what its checkpoint says about it.

    `save_pretrained`, `push_to_hub` and `from_pretrained` are the mixin's; the folder is the one that
    :func:`expertcast.checkpoints.store.save_predictor` writes.
    """

    def __init__(self, loaded: Predictor, description: Json, results: Json | None = None) -> None:
        self.predictor = loaded
        self.description = description
        self.results = results or {}

    @classmethod
    def of(cls, predictor: Predictor, view: MoEView, metrics: Json | None = None) -> HubPredictor:
        """A fitted predictor ready for `push_to_hub("user/name")`."""
        return cls(predictor, describe(predictor, view), metrics)

    def _save_pretrained(self, save_directory: Path) -> None:
        write_files(save_directory, self.predictor, self.description, self.results)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: object) -> HubPredictor:
        given = {name: options[name] for name in _DOWNLOAD if options.get(name) is not None}
        local = Path(model_id).is_dir()
        folder = model_id if local else snapshot_download(model_id, allow_patterns=list(files.ALL), **given)
        checkpoint = PredictorCheckpoint.open(folder)
        return cls(checkpoint.load(), checkpoint.config, checkpoint.metrics)


def load_from_hub(model_id: str, view: MoEView, *, revision: str | None = None) -> Predictor:
    """Download a predictor and bind it to the model.

    Raises:
        ExpertcastError: no such repository, no checkpoint in it, or one made for another model.
    """
    try:
        folder = snapshot_download(model_id, revision=revision, allow_patterns=list(files.ALL))
    except (OSError, ValueError) as error:
        raise ExpertcastError(
            f"cannot get predictor {model_id!r} from the hub: {str(error).splitlines()[0]}"
        ) from error
    return load_predictor(folder, view)
