"""What a generation gives back beside its ids, as transformers' `generate` has it.

B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput


class Outputs:
    """Keeps scores and logits where they were asked for.

    Args:
        config: which asks.
        batch: B
    """

    def __init__(self, config: GenerationConfig, batch: int) -> None:
        self._config = config
        self._scores: list[list[Tensor]] = [[] for _ in range(batch)]
        self._logits: list[list[Tensor]] = [[] for _ in range(batch)]

    def keep(self, row: int, logits_V: Tensor, scores_V: Tensor) -> None:
        """A token of a row was settled, by these logits and what processors made of them."""
        if self._config.return_dict_in_generate:
            if self._config.output_logits:
                self._logits[row].append(logits_V)
            if self._config.output_scores:
                self._scores[row].append(scores_V)

    def result(self, ids_BS: Tensor, cache: Cache) -> Tensor | GenerateDecoderOnlyOutput:
        """The ids alone, or with what was asked for."""
        config = self._config
        if not config.return_dict_in_generate:
            return ids_BS
        return GenerateDecoderOnlyOutput(
            sequences=ids_BS,
            scores=_steps(self._scores) if config.output_scores else None,
            logits=_steps(self._logits) if config.output_logits else None,
            past_key_values=cache,
        )


def _steps(rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """By step, [B, V]; rows that ended before have zeros."""
    most = max(map(len, rows), default=0)
    return tuple(
        torch.stack([row[step] if step < len(row) else torch.zeros_like(rows[0][0]) for row in rows])
        for step in range(most)
    )
