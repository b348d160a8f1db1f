"""The texts of a batch while they are generated: each row as far as it is known, all rows in the same columns.

Rows get ahead of each other, for a draft is accepted further in one than in another. Columns stay those of the cache,
which all rows share: what a row knows beyond them is fed again as given text until the others have caught up.

B sequences. A column is a token's place in its row, padding on the left included.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import StoppingCriteriaList


class Texts:
    """Rows of ids and how far each is known.

    Args:
        prompt_BS: [B, S] ids.
        most: columns at the end, more than S.
        pad: what follows a row that has ended.
    """

    def __init__(self, prompt_BS: Tensor, most: int, pad: int) -> None:
        batch, self.prompt = prompt_BS.shape
        self.ids_BS = prompt_BS.new_full((batch, most), pad)
        """All columns; what is not known of a row may be a draft."""
        self.ids_BS[:, : self.prompt] = prompt_BS
        self.most = most
        self.known = [self.prompt] * batch
        """Columns of each row that are settled."""
        self.ended = [False] * batch
        self._pad = pad

    @property
    def open(self) -> list[int]:
        """Rows that go on."""
        return [row for row, ended in enumerate(self.ended) if not ended]

    @property
    def common(self) -> int:
        """Columns that are known of every row that goes on."""
        return min(self.known[row] for row in self.open)

    @property
    def longest(self) -> int:
        """Columns of the longest row."""
        return max(self.known)

    def draft(self, column: int, token_B: Tensor) -> None:
        """Put drafted tokens [B] into a column, in rows that do not know it."""
        for row in self.open:
            if self.known[row] <= column:
                self.ids_BS[row, column] = token_B[row]

    def take(
        self, token_BN: Tensor, count_B: list[int], stops: StoppingCriteriaList, scores: object = None
    ) -> list[int]:
        """Settle each row's next tokens, as far as its text goes on.

        Args:
            token_BN: each row's next tokens.
            count_B: how many of them there are.
            stops: asked after every token, as in decoding one by one.
            scores: handed on to them.

        Returns:
            How many tokens each row got.
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
            done = stops(self.ids_BS[:, : column + 1], scores)
            for row in rows:
                if done[row] or column + 1 == self.most:
                    self.ended[row], self.known[row] = True, column + 1
                    self.ids_BS[row, column + 1 :] = self._pad
        return [now - then for now, then in zip(self.known, before, strict=True)]

    def start_B(self, column: int) -> list[int]:
        """Per row, how many columns from that one on are known; of a row that has ended, all there are."""
        return [self.most if ended else known - column for known, ended in zip(self.known, self.ended, strict=True)]

    def result(self) -> Tensor:
        """[B, longest] ids."""
        return self.ids_BS[:, : self.longest].clone()


def continued(values: Tensor, columns: int, how: str) -> Tensor:
    """A prompt's mask, positions or token types [..., S] for so many columns: further ones are `like` the last, one
    `more` than the one before, or `zero`."""
    missing = columns - values.shape[-1]
    if missing <= 0:
        return values[..., :columns]
    last, further = values[..., -1:], torch.arange(1, missing + 1, dtype=values.dtype, device=values.device)
    added = {"like": last + 0 * further, "more": last + further, "zero": 0 * (last + further)}[how]
    return torch.cat([values, added], dim=-1)
