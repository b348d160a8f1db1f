"""Checkpoints of a tiny model, for tests of what is done to their files."""

from __future__ import annotations

from pathlib import Path

import torch

from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.predictors import MoEView, predictor_class
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.predictors.hybrid import HybridConfig
from expertcast.predictors.linear import LinearConfig

RECALL = {"mean": 0.5, "per_layer": [0.25, 0.75, 0.5]}
SCORES = {"recall_at_k": {"linear": RECALL}, "targets": [1, 2, 3], "ahead": 1, "exact_set": {"linear": None}}
FURTHER = {
    **SCORES,
    "recall_at_k": {"linear": {"mean": 0.25, "per_layer": [0.25, 0.25]}},
    "targets": [2, 3],
    "ahead": 2,
}
METRICS = {"split": "test", **SCORES, "further": {"2": FURTHER}, "validation": {**SCORES, "further": {"2": FURTHER}}}
LEARNED = frozenset({"0123456789abcdef", "00000000000000ff"})
CONFIGS = {
    "linear": LinearConfig(),
    "estimator": EstimatorConfig(width=8),
    "hybrid": HybridConfig(
        candidates=["next_norm", "linear"],
        choices=[{"ahead": 1, "layer": 1 + at, "predictor": "linear", "recall": {"linear": 0.5}} for at in range(3)],
        member_configs={"next_norm": {"ahead": [1]}, "linear": LinearConfig().as_dict()},
        cost_ms={"next_norm": 0.1, "linear": 0.2},
    ),
}
"""The configurations that hold something."""


def write(name: str, view: MoEView, folder: Path) -> Path:
    """A checkpoint of random tensors."""
    torch.manual_seed(0)
    predictor = predictor_class(name)(CONFIGS[name], view.shape)
    for tensor in predictor.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape))
    predictor.learned_from = LEARNED
    save_predictor(predictor, folder, view=view, metrics=METRICS, training={"tokens": 3})
    return folder
