"""State of the sequences during generation, and the feed of their tokens to the model.

A draft may be accepted further in one row than in another, so rows have different lengths. All rows share the columns
of the cache; tokens that a row has beyond them are fed again until the other rows catch up. A column is the position of
a token in its row, including padding on the left.

B sequences, S tokens of a sequence, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteriaList


class Sequences:
    """Token ids of a batch and the number of settled tokens of each row.

    Args:
        prompt_BS: ids of the prompts [B, S].
        most: maximum number of columns, more than S.
        pad: id that fills a row after its end.
    """

    def __init__(self, prompt_BS: Tensor, most: int, pad: int) -> None:
        batch, self.prompt = prompt_BS.shape
        self.ids_BS = prompt_BS.new_full((batch, most), pad)
        """Ids of all columns; columns that are not settled may hold a draft."""
        self.ids_BS[:, : self.prompt] = prompt_BS
        self.most = most
        self.known = [self.prompt] * batch
        """Number of settled columns of each row."""
        self.ended = [False] * batch
        self._pad = pad

    @property
    def open(self) -> list[int]:
        """Rows that have not ended."""
        return [row for row, ended in enumerate(self.ended) if not ended]

    @property
    def common(self) -> int:
        """Number of columns that are settled in all open rows."""
        return min(self.known[row] for row in self.open)

    @property
    def longest(self) -> int:
        """Number of settled columns of the longest row."""
        return max(self.known)

    def draft(self, column: int, token_B: Tensor) -> None:
        """Write drafted tokens [B] into a column of the rows where it is not settled."""
        for row in self.open:
            if self.known[row] <= column:
                self.ids_BS[row, column] = token_B[row]

    def settle(self, token_BN: Tensor, count_B: list[int], stops: StoppingCriteriaList) -> list[int]:
        """Append tokens to every open row, up to its end.

        Args:
            token_BN: next tokens of each row.
            count_B: number of valid tokens of each row.
            stops: stopping criteria, checked after every token as in decoding one by one.

        Returns:
            Number of tokens appended to each row.
        """
        before = list(self.known)
        for row in self.open:
            count = min(count_B[row], self.most - self.known[row])
            start = self.known[row]
            self.ids_BS[row, start : start + count] = token_BN[row, :count]
            self.ids_BS[row, start + count :] = self._pad
            self.known[row] = start + count
        for column in range(min(before), max(self.known)):
            rows = [row for row in self.open if before[row] <= column < self.known[row]]
            if not rows:
                continue
            done = stops(self.ids_BS[:, : column + 1], None)
            for row in rows:
                if done[row] or column + 1 == self.most:
                    self.ended[row], self.known[row] = True, column + 1
                    self.ids_BS[row, column + 1 :] = self._pad
        return [now - then for now, then in zip(self.known, before, strict=True)]

    def start_B(self, column: int) -> list[int]:
        """Return the number of settled columns of each row from a column on; `most` for a row that has ended."""
        return [self.most if ended else known - column for known, ended in zip(self.known, self.ended, strict=True)]

    def result(self) -> Tensor:
        """Return the settled ids [B, longest]."""
        return self.ids_BS[:, : self.longest].clone()


def continued(values: Tensor, columns: int, how: str) -> Tensor:
    """Extend an input of the prompt [..., S] to a number of columns.

    Args:
        values: mask, positions or token types of the prompt.
        columns: number of columns of the result.
        how: new values: `like` the last one, one `more` than the previous one, or `zero`.
    """
    missing = columns - values.shape[-1]
    if missing <= 0:
        return values[..., :columns]
    last, further = values[..., -1:], torch.arange(1, missing + 1, dtype=values.dtype, device=values.device)
    added = {"like": last + 0 * further, "more": last + further, "zero": 0 * (last + further)}[how]
    return torch.cat([values, added], dim=-1)


_CONTINUED = {
    "attention_mask": "like", "position_ids": "more", "token_type_ids": "like", "mm_token_type_ids": "zero"
}  # fmt: skip
"""Inputs with one column per token, and how :func:`continued` extends them."""


class Feed:
    """Runs the model over columns of the sequences; the caller rolls the cache back.

    Args:
        model: the generating model.
        sequences: sequences of the batch.
        kwargs: arguments of the model's forward pass over the prompt, as transformers prepares them.
    """

    def __init__(self, model: PreTrainedModel, sequences: Sequences, kwargs: Mapping[str, Any]) -> None:
        self._model, self._sequences = model, sequences
        self._kwargs = dict(kwargs)
        for name, how in _CONTINUED.items():
            if self._kwargs.get(name) is not None:
                self._kwargs[name] = continued(self._kwargs[name], sequences.most, how)
        self._keeps = "logits_to_keep" in self._kwargs

    def run(self, start: int, end: int, keep: int) -> Tensor:
        """Run the model over columns `start` to `end` - 1, after those in the cache.

        Returns:
            Logits of the last `keep` columns [B, keep, V], float32.
        """
        kwargs = dict(self._kwargs)
        for name in _CONTINUED:
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][..., :end]
        inputs = self._model.prepare_inputs_for_generation(
            self._sequences.ids_BS[:, :end], next_sequence_length=end - start, is_first_iteration=False, **kwargs
        )
        if self._keeps:
            inputs["logits_to_keep"] = keep
        logits: Tensor = self._model(**inputs, return_dict=True).logits[:, -keep:]
        return logits.float()
