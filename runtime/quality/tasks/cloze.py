"""Cloze: which of four words of the same document comes next."""

from __future__ import annotations

import random

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.quality.tasks.passages import Passages
from expertcast.runtime.quality.tasks.questions import Gap, Item, Task

WINDOW = 96
"""Tokens of a text; gaps lie in its second half."""
OPTIONS = 4
PER_TEXT = 5
_TRIES = 100


def cloze(passages: Passages, count: int, choose: random.Random) -> Task:
    """`count` gaps, up to five in a window of a text: the word that stands there, against three other words of the same
    text, each one token. `choose` draws."""
    items: list[Item] = []
    asked = 0
    for tries, ids in enumerate(passages.in_turn(WINDOW, choose, "cloze")):
        if asked >= count:
            break
        start = choose.randrange(len(ids) - WINDOW + 1)
        item = _item(passages, ids, start, min(PER_TEXT, count - asked), choose)
        if item is not None:
            items.append(item)
            asked += len(item.questions)
        elif tries > _TRIES + 10 * len(items):
            raise ExpertcastError("cloze: the texts hold too few words that are one token; give other documents")
    return Task(name="cloze", items=items)


def _item(passages: Passages, ids: list[int], start: int, most: int, choose: random.Random) -> Item | None:
    lead = passages.lead
    window = ids[start : start + WINDOW]
    places = [place for place in range(WINDOW // 2 + 1, WINDOW) if window[place] in passages.words]
    vocabulary = sorted(passages.words.intersection(ids))
    if not places or len(vocabulary) < OPTIONS:
        return None
    gaps = []
    for place in sorted(choose.sample(places, min(most, len(places)))):
        options = choose.sample([word for word in vocabulary if word != window[place]], OPTIONS - 1)
        answer = choose.randrange(OPTIONS)
        options.insert(answer, window[place])
        gaps.append(Gap(first=len(lead) + place, options=tuple(options), answer=answer))
    return Item(texts=((*lead, *window),), questions=tuple(gaps))
