"""What the tasks ask: right labels, held-out texts, the same items for the same seed."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from benchmarks.tasks.suite import COPIED_LENGTH as LENGTH
from benchmarks.tasks.suite import (
    ENDING,
    PAIRS,
    TASKS,
    Ending,
    Gap,
    Gaps,
    Passages,
    Task,
    Verbatim,
    copying,
    make_tasks,
)

from expertcast.predictors import ExpertcastError


def test_same_seed_same_items(reference_tokenizer: Any, texts: list[str]) -> None:
    again = make_tasks(reference_tokenizer, texts, names=["copying", "cloze"], count=20)
    assert again == make_tasks(reference_tokenizer, texts, names=["copying", "cloze"], count=20)
    (alone,) = make_tasks(reference_tokenizer, texts, names=["cloze"], count=20)
    assert alone == again[1], "what a task draws depends on which others there are"
    others = make_tasks(reference_tokenizer, texts, names=["copying", "cloze"], count=20, seed=1)
    for task, other in zip(again, others, strict=True):
        assert task.items != other.items


def test_as_many_questions_as_asked_for(tasks: dict[str, Task]) -> None:
    assert list(tasks) == list(TASKS)
    assert all(len(task.questions) == 200 for task in tasks.values())
    for task in tasks.values():
        for item in task.items:
            assert len({len(text) for text in item.texts}) == 1


def test_cloze_asks_for_the_word_that_stands_there(
    tasks: dict[str, Task], reference_tokenizer: Any, texts: list[str]
) -> None:
    for item in tasks["cloze"].items:
        (text,) = item.texts
        written = reference_tokenizer.decode(text[1:-1])
        assert any(written in each for each in texts), "no passage of the texts"
        for gap in item.questions:
            assert isinstance(gap, Gap)
            assert gap.options[gap.answer] == text[gap.first]
            assert len(set(gap.options)) == 4
            assert all(reference_tokenizer.decode([word])[1:].isalpha() for word in gap.options)


def test_continuation_has_one_right_ending(tasks: dict[str, Task], reference_tokenizer: Any, texts: list[str]) -> None:
    ids = Passages(tokenizer=reference_tokenizer, texts=texts).ids
    whole = [" ".join(map(str, each)) for each in ids]
    for item in tasks["continuation"].items:
        (ending,) = item.questions
        assert isinstance(ending, Ending)
        assert ending.ids == tuple(text[ending.first :] for text in item.texts)
        found = [any(" ".join(map(str, text)) in each for each in whole) for text in item.texts]
        assert found[ending.answer]
        assert found.count(True) == 1, "a wrong ending is right too"


def test_answers_are_in_no_favoured_place(tasks: dict[str, Task]) -> None:
    for name in ("cloze", "continuation"):
        counts = Counter(question.answer for question in tasks[name].questions)  # type: ignore[attr-defined]
        assert set(counts) == {0, 1, 2, 3}
        assert max(counts.values()) < 80


def test_copying_repeats_and_its_control_does_not(reference_tokenizer: Any, texts: list[str]) -> None:
    passages = Passages(tokenizer=reference_tokenizer, texts=texts)
    for repeated in (True, False):
        for item in copying(passages, 30, random.Random(0), repeated=repeated).items:
            (text,), (question,) = item.texts, item.questions
            assert isinstance(question, Verbatim)
            assert text[question.first :] == question.ids
            assert len(question.ids) == ENDING
            assert (text[:LENGTH] == text[-LENGTH:]) == repeated


def test_brackets_close_what_was_opened(tasks: dict[str, Task], reference_tokenizer: Any) -> None:
    for item in tasks["brackets"].items:
        (text,), (gaps,) = item.texts, item.questions
        assert isinstance(gaps, Gaps)
        opened: list[str] = []
        for mark in reference_tokenizer.decode(text):
            if mark in PAIRS:
                opened.append(mark)
            elif mark in PAIRS.values():
                assert PAIRS[opened.pop()] == mark
        assert not opened
        assert [gap.options[gap.answer] for gap in gaps.gaps] == list(text[-3:])
        assert gaps.chance == pytest.approx(1 / 27)


def test_bad_requests_are_named(reference_tokenizer: Any) -> None:
    with pytest.raises(ExpertcastError, match="unknown task 'poem': choose from cloze"):
        make_tasks(reference_tokenizer, ["text"], names=["poem"])
    with pytest.raises(ExpertcastError, match="count=0"):
        make_tasks(reference_tokenizer, ["text"], count=0)
    with pytest.raises(ExpertcastError, match="no texts"):
        make_tasks(reference_tokenizer, [])
    for name in ("cloze", "continuation", "copying"):
        with pytest.raises(ExpertcastError, match=f"{name}: no text has"):
            make_tasks(reference_tokenizer, ["too short"], names=[name])
    for name in ("cloze", "continuation"):
        with pytest.raises(ExpertcastError, match=f"{name}: the texts hold too few words"):
            make_tasks(reference_tokenizer, ["1 2 3 4 5 6 7 8 9 " * 40], names=[name])
