"""Which tasks there are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.quality.tasks.brackets import brackets
from expertcast.runtime.quality.tasks.cloze import cloze
from expertcast.runtime.quality.tasks.continuation import continuation
from expertcast.runtime.quality.tasks.copying import copying
from expertcast.runtime.quality.tasks.passages import Passages
from expertcast.runtime.quality.tasks.questions import Task

TASKS: dict[str, Callable[[Passages, int, random.Random], Task]] = {
    "cloze": cloze,
    "continuation": continuation,
    "copying": copying,
    "brackets": brackets,
}
"""By name, in the order of tables."""


def make_tasks(
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    *,
    names: Sequence[str] = tuple(TASKS),
    count: int = 200,
    seed: int = 0,
) -> list[Task]:
    """The suite, the same for the same arguments.

    Args:
        tokenizer: the model's.
        texts: held-out documents: neither the model nor any predictor may have seen them.
        names: of the tasks.
        count: questions of each.
        seed: what is drawn; each task's own draws do not depend on which others there are.

    Raises:
        ExpertcastError: an unknown task, a count below 1, or texts that a task cannot be made from.
    """
    if count < 1:
        raise ExpertcastError(f"count={count}: give 1 question or more")
    for name in names:
        if name not in TASKS:
            raise ExpertcastError(f"unknown task {name!r}: choose from {', '.join(TASKS)}")
    passages = Passages(tokenizer=tokenizer, texts=list(texts))
    return [TASKS[name](passages, count, random.Random(f"{seed} {name}")) for name in names]
