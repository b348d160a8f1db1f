"""What running a model otherwise costs it: forecasts executed in place of its routing, and lossy policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from expertcast.commands.options import Count, Option
from expertcast.commands.output import say
from expertcast.commands.shared import Data, ModelOptions
from expertcast.data.discovery import find_moe_layers
from expertcast.data.models import REFERENCE, load_model, load_tokenizer
from expertcast.data.text import Document, load_documents
from expertcast.predictors import ExpertcastError, Predictor
from expertcast.predictors.plain import Json, aligned
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.quality.forecasts import QualityRun, measure_quality, text_windows
from expertcast.runtime.quality.policies import measure_policies

FORECAST_WINDOW = 256
"""Tokens per window when forecasts are executed: a window is one forward."""
POLICY_WINDOW = 128
"""Tokens per window when policies are at work: they are decoded one after another."""


@dataclass(frozen=True, kw_only=True)
class QualityOptions(ModelOptions):
    """The model whose quality is measured, and the text."""

    model: Annotated[str | None, Option(metavar="MODEL")] = None
    """Also measure what speculative execution costs this model."""
    data: Data = ()
    """Text for --model."""
    quality_tokens: Count = 8192
    """Tokens for --model."""

    def check_text(self) -> None:
        """
        Raises:
            ExpertcastError: a model without text; the bundled one brings its own.
        """
        if self.model and not self.data and self.model != REFERENCE:
            raise ExpertcastError("--model needs text to run on: give --data")

    def documents(self) -> list[Document]:
        """The text that the model is run on."""
        return load_documents(self.data or REFERENCE)


def forecast_quality(options: QualityOptions, name: str, predictors: dict[str, Predictor], evaluation: Json) -> Json:
    """What executing forecasts costs a model, per domain, as :func:`measure_quality` has it.

    Each predictor is executed at all layers, and the best one also at the layers where it is right often (`hybrid`).

    Args:
        options: what text, and how much of it.
        name: the model's.
        predictors: that were evaluated, by name.
        evaluation: the result of that.
    """
    model, tokenizer = load_model(name, dtype=options.dtype, device=options.device_name), load_tokenizer(name)
    documents = options.documents()
    domains = sorted({document.domain for document in documents})
    count = max(1, options.quality_tokens // FORECAST_WINDOW // len(domains))
    windows = {}
    for domain in domains:
        texts = [document.text for document in documents if document.domain == domain]
        windows[domain or "text"] = text_windows(tokenizer, texts, length=FORECAST_WINDOW, count=count)
    ahead = int(evaluation["ahead"])
    runs = {f"speculate {name}": QualityRun(predictor=p, ahead=ahead) for name, p in predictors.items()}
    best = max(predictors, key=lambda name: evaluation["recall_at_k"][name]["mean"])
    layers = confident_layers(evaluation, best)
    runs[f"hybrid execution of {best}"] = QualityRun(predictor=predictors[best], layers=layers, ahead=ahead)
    return measure_quality(model, find_moe_layers(model), windows, runs)


def confident_layers(evaluation: Json, name: str, least: float = 0.9) -> list[int]:
    """Target layers at which a predictor's recall@k is at least `least`: where hybrid mode executes its forecast."""
    recall = evaluation["recall_at_k"][name]["per_layer"]
    return [layer for layer, value in zip(evaluation["targets"], recall, strict=True) if value >= least]


def policy_quality(options: QualityOptions, name: str, runs: Mapping[str, OffloadConfig]) -> dict[str, Json]:
    """What lossy policies cost a model that decodes with them in the real runtime, and without any (`exact`).

    Args:
        options: what text, and how much of it.
        name: the model's.
        runs: how it is offloaded, by name.
    """
    say(f"measuring what {len(runs)} lossy sets of policies cost {name}")
    model, documents = load_model(name, dtype=options.dtype, device=options.device_name), options.documents()
    windows_NW = text_windows(
        load_tokenizer(name),
        (document.text for document in documents),
        length=min(POLICY_WINDOW, max(options.quality_tokens, 32)),
        count=max(1, options.quality_tokens // POLICY_WINDOW),
    )
    found = measure_policies(model, windows_NW, runs)["runs"]
    return {
        run: {"perplexity": values["perplexity"], "agreement": values["top1_agreement"], "kl": values["kl"]}
        for run, values in found.items()
    }


def quality_table(result: Json) -> str:
    """A row per run of :func:`forecast_quality`."""
    rows = [("run", "perplexity", "top-1 agreement", "KL", "executed recall")]
    for name, run in result["runs"].items():
        numbers = (run["perplexity"], run["top1_agreement"], run["kl"], run["executed_recall"]["mean"])
        rows.append((name, *(f"{number:.4g}" for number in numbers)))
    return aligned(rows)
