"""Multiple choice: which of four passages of the same document goes on from here."""

from __future__ import annotations

import random

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.quality.tasks.passages import Passages
from expertcast.runtime.quality.tasks.questions import Ending, Item, Task

CONTEXT, LENGTH = 32, 8
"""Tokens that are given, and of each option."""
OPTIONS = 4
_TRIES = 1000


def continuation(passages: Passages, count: int, choose: random.Random) -> Task:
    """`count` items: a piece of a text with what follows it, and with three other pieces of the same text that do not.
    All options begin with a word. `choose` draws.

    Raises:
        ExpertcastError: texts too short, or with too few words.
    """
    items: list[Item] = []
    texts = passages.in_turn(CONTEXT + LENGTH * (OPTIONS + 1), choose, "continuation")
    for tries, ids in enumerate(texts):
        if len(items) == count:
            break
        if tries > _TRIES + 10 * len(items):
            raise ExpertcastError("continuation: the texts hold too few words that are one token; give other documents")
        item = _item(passages, ids, choose)
        if item is not None:
            items.append(item)
    return Task(name="continuation", items=items)


def _item(passages: Passages, ids: list[int], choose: random.Random) -> Item | None:
    begins = [place for place in range(len(ids) - LENGTH + 1) if ids[place] in passages.words]
    starts = [place for place in begins if place >= CONTEXT]
    if not starts:
        return None
    place = choose.choice(starts)
    right = tuple(ids[place : place + LENGTH])
    pieces = {tuple(ids[other : other + LENGTH]) for other in begins if not -LENGTH < other - place < LENGTH}
    wrong = sorted(pieces - {right})
    if len(wrong) < OPTIONS - 1:
        return None
    endings = choose.sample(wrong, OPTIONS - 1)
    answer = choose.randrange(OPTIONS)
    endings.insert(answer, right)
    context = (*passages.lead, *ids[place - CONTEXT : place])
    ending = Ending(first=len(context), ids=tuple(endings), answer=answer)
    return Item(texts=tuple(context + each for each in endings), questions=(ending,))
