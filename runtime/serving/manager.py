"""The one model of a server, where transformers' server looks for models."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable

from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.model_manager import ModelManager

from expertcast.predictors.plain import Json
from expertcast.runtime.offloaded import OffloadedModel


class OffloadedModelManager(ModelManager):  # type: ignore[misc]
    """Holds a model that is loaded already, and neither loads nor drops another.

    Args:
        offloaded: the model.
        tokenizer: its own.
        name: by which clients ask for it.
    """

    def __init__(self, offloaded: OffloadedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        super().__init__(device="cpu", model_timeout=-1)
        self.force_model = name
        self._offloaded, self._tokenizer = offloaded, tokenizer
        self._since = int(time.time())

    @property
    def vocabulary(self) -> int:
        """Tokens that the model has logits of."""
        return int(self._offloaded.model.config.get_text_config().vocab_size)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """Clients get the name back that they gave."""
        return model_id

    def load_model_and_processor(
        self, model_id_and_revision: str, progress_callback: Callable[..., None] | None = None,
        tqdm_class: type | None = None, gguf_file: str | None = None,
    ) -> tuple[OffloadedModel, PreTrainedTokenizerBase]:  # fmt: skip
        """The model and its tokenizer."""
        return self._offloaded, self._tokenizer

    def load_model_streaming(self, model_id_and_revision: str, gguf_file: str | None = None) -> AsyncIterator[str]:
        """There is nothing to load.

        Raises:
            NotImplementedError: always; the route is not served.
        """
        raise NotImplementedError

    def get_gen_models(self, cache_dir: str | None = None) -> list[Json]:
        """The model."""
        return [{"id": self.force_model, "object": "model", "created": self._since, "owned_by": "expertcast"}]

    def shutdown(self) -> None:
        """Who opened the model closes it."""
