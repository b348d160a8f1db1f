"""Small traces: as collected, and a copy to damage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from expertcast.data.collect import collect
from expertcast.data.text import load_documents
from tests.data.small_traces import SETTINGS, content


@pytest.fixture(scope="module")
def collected(
    reference_model: PreTrainedModel, reference_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("files") / "traces"
    return collect(reference_model, reference_tokenizer, load_documents("reference"), folder, **SETTINGS).folder


@pytest.fixture
def traces(collected: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(collected, tmp_path / "traces"))


@pytest.fixture(scope="module")
def expected(collected: Path) -> list[Any]:
    return content(collected)
