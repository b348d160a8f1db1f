"""Small traces: as collected, and a copy to damage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from expertcast.data.collect import collect
from expertcast.data.text import Document, load_documents
from expertcast.data.traces import TraceDataset
from tests.data.small_traces import MANY, SETTINGS, content
from tests.families.models import tiny_model


@pytest.fixture(scope="session")
def small_model() -> PreTrainedModel:
    return tiny_model("qwen2_moe")


@pytest.fixture(scope="session")
def text() -> list[Document]:
    return load_documents("reference")[:200]


@pytest.fixture(scope="session")
def dataset(
    small_model: PreTrainedModel, reference_tokenizer: Any, text: list[Document],
    tmp_path_factory: pytest.TempPathFactory,
) -> TraceDataset:  # fmt: skip
    """Some thousand tokens in one shard."""
    return collect(small_model, reference_tokenizer, text, tmp_path_factory.mktemp("data") / "traces", **MANY)


@pytest.fixture(scope="module")
def collected(
    small_model: PreTrainedModel, reference_tokenizer: Any, text: list[Document],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:  # fmt: skip
    folder = tmp_path_factory.mktemp("files") / "traces"
    return collect(small_model, reference_tokenizer, text, folder, **SETTINGS).folder


@pytest.fixture
def traces(collected: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(collected, tmp_path / "traces"))


@pytest.fixture(scope="module")
def expected(collected: Path) -> list[Any]:
    return content(collected)
