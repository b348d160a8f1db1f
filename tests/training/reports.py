"""What reports are written of in tests: scores of four predictors on a tiny random model, and further numbers."""

from __future__ import annotations

from typing import Any

from expertcast.predictors.base import PredictorConfig
from expertcast.predictors.baselines import RouterInput
from expertcast.training.evaluation import evaluate
from tests.training.synthetic import Before, Oracle, Same, random_batch, tiny_view

CURVE = {"linear": {"20000": 0.85, "400000": 0.9}, "estimator": {20000: 0.86, 50000: 0.9}}
QUALITY: dict[str, Any] = {
    "runs": {
        "exact": {"perplexity": 20.125, "top1_agreement": 1.0, "kl": 0.0, "domains": {"code": {"perplexity": 9.0}}},
        "speculate estimator": {"perplexity": 21.0, "top1_agreement": 0.93, "kl": 0.02, "domains": {}},
    }
}
PROVENANCE = {"command": "expertcast eval <traces>", "versions": {"torch": "2.13.0"}}


def evaluated() -> dict[str, Any]:
    """An evaluation's values, of 60 tokens, one layer ahead; `router_input` also two."""
    view = tiny_view()
    batch = random_batch(view, 60)
    predictors = {
        "router_input": RouterInput(PredictorConfig(), view.shape),
        "same": Same(PredictorConfig(), view.shape),
        "before": Before(PredictorConfig(), view.shape),
        "oracle": Oracle(batch, view.shape),
    }
    for predictor in predictors.values():
        predictor.bind(view)
    two = {"router_input": RouterInput(PredictorConfig(ahead=(1, 2)), view.shape).bind(view)}
    further = {"2": evaluate(two, [batch], view, ahead=2).as_dict()}
    return {**evaluate(predictors, [batch], view).as_dict(), "further": further}


def examples_of(values: dict[str, Any]) -> dict[str, Any]:
    """Two passages of an evaluation's shape: one with text, one of which only token ids are known."""
    found = {name: [[layer % 2, 2, 0] for layer in values["targets"]] for name in values["recall_at_k"]}
    passage = {"document": 7, "domain": "code", "token_ids": [5, 6, 7], "text": ["if ", "<b>", "&\n"], "found": found}
    return {"passages": [passage, {**passage, "document": 8, "domain": "", "text": None}], "note": "no tokenizer"}
