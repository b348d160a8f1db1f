"""How many of a task's questions a model gets right, read as a deployment reads: a short prefill, then decode steps.

R texts of an item, B texts read together, S tokens of a text, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.links.base import InstantLink
from expertcast.runtime.offloading import offload
from expertcast.runtime.quality.decoding import read_texts
from expertcast.runtime.quality.tasks.questions import Item, Task
from expertcast.runtime.simulation.trace import PREFILL, prefilled

TOGETHER = 16
"""Texts read together."""
_Z = 1.959963984540054
"""Of a normal distribution, 95% lie within so many standard deviations."""

Reader = Callable[[Tensor, int], Tensor]
"""Token ids [B, S] and the prefill's length to log probabilities [B, S - prefill + 1, V]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """What a run made of a task."""

    outcomes: tuple[bool, ...]
    """Of each question, in the task's order."""
    chance: float
    """Share that guessing gets right."""
    choice: bool
    """Decided by log-likelihood among options; else by exact match."""

    @property
    def score(self) -> float:
        """Share of right answers."""
        return sum(self.outcomes) / len(self.outcomes)

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of the share (Wilson's score interval)."""
        count, share = len(self.outcomes), self.score
        middle = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
        half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2)) / (1 + _Z**2 / count)
        return max(0.0, middle - half), min(1.0, middle + half)

    def as_dict(self, other: TaskScore | None = None) -> Json:
        """Plain values; with another run of the same task also how many answers it had right that this one has wrong
        (`lost`), and the reverse (`gained`)."""
        values: Json = {
            "score": self.score,
            "interval": list(self.interval),
            "right": sum(self.outcomes),
            "questions": len(self.outcomes),
            "chance": self.chance,
            "measure": "choice by log-likelihood" if self.choice else "exact match",
            "answers": "".join("01"[right] for right in self.outcomes),
        }
        if other is not None:
            pairs = list(zip(self.outcomes, other.outcomes, strict=True))
            values["lost"] = sum(was and not now for now, was in pairs)
            values["gained"] = sum(now and not was for now, was in pairs)
        return values


def measure_tasks(
    model: PreTrainedModel,
    tasks: Sequence[Task],
    config: OffloadConfig | None = None,
    *,
    prefill: int = PREFILL,
    together: int = TOGETHER,
    progress: Callable[[], None] | None = None,
) -> dict[str, TaskScore]:
    """Scores by task.

    No question is answered from a prefill: forecasts and policies that act in decode steps only would then cost
    nothing. A text's first half at most is read at once, the rest token by token.

    Args:
        model: the model, its experts in memory.
        tasks: such as :func:`expertcast.runtime.quality.tasks.make_tasks` makes.
        config: how it is offloaded; None: not at all. Where the link is left open, copies are made at once.
        prefill: tokens that are read at once; fewer where that is more than half of a text.
        together: texts decoded together, at least those of one item. What a lossy policy does depends on it: give 1.
        progress: called after each group of texts.

    Raises:
        ExpertcastError: a task without questions, or numbers below 1.
    """
    if prefill < 1 or together < 1:
        raise ExpertcastError(f"prefill={prefill}, together={together}: give 1 or more of both")
    if config is None:
        return _measured(tasks, partial(read_texts, model), prefill, together, progress)
    with offload(model, config, link=InstantLink() if config.link == "auto" else config.link):
        return _measured(tasks, partial(read_texts, model), prefill, together, progress)


def _measured(
    tasks: Sequence[Task], read: Reader, prefill: int, together: int, progress: Callable[[], None] | None
) -> dict[str, TaskScore]:
    return {task.name: score_task(task, read, prefill, together, progress) for task in tasks}


def score_task(
    task: Task, read: Reader, prefill: int, together: int, progress: Callable[[], None] | None = None
) -> TaskScore:
    """One task with whatever reads texts.

    Args:
        task: with a question or more.
        read: says what it expects after each token.
        prefill, together, progress: as for :func:`measure_tasks`.

    Raises:
        ExpertcastError: nothing is asked, or an answer would come from the prefill.
    """
    questions = task.questions
    if not questions:
        raise ExpertcastError(f"task {task.name!r} asks nothing: make it with a count of 1 or more")
    outcomes: dict[int, tuple[bool, ...]] = {}
    for numbers in _groups(task.items, together):
        items = [task.items[number] for number in numbers]
        ids_BS = torch.tensor([text for item in items for text in item.texts])
        length = ids_BS.shape[1]
        start = prefilled(length, prefill)
        if min(question.first for item in items for question in item.questions) <= start:
            raise ExpertcastError(f"task {task.name!r} asks about what a prefill reads: it would cost nothing there")
        read_BNV = read(ids_BS[:, :-1], start)  # nothing is asked about what follows the last token
        unread_BNV = read_BNV.new_full((len(ids_BS), start, read_BNV.shape[-1]), float("nan"))
        log_probs = torch.split(torch.cat([unread_BNV, read_BNV], dim=1), [len(item.texts) for item in items])
        for number, item, log_probs_RSV in zip(numbers, items, log_probs, strict=True):
            outcomes[number] = tuple(question.right(log_probs_RSV) for question in item.questions)
        if progress is not None:
            progress()
    return TaskScore(
        outcomes=tuple(itertools.chain.from_iterable(outcomes[number] for number in range(len(task.items)))),
        chance=sum(question.chance for question in questions) / len(questions),
        choice=all(question.choice for question in questions),
    )


def _groups(items: Sequence[Item], together: int) -> Iterator[list[int]]:
    """Numbers of items whose texts are of one length and number, as many as are read together."""
    alike: dict[tuple[int, int], list[int]] = {}
    for number, item in enumerate(items):
        alike.setdefault((len(item.texts), len(item.texts[0])), []).append(number)
    for (texts, _), numbers in alike.items():
        size = max(1, together // texts)
        yield from (numbers[start : start + size] for start in range(0, len(numbers), size))
