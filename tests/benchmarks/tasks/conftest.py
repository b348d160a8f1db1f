"""Texts that tasks are made from."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.tasks.suite import Task, make_tasks

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.data.text import load_documents


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Some of each domain of the bundled text."""
    return [document.text for document in load_documents(REFERENCE)[::20]]


@pytest.fixture(scope="session")
def tasks(reference_tokenizer: Any, texts: list[str]) -> dict[str, Task]:
    return {task.name: task for task in make_tasks(reference_tokenizer, texts, count=200)}
