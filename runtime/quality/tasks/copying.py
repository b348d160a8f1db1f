"""Copying: a passage that is being repeated is to be repeated to its end."""

from __future__ import annotations

import random

from expertcast.runtime.quality.tasks.passages import Passages
from expertcast.runtime.quality.tasks.questions import Item, Task, Verbatim

LENGTH, ENDING = 24, 3
"""Tokens of a passage, and how many of its last ones are asked for."""


def copying(passages: Passages, count: int, choose: random.Random, *, repeated: bool = True) -> Task:
    """`count` passages, each followed by itself up to its last tokens, which are to be decoded exactly.

    Args:
        passages: where they come from.
        count: how many.
        choose: draws them.
        repeated: False puts another passage of the same text before each: what remains is what the model writes
            without anything to copy.
    """
    blank = passages.encode("\n\n")
    items = []
    texts = passages.in_turn(2 * LENGTH, choose, "copying")
    for _ in range(count):
        ids = next(texts)
        start = choose.randrange(len(ids) - LENGTH + 1)
        passage = ids[start : start + LENGTH]
        other = (start + LENGTH) % (len(ids) - LENGTH + 1)
        before = passage if repeated else ids[other : other + LENGTH]
        text = (*passages.lead, *before, *blank, *passage)
        question = Verbatim(first=len(text) - ENDING, ids=tuple(passage[-ENDING:]))
        items.append(Item(texts=(text,), questions=(question,)))
    return Task(name="copying" if repeated else "copying_control", items=items)
