"""Traces of a tiny model: fitting on them takes tenths of a second."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from expertcast.data.collect import collect
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from tests.families.models import tiny_model


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    """4 layers of 8 experts, 2 per token, bf16."""
    return tiny_model("qwen3_moe")


@pytest.fixture(scope="session")
def traces(model: PreTrainedModel, reference_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> TraceDataset:
    """4,000 tokens of the bundled text."""
    folder = tmp_path_factory.mktemp("tiny") / "traces"
    documents = load_documents("reference")
    return collect(model, reference_tokenizer, documents, folder, tokens=4000, window=128)
