"""Fixtures shared by every folder: the reference model and traces of it, collected once per session."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers: tests must not wait for a hub
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: threads of tiny operations only wait for each other

from typing import Any

import pytest
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.data.collect import collect
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors import names
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.predictors.view import MoEView
from expertcast.training.fit import fit_many
from expertcast.training.scoring import Fitted

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it, and so would children
tqdm.monitor_interval = 0  # no thread of its own: tests count threads
os.getloadavg = lambda: (0.0, 0.0, 0.0)  # commands warn of a busy machine, and tests make it one
REFERENCE_TOKENS = 4_000


@pytest.fixture(scope="session")
def reference_model() -> PreTrainedModel:
    """The bundled model, bf16. Shared: a test that changes it must put it back."""
    return load_model(REFERENCE)


@pytest.fixture(scope="session")
def reference_tokenizer() -> Any:
    return load_tokenizer(REFERENCE)


@pytest.fixture(scope="session")
def reference_view(reference_model: PreTrainedModel) -> MoEView:
    return find_moe_layers(reference_model)


@pytest.fixture(scope="session")
def reference_traces(
    reference_model: PreTrainedModel, reference_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> TraceDataset:
    """About 4k tokens of the bundled text, split 80/10/10 by document."""
    folder = tmp_path_factory.mktemp("reference") / "traces"
    with torch.random.fork_rng():
        return collect(reference_model, reference_tokenizer, load_documents(REFERENCE), folder, tokens=REFERENCE_TOKENS)


@pytest.fixture(scope="session")
def fitted_predictors(reference_traces: TraceDataset) -> dict[str, Fitted]:
    """Every registered predictor fitted on the reference traces with its report, the estimator by a short training."""
    configs = {"estimator": EstimatorConfig(width=16, steps=120, step_tokens=256)}
    return fit_many(names(), reference_traces, configs)
