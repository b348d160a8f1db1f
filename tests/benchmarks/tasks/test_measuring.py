"""Tasks are scored as they are meant to be: by stand-ins that are always right, always wrong, late or guessing, and by
the bundled model, resident and offloaded."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks.tasks.suite import (
    Ending,
    Gap,
    Gaps,
    Item,
    Question,
    Task,
    TaskScore,
    Verbatim,
    measure_tasks,
    score_task,
)
from transformers import PreTrainedModel

from expertcast.predictors import ExpertcastError, MoEView, predictor_class
from expertcast.runtime import OffloadConfig
from expertcast.runtime.policies import Policies
from tests.benchmarks.tasks.readers import knowing

Tasks = dict[str, Task]
NAMES = ("cloze", "continuation", "copying", "brackets")


def part(task: Task, items: int) -> Task:
    return replace(task, items=task.items[:items])


@pytest.mark.parametrize("name", NAMES)
def test_who_is_always_right_or_wrong(tasks: Tasks, name: str) -> None:
    task = part(tasks[name], 40)
    assert score_task(task, knowing(task.items), 64, 16).score == 1.0
    assert score_task(task, knowing(task.items, right=False), 64, 16).score == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_a_distribution_belongs_to_its_own_place(tasks: Tasks, name: str) -> None:
    """Who says each token one place too late is not right."""
    task = part(tasks[name], 40)
    assert score_task(task, knowing(task.items, late=1), 64, 16).score < 0.6


def shuffled(question: Question, choose: random.Random) -> Question:
    """The same with a label that is drawn."""
    if isinstance(question, Gaps):
        return replace(question, gaps=tuple(shuffled(gap, choose) for gap in question.gaps))  # type: ignore[misc]
    if isinstance(question, Gap):
        return replace(question, answer=choose.randrange(len(question.options)))
    assert isinstance(question, Ending)
    return replace(question, answer=choose.randrange(len(question.ids)))


@pytest.mark.parametrize("name", ["cloze", "continuation", "brackets"])
def test_labels_that_mean_nothing_give_chance(tasks: Tasks, name: str) -> None:
    task, choose = tasks[name], random.Random(3)
    items = [replace(i, questions=tuple(shuffled(each, choose) for each in i.questions)) for i in task.items]
    score = score_task(replace(task, items=items), knowing(task.items), 64, 16)
    low, high = score.interval
    assert low < score.chance < high
    assert high < 0.4


def test_answers_keep_the_order_of_the_questions() -> None:
    """Texts of other lengths are read in other groups."""
    items, wanted = [], []
    for number in range(20):
        text = tuple(range(10 + number % 3))
        right = number % 4 == 0
        gap = Gap(first=8, options=(8, 5), answer=0 if right else 1)
        items.append(Item(texts=(text,), questions=(gap, Verbatim(first=8, ids=(8, 9)))))
        wanted += [right, True]
    task = Task(name="made", items=items)
    score = score_task(task, knowing(items), 4, 3)
    assert list(score.outcomes) == wanted
    assert not score.choice
    assert score.chance == pytest.approx(0.25)


def test_all_gaps_and_all_tokens_must_be_right() -> None:
    text = tuple(range(10))
    read = knowing([Item(texts=(text,), questions=())])
    gaps = [Gap(first=place, options=(place, 3), answer=0) for place in (7, 8)]
    wrong = replace(gaps[0], answer=1)
    for first in (gaps[0], wrong):
        item = Item(texts=(text,), questions=(Gaps(gaps=(first, gaps[1])),))
        assert score_task(Task(name="made", items=[item]), read, 4, 1).outcomes == (first is not wrong,)
    for ids, right in (((7, 8, 9), True), ((7, 8, 3), False), ((3, 8, 9), False)):
        item = Item(texts=(text,), questions=(Verbatim(first=7, ids=ids),))
        assert score_task(Task(name="made", items=[item]), read, 4, 1).outcomes == (right,)


def test_the_longest_sum_wins_over_the_likeliest_token() -> None:
    """An ending is its whole self, not its first or its best token."""
    first, other = (0, 0, 0, 0, 1, 1, 1), (0, 0, 0, 0, 2, 2, 2)
    log_probs = torch.full((2, 7, 3), float("nan"))
    log_probs[0, 4:, 1] = torch.tensor([-0.1, -0.1, -9.0])
    log_probs[1, 4:, 2] = torch.tensor([-2.0, -2.0, -2.0])
    ending = Ending(first=4, ids=(first[4:], other[4:]), answer=1)
    assert ending.right(log_probs)
    assert not replace(ending, answer=0).right(log_probs)


def test_nothing_is_asked_of_a_prefill(tasks: Tasks) -> None:
    text = tuple(range(10))
    item = Item(texts=(text,), questions=(Gap(first=5, options=(5, 1), answer=0),))
    with pytest.raises(ExpertcastError, match="asks about what a prefill reads"):
        score_task(Task(name="made", items=[item]), knowing([item]), 64, 1)
    assert score_task(Task(name="made", items=[item]), knowing([item]), 4, 1).score == 1.0
    for task in tasks.values():
        for item in task.items:
            assert min(question.first for question in item.questions) > len(item.texts[0]) // 2
    with pytest.raises(ExpertcastError, match="asks nothing"):
        score_task(Task(name="made", items=[]), knowing([]), 4, 1)


@pytest.mark.parametrize(("right", "of"), [(0, 10), (8, 10), (139, 200), (200, 200)])
def test_interval_is_wilsons(right: int, of: int) -> None:
    """Its ends p solve (share - p)^2 = z^2 p (1 - p) / n."""
    score = TaskScore(outcomes=(True,) * right + (False,) * (of - right), chance=0.25, choice=True)
    low, high = score.interval
    for end in (low, high):
        assert (score.score - end) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / of, abs=1e-6)
    assert low <= score.score <= high
    assert 0 < high - low < 1.96 / math.sqrt(of) + 0.1


def test_compared_question_by_question() -> None:
    one, other = ((True, True, False, False), (True, False, True, False))
    scores = [TaskScore(outcomes=each, chance=0.25, choice=True) for each in (one, other)]
    values = scores[0].as_dict(scores[1])
    assert (values["lost"], values["gained"], values["right"], values["answers"]) == (1, 1, 2, "1100")


@pytest.fixture(scope="module")
def few(tasks: Tasks) -> list[Task]:
    return [part(tasks["cloze"], 6), part(tasks["brackets"], 8)]


@pytest.fixture(scope="module")
def resident(reference_model: PreTrainedModel, few: list[Task]) -> dict[str, TaskScore]:
    return measure_tasks(reference_model, few)


def test_the_bundled_model_resident_and_on_demand(
    reference_model: PreTrainedModel, few: list[Task], resident: dict[str, TaskScore]
) -> None:
    """Above chance where it says so, and the same answers with its experts loaded on demand."""
    assert resident["cloze"].interval[0] > resident["cloze"].chance
    on_demand = measure_tasks(reference_model, few, OffloadConfig(policies=Policies(prefetch="none")))
    assert on_demand == resident


def test_what_is_executed_decides(
    reference_model: PreTrainedModel, reference_view: MoEView, few: list[Task], resident: dict[str, TaskScore]
) -> None:
    """Executing forecasts that know nothing costs answers, although nothing is executed in prefills."""
    cls = predictor_class("frequency")
    guess = cls(cls.config_class(), reference_view.shape).bind(reference_view)
    executed = measure_tasks(reference_model, few[:1], OffloadConfig(predictor=guess, mode="speculate"))["cloze"]
    assert executed.score < resident["cloze"].score
    assert executed.as_dict(resident["cloze"])["lost"] > 0


def test_bad_numbers(reference_model: PreTrainedModel) -> None:
    kwargs: dict[str, Any]
    for kwargs in ({"prefill": 0}, {"together": 0}):
        with pytest.raises(ExpertcastError, match="give 1 or more of both"):
            measure_tasks(reference_model, [], **kwargs)
