"""Proposers at work on a batch: one for each row, over its text without padding.

B sequences, V vocabulary, m proposed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from expertcast.runtime.drafts.proposals import Proposer
from expertcast.runtime.drafts.texts import Texts


class RowProposers:
    """What one draft proposes for all rows.

    Args:
        proposers: one for each row.
        texts: the rows.
        first_B: each row's first column that is no padding.
    """

    def __init__(self, proposers: list[Proposer], texts: Texts, first_B: list[int]) -> None:
        self._proposers, self._texts, self._first_B = proposers, texts, first_B
        self._seen_B = list(first_B)
        """Columns of which each row's proposer has seen the hidden states."""

    def saw(self, begin: int, hidden_BTD: Tensor) -> None:
        """Show each proposer what it has not seen of its row's tokens that stand.

        Args:
            begin: the first column that was fed.
            hidden_BTD: the model's last hidden states [B, T, D] from there on.
        """
        for row, proposer in enumerate(self._proposers):
            start, end = self._seen_B[row], min(self._texts.known[row] - 1, begin + hidden_BTD.shape[1])
            if start < end:
                proposer.saw(hidden_BTD[row : row + 1, start - begin : end - begin])
                self._seen_B[row] = end

    def propose(self, most: int) -> tuple[int, Tensor | None]:
        """Put proposals behind the columns that are settled in all rows.

        Returns:
            Columns of the longest proposal, and the processed logits [B, m, V] that they were drawn from, if they were.
        """
        texts, settled = self._texts, self._texts.common
        found: dict[int, tuple[Tensor, Tensor | None]] = {}
        for row in texts.open:
            known = min(texts.known[row], settled + most)
            further = settled + most - known
            if further:
                text_1S = texts.ids_BS[row : row + 1, self._first_B[row] : known]
                found[row] = self._proposers[row].propose(text_1S, further)
                ids_1m = found[row][0]
                texts.ids_BS[row, known : known + ids_1m.shape[1]] = ids_1m[0]
        ends = [min(texts.known[row], settled + most) + ids.shape[1] for row, (ids, _) in found.items()]
        count = max([settled, *ends]) - settled
        drawn = {row: logits for row, (_, logits) in found.items() if logits is not None}
        if not drawn or not count:
            return count, None
        vocabulary = next(iter(drawn.values())).shape[-1]
        # what was not drawn from anything could have been nothing else
        logits_BmV = torch.full((len(texts.known), count, vocabulary), float("-inf"), device=texts.ids_BS.device)
        logits_BmV.scatter_(2, texts.ids_BS[:, settled : settled + count, None], 0.0)
        for row, logits_1mV in drawn.items():
            start = texts.known[row] - settled
            logits_BmV[row, start : start + logits_1mV.shape[1]] = logits_1mV[0].float()
        return count, logits_BmV
