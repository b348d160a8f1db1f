"""Forwards of a model over the columns of its texts, through transformers' own preparation of inputs.

B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from expertcast.runtime.drafts.texts import Texts, continued

_CONTINUED = {
    "attention_mask": "like", "position_ids": "more", "token_type_ids": "like", "mm_token_type_ids": "zero"
}  # fmt: skip
"""Inputs with a column for each token, and what stands in further columns."""


class Feed:
    """Feeds columns to a model; what they leave in its cache is for others to roll back.

    Args:
        model: which generates.
        texts: its rows.
        kwargs: transformers' own for the model's forwards, those of the prompt.
    """

    def __init__(self, model: PreTrainedModel, texts: Texts, kwargs: Mapping[str, Any]) -> None:
        self._model, self._texts = model, texts
        self._kwargs = dict(kwargs)
        for name, how in _CONTINUED.items():
            if self._kwargs.get(name) is not None:
                self._kwargs[name] = continued(self._kwargs[name], texts.most, how)
        self._keeps = "logits_to_keep" in self._kwargs
        self.hidden_BTD: Tensor | None = None
        """Last hidden states of what was fed last, where `output_hidden_states` is among the arguments."""

    def run(self, start: int, end: int, keep: int) -> Tensor:
        """Feed columns start..end-1 behind those in the cache.

        Returns:
            float32 logits [B, keep, V] of the last `keep` of them.
        """
        kwargs = dict(self._kwargs)
        for name in _CONTINUED:
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][..., :end]
        inputs = self._model.prepare_inputs_for_generation(
            self._texts.ids_BS[:, :end], next_sequence_length=end - start, is_first_iteration=False, **kwargs
        )
        if self._keeps:
            inputs["logits_to_keep"] = keep
        output = self._model(**inputs, return_dict=True)
        if self._kwargs.get("output_hidden_states"):
            self.hidden_BTD = output.hidden_states[-1]
        logits: Tensor = output.logits[:, -keep:]
        return logits.float()
