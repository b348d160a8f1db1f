"""Drafts by heads that a checkpoint has for tokens further ahead (multi-token prediction).

A head is a decoder layer that reads the head before it, the first one the model's last hidden states, and the token
that came next; it says the token after that. transformers loads them (`modeling_layers.MtpModel`) and shares embedding
and output head with the model. L heads, S tokens of text, T of them new, D the hidden size, V the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.drafts.proposals import refuse_batch


class Heads:
    """A model's heads, read from its checkpoint: one object for all texts.

    A head of a Mixture-of-Experts model has experts of its own, and all of them stay in memory.

    Args:
        model: loaded from a checkpoint (`config._name_or_path`), offloaded or not.

    Raises:
        ExpertcastError: the checkpoint has no such heads, or none that transformers can read.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if not getattr(model.config.get_text_config(), "num_mtp_layers", None):
            raise ExpertcastError(
                f"a {type(model).__name__} has no heads for later tokens (num_mtp_layers): choose another draft"
            )
        device = model.get_input_embeddings().weight.device
        try:
            self._model = MtpModel.from_pretrained(model, device_map={"": device}).eval()
        except (OSError, RuntimeError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise ExpertcastError(f"the heads for later tokens cannot be read: {first}; choose another draft") from None
        self._model.config._experts_implementation = "grouped_mm"  # the model's own may know offloaded experts alone
        self.length: int = self._model.num_mtp_layers
        self.device: torch.device = device
        self._shared = {each.data_ptr() for each in model.parameters()}

    @property
    def nbytes(self) -> int:
        """Bytes of the heads' own weights; what they share with the model is not counted twice."""
        return sum(each.nbytes for each in self._model.parameters() if each.data_ptr() not in self._shared)

    def cache(self) -> MtpCache:
        """An empty one, which can be rolled back."""
        cache = MtpCache(config=self._model.config)
        cache.activate_past_recording()
        return cache

    def run(
        self,
        text_1S: Tensor,
        hidden_1TD: Tensor,
        cache: MtpCache,
        do_sample: bool,
        processors: LogitsProcessorList | None,
    ) -> tuple[Tensor, Tensor]:
        """The next tokens [1, L], and their processed logits [1, L, V].

        Args:
            text_1S: all that stands.
            hidden_1TD: of the T tokens before the last.
            cache: holds what came before them, and takes them.
            do_sample: draw each token; else the likeliest.
            processors: of the logits.
        """
        length, new = text_1S.shape[1], hidden_1TD.shape[1]
        ids_1L, logits_1LV, _ = self._model(
            input_ids=text_1S[:, length - new :],
            last_hidden_states=hidden_1TD,
            attention_mask=None,
            position_ids=torch.arange(length - new, length, device=self.device)[None],
            mtp_cache=cache,
            do_sample=do_sample,
            logits_processor=processors,
            full_input_ids=text_1S,
        )
        return ids_1L, logits_1LV


class HeadsDraft:
    """What the heads say of one row's text: up to L tokens. A :class:`~expertcast.runtime.drafts.proposals.Proposer`.

    What a later head holds of a draft's tokens is computed again with those that stand.

    Args:
        heads: the model's.
        do_sample: draw each token; else the likeliest.
        processors: of the logits, all that sampling asks for among them.
    """

    needs_hidden = True

    def __init__(self, heads: Heads, do_sample: bool = False, processors: LogitsProcessorList | None = None) -> None:
        self._heads = heads
        self._do_sample = do_sample
        self._processors = processors
        self._cache = heads.cache()
        self._held = 0
        self._hidden_1TD: Tensor | None = None

    def propose(self, text_1S: Tensor, most: int) -> tuple[Tensor, Tensor | None]:
        """As :meth:`~expertcast.runtime.drafts.proposals.Proposer.propose`.

        Raises:
            RuntimeError: the hidden states seen are not those of the text without its last token.
        """
        refuse_batch(text_1S)
        new = 0 if self._hidden_1TD is None else self._hidden_1TD.shape[1]
        if self._hidden_1TD is None or self._held + new != text_1S.shape[1] - 1:
            raise RuntimeError(f"hidden states of {self._held + new} tokens for a text of {text_1S.shape[1]}")
        ids_1L, logits_1LV = self._heads.run(
            text_1S.to(self._heads.device), self._hidden_1TD, self._cache, self._do_sample, self._processors
        )
        again = min(self._heads.length - 1, self._held + new)
        self._cache.crop(-again)
        self._held += new - again
        self._hidden_1TD = self._hidden_1TD[:, new - again :]
        ids_1m, logits_1mV = ids_1L[:, :most].to(text_1S.device), logits_1LV[:, :most].to(text_1S.device)
        return ids_1m, logits_1mV if self._do_sample else None

    def saw(self, hidden_1TD: Tensor) -> None:
        """The model's last hidden states of tokens that stand, each once: `hidden_states[-1]` of its output."""
        hidden_1TD = hidden_1TD.to(self._heads.device)
        before = self._hidden_1TD
        self._hidden_1TD = hidden_1TD if before is None else torch.cat([before, hidden_1TD], dim=1)
