"""A small suite of tasks that needs no network, made from texts that no predictor saw (row B18)."""

from __future__ import annotations

import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.links.base import InstantLink
from expertcast.runtime.offloading import offload
from expertcast.runtime.quality.policies import read_texts
from expertcast.runtime.simulation.trace import PREFILL, prefilled

# Texts

_BEGINS_WORD = ("Ġ", "▁")
"""How byte-level and SentencePiece vocabularies write the space before a word."""
_LETTERS = 3
"""Letters of a word at least."""


@dataclass(frozen=True, kw_only=True)
class Passages:
    """Texts that no predictor saw, tokenized.

    Raises:
        ExpertcastError: no texts.
    """

    tokenizer: PreTrainedTokenizerBase
    texts: Sequence[str]

    def __post_init__(self) -> None:
        if not self.texts:
            raise ExpertcastError("no texts to make tasks from: give held-out documents")

    @cached_property
    def lead(self) -> tuple[int, ...]:
        """What the tokenizer begins every text with, such as a token of its own."""
        return tuple(self.tokenizer("")["input_ids"])

    @cached_property
    def ids(self) -> list[list[int]]:
        """Of each text, without what the tokenizer adds."""
        return [self.encode(text) for text in self.texts]

    @cached_property
    def words(self) -> frozenset[int]:
        """Tokens that are a space and a word."""
        special = set(self.tokenizer.all_special_ids)
        tokens = self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokenizer))))
        return frozenset(
            number
            for number, token in enumerate(tokens)
            if token is not None and token.startswith(_BEGINS_WORD) and number not in special
            and token[1:].isascii() and token[1:].isalpha() and len(token) > _LETTERS
        )  # fmt: skip

    def encode(self, text: str) -> list[int]:
        """A text's tokens, without what the tokenizer adds."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def in_turn(self, length: int, choose: random.Random, what: str) -> Iterator[list[int]]:
        """Token ids of texts of at least `length` tokens, each as often as the others, in an order of `choose`'s.

        Raises:
            ExpertcastError: no text is that long; the line says `what` it was wanted for.
        """
        enough = [ids for ids in self.ids if len(ids) >= length]
        if not enough:
            raise ExpertcastError(f"{what}: no text has {length} tokens; give longer held-out documents")
        while True:
            yield from choose.sample(enough, len(enough))


# Questions
#
# R texts of S tokens read side by side, A of them asked for, V vocabulary. Log probabilities [R, S, V] hold at a
# token's place the distribution it was drawn from, that is what the model said after the token before it; NaN where
# nothing was decoded.


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


# Copying: repeat a passage to its end.

COPIED_LENGTH, ENDING = 24, 3
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
    texts = passages.in_turn(2 * COPIED_LENGTH, choose, "copying")
    for _ in range(count):
        ids = next(texts)
        start = choose.randrange(len(ids) - COPIED_LENGTH + 1)
        passage = ids[start : start + COPIED_LENGTH]
        other = (start + COPIED_LENGTH) % (len(ids) - COPIED_LENGTH + 1)
        before = passage if repeated else ids[other : other + COPIED_LENGTH]
        text = (*passages.lead, *before, *blank, *passage)
        question = Verbatim(first=len(text) - ENDING, ids=tuple(passage[-ENDING:]))
        items.append(Item(texts=(text,), questions=(question,)))
    return Task(name="copying" if repeated else "copying_control", items=items)


# Brackets: close round, square and curly brackets in the right order.

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


# Cloze: choose the next word from four of the same document.

WINDOW = 96
"""Tokens of a text; gaps lie in its second half."""
CLOZE_OPTIONS = 4
PER_TEXT = 5
_CLOZE_TRIES = 100


def cloze(passages: Passages, count: int, choose: random.Random) -> Task:
    """`count` gaps, up to five in a window of a text: the word that stands there, against three other words of the same
    text, each one token. `choose` draws."""
    items: list[Item] = []
    asked = 0
    for tries, ids in enumerate(passages.in_turn(WINDOW, choose, "cloze")):
        if asked >= count:
            break
        start = choose.randrange(len(ids) - WINDOW + 1)
        item = _cloze_item(passages, ids, start, min(PER_TEXT, count - asked), choose)
        if item is not None:
            items.append(item)
            asked += len(item.questions)
        elif tries > _CLOZE_TRIES + 10 * len(items):
            raise ExpertcastError("cloze: the texts hold too few words that are one token; give other documents")
    return Task(name="cloze", items=items)


def _cloze_item(passages: Passages, ids: list[int], start: int, most: int, choose: random.Random) -> Item | None:
    lead = passages.lead
    window = ids[start : start + WINDOW]
    places = [place for place in range(WINDOW // 2 + 1, WINDOW) if window[place] in passages.words]
    vocabulary = sorted(passages.words.intersection(ids))
    if not places or len(vocabulary) < CLOZE_OPTIONS:
        return None
    gaps = []
    for place in sorted(choose.sample(places, min(most, len(places)))):
        options = choose.sample([word for word in vocabulary if word != window[place]], CLOZE_OPTIONS - 1)
        answer = choose.randrange(CLOZE_OPTIONS)
        options.insert(answer, window[place])
        gaps.append(Gap(first=len(lead) + place, options=tuple(options), answer=answer))
    return Item(texts=((*lead, *window),), questions=tuple(gaps))


# Continuation: choose the passage that goes on from here from four of the same document.

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


# Scores: each text is read by a short prefill, then decode steps.
#
# R texts of an item, B texts read together, S tokens of a text, V vocabulary.

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
        tasks: such as :func:`make_tasks` makes.
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
