"""Bracket matching: round, square and curly brackets are to be closed in the right order."""

from __future__ import annotations

import random

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.quality.tasks.passages import Passages
from expertcast.runtime.quality.tasks.questions import Gap, Gaps, Item, Task

PAIRS = {"(": ")", "[": "]", "{": "}"}
DEPTH = 3


def brackets(passages: Passages, count: int, choose: random.Random) -> Task:
    """`count` lines such as `x = [made, (river, {name`, three brackets deep; an item is right when each bracket's own
    closing one is the likeliest of the three. `choose` draws brackets and words.

    Raises:
        ExpertcastError: a closing bracket is not one token, or the tokenizer has no words of one token.
    """
    closing = {bracket: passages.encode(mark) for bracket, mark in PAIRS.items()}
    if any(len(ids) != 1 for ids in closing.values()) or not passages.words:
        raise ExpertcastError("brackets: the tokenizer has no tokens of their own for closing brackets and words")
    marks = list(PAIRS)
    options = tuple(closing[mark][0] for mark in marks)
    words = sorted(passages.words)
    items = []
    for _ in range(count):
        opened = [choose.choice(marks) for _ in range(DEPTH)]
        names = [passages.tokenizer.decode([choose.choice(words)]).strip() for _ in opened]
        line = ", ".join(mark + name for mark, name in zip(opened, names, strict=True))
        text = [*passages.lead, *passages.encode(f"x = {line}")]
        gaps = []
        for mark in reversed(opened):
            gaps.append(Gap(first=len(text), options=options, answer=marks.index(mark)))
            text.append(closing[mark][0])
        items.append(Item(texts=(tuple(text),), questions=(Gaps(gaps=tuple(gaps)),)))
    return Task(name="brackets", items=items)
