"""What is asked of a model, and when an answer is right.

R texts of S tokens read side by side, A of them asked for, V vocabulary. Log probabilities [R, S, V] hold at a token's
place the distribution it was drawn from, that is what the model said after the token before it; NaN where nothing was
decoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


class Question(ABC):
    """One thing that is right or wrong."""

    choice: ClassVar[bool] = True
    """Decided by log-likelihood among options; else by exact match."""
    first: int
    """Place of the first token whose distribution is looked at."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """Share of such questions that guessing gets right."""

    @abstractmethod
    def right(self, log_probs_RSV: Tensor) -> bool:
        """Whether a model that said this is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap(Question):
    """Which of some tokens stands at a place of the first text; the likeliest is the answer."""

    first: int
    options: tuple[int, ...]
    answer: int
    """Index of the right one."""

    @property
    def chance(self) -> float:
        return 1 / len(self.options)

    def right(self, log_probs_RSV: Tensor) -> bool:
        return int(log_probs_RSV[0, self.first, list(self.options)].argmax()) == self.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps(Question):
    """Several gaps of one text, right when all are."""

    gaps: tuple[Gap, ...]

    @property
    def first(self) -> int:  # type: ignore[override]
        return min(gap.first for gap in self.gaps)

    @property
    def chance(self) -> float:
        chance = 1.0
        for gap in self.gaps:
            chance *= gap.chance
        return chance

    def right(self, log_probs_RSV: Tensor) -> bool:
        return all(gap.right(log_probs_RSV) for gap in self.gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending(Question):
    """Which of the R texts goes on right from a place: the one whose tokens from there on have the largest sum of log
    probabilities. All are of one length, so that none has to be made up for."""

    first: int
    ids: tuple[tuple[int, ...], ...]
    """Of the R texts from the place on."""
    answer: int
    """Number of the right text."""

    @property
    def chance(self) -> float:
        return 1 / len(self.ids)

    def right(self, log_probs_RSV: Tensor) -> bool:
        ids_RA = torch.tensor(self.ids, device=log_probs_RSV.device)
        end = self.first + ids_RA.shape[1]
        sums_R = log_probs_RSV[:, self.first : end].gather(2, ids_RA.unsqueeze(-1)).squeeze(-1).double().sum(dim=1)
        return int(sums_R.argmax()) == self.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Verbatim(Question):
    """Whether greedy decoding writes exactly these tokens at a place of the first text.

    The right tokens are what is read: greedy decoding is the same run up to its first mistake, and one mistake decides.
    """

    choice: ClassVar[bool] = False
    first: int
    ids: tuple[int, ...]

    @property
    def chance(self) -> float:
        return 0.0

    def right(self, log_probs_RSV: Tensor) -> bool:
        wanted_A = torch.tensor(self.ids, device=log_probs_RSV.device)
        said_A = log_probs_RSV[0, self.first : self.first + len(self.ids)].argmax(dim=-1)
        return bool((said_A == wanted_A).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """R texts that are read together, and what is asked about them."""

    texts: tuple[tuple[int, ...], ...]
    """R texts of S token ids."""
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Items of one kind."""

    name: str
    items: Sequence[Item]

    @property
    def questions(self) -> list[Question]:
        """All of them, in order."""
        return [question for item in self.items for question in item.questions]
