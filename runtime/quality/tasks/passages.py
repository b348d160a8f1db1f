"""Held-out texts as tokens, and what all tasks draw from them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from expertcast.predictors.errors import ExpertcastError

_BEGINS_WORD = ("Ġ", "▁")
"""How byte-level and SentencePiece vocabularies write the space before a word."""
_LETTERS = 3
"""Letters of a word at least."""


@dataclass(frozen=True, kw_only=True)
class Passages:
    """Texts that no predictor saw, tokenized.

    Raises:
        ExpertcastError: no texts.
    """

    tokenizer: PreTrainedTokenizerBase
    texts: Sequence[str]

    def __post_init__(self) -> None:
        if not self.texts:
            raise ExpertcastError("no texts to make tasks from: give held-out documents")

    @cached_property
    def lead(self) -> tuple[int, ...]:
        """What the tokenizer begins every text with, such as a token of its own."""
        return tuple(self.tokenizer("")["input_ids"])

    @cached_property
    def ids(self) -> list[list[int]]:
        """Of each text, without what the tokenizer adds."""
        return [self.encode(text) for text in self.texts]

    @cached_property
    def words(self) -> frozenset[int]:
        """Tokens that are a space and a word."""
        special = set(self.tokenizer.all_special_ids)
        tokens = self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokenizer))))
        return frozenset(
            number
            for number, token in enumerate(tokens)
            if token is not None and token.startswith(_BEGINS_WORD) and number not in special
            and token[1:].isascii() and token[1:].isalpha() and len(token) > _LETTERS
        )  # fmt: skip

    def encode(self, text: str) -> list[int]:
        """A text's tokens, without what the tokenizer adds."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def in_turn(self, length: int, choose: random.Random, what: str) -> Iterator[list[int]]:
        """Token ids of texts of at least `length` tokens, each as often as the others, in an order of `choose`'s.

        Raises:
            ExpertcastError: no text is that long; the line says `what` it was wanted for.
        """
        enough = [ids for ids in self.ids if len(ids) >= length]
        if not enough:
            raise ExpertcastError(f"{what}: no text has {length} tokens; give longer held-out documents")
        while True:
            yield from choose.sample(enough, len(enough))
