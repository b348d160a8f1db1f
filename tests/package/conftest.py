"""A tiny model in a folder and traces of it: commands on it take tenths of a second."""

from __future__ import annotations

from typing import Any

import pytest

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.cli import main
from expertcast.data.traces import TraceDataset
from tests.families.models import tiny_model

RUN = ("--window", "32", "--batch-size", "4")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, reference_tokenizer: Any) -> str:
    """4 layers of 8 experts, 2 per token."""
    folder = str(tmp_path_factory.mktemp("model"))
    tiny_model("qwen3_moe").save_pretrained(folder)
    reference_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_traces(tiny_folder: str, tmp_path_factory: pytest.TempPathFactory) -> TraceDataset:
    """500 tokens of the bundled text."""
    folder = tmp_path_factory.mktemp("plain") / "traces"
    collect = ["collect", tiny_folder, "--data", REFERENCE, "--tokens", "500", *RUN]
    assert main([*collect, "--out", str(folder)]) == 0
    return TraceDataset.open(folder)
