"""A request to a server as a document of traces. T tokens, D hidden size, L MoE layers, E routed experts per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from expertcast.data.batch import TraceBatch
from expertcast.data.text import text_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKS = ("first-question", "an-answer", "second-question")


@dataclass(slots=True, kw_only=True)
class LiveDocument:
    """What a request showed of a model."""

    hash: str
    """:meth:`Conversations.hash`"""
    token_T: Tensor
    residual_TLD: Tensor
    """bf16, on the CPU."""
    logits_TLE: Tensor
    """On the CPU."""
    start: int = 0
    """Position of the first row in the request: more than 0 where its beginning was in a prefix cache."""

    def rows(self, index: int) -> tuple[TraceBatch, Tensor]:
        """As a shard takes them, under this number, with the tokens' ids."""
        tokens = len(self.token_T)
        batch = TraceBatch(
            residual_TLD=self.residual_TLD,
            logits_TLE=self.logits_TLE,
            document_T=torch.full((tokens,), index),
            position_T=torch.arange(self.start, self.start + tokens),
        )
        return batch, self.token_T


class Conversations:
    """Knows requests by their conversation: by the text of its first user message, which all turns of a chat share and
    a system prompt before it does not change; without a chat template by the text of the whole prompt. The hash is
    that of a document with this text (:attr:`expertcast.data.text.Document.hash`).

    Args:
        tokenizer: the model's, with its chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._before, self._behind = tokenizer, "", ""
        if getattr(tokenizer, "chat_template", None):
            roles = ("user", "assistant", "user")
            turns = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
            first, whole = (
                str(tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=True))
                for part in (turns[:1], turns)
            )
            head, _, tail = first.partition(_MARKS[0])
            again = whole.partition(_MARKS[1])[2].partition(_MARKS[2])[0]
            self._behind = _common(tail, whole.partition(_MARKS[0])[2])
            self._before = _common(head[::-1], again[::-1])[::-1]

    def hash(self, token_ids: Sequence[int]) -> str:
        """What the document of a request with this prompt is known by."""
        text = str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        end = text.find(self._behind) if self._behind else -1
        begin = text.rfind(self._before, 0, end) if self._before and end >= 0 else -1
        if begin < 0:
            return text_hash(str(self._tokenizer.decode(token_ids, skip_special_tokens=True)))
        return text_hash(text[begin + len(self._before) : end])


def _common(one: str, other: str) -> str:
    """The beginning that two texts share."""
    return "".join(first for first, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
