"""`expertcast demo`: collect, train, evaluate and deploy on the bundled reference model, in a few minutes."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.commands.options import Count
from expertcast.commands.output import Outcome, say, write_json
from expertcast.commands.predictors import EVAL_BATCH, confident_layers, predictor_config
from expertcast.data.collector import collect
from expertcast.data.discovery import find_moe_layers
from expertcast.data.models import REFERENCE, load_model, load_tokenizer
from expertcast.data.text import load_documents
from expertcast.predictors import Predictor, names
from expertcast.predictors.plain import Json, aligned
from expertcast.runtime.benchmarking.bench import COPY_OVER_COMPUTE, BenchSettings, benchmark, usual_runs
from expertcast.runtime.benchmarking.decoding import balanced_bandwidth, decode_greedily
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.quality.forecasts import QualityRun, measure_quality, text_windows
from expertcast.training.evaluation import evaluate
from expertcast.training.fit import fit_many
from expertcast.training.options import FitOptions
from expertcast.training.results import recall_table

DEMO_FILE = Path("demo.json")
SLOTS = 96
"""An eighth of the reference model's 768 experts: two tokens' worth."""
PROMPT_TOKENS = 64
NEW_TOKENS = 48
QUALITY_TOKENS = 6144
WINDOW = 256


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `expertcast demo` takes."""

    tokens: Count = 60_000
    """Tokens to collect."""
    steps: Count = 300
    """Steps of the estimator."""


def run(options: Options) -> Outcome:
    """The whole path; writes demo.json into the current folder."""
    begin = time.perf_counter()
    model, tokenizer = load_model(REFERENCE), load_tokenizer(REFERENCE)
    documents = load_documents(REFERENCE)
    with tempfile.TemporaryDirectory(prefix="expertcast-demo-") as folder:
        say(f"1/4 collect: {options.tokens} tokens through the bundled model")
        traces = collect(model, tokenizer, documents, Path(folder) / "traces", tokens=options.tokens)
        say("2/4 train: every predictor, on the train split")
        configs = {"estimator": predictor_config("estimator", [1], [f"steps={options.steps}"])}
        fitted = fit_many(names(), traces, configs, options=FitOptions(progress=True))
        predictors = {name: result.predictor for name, result in fitted.items()}
        say("3/4 evaluate: recall@k on the test split, documents that no predictor has seen")
        evaluation = evaluate(predictors, traces.batches("test", EVAL_BATCH), traces.view)
        unseen = {entry["index"] for entry in traces.info["documents"] if entry["split"] == "test"}
    say("4/4 deploy: an eighth of the experts on the device, the others behind an emulated link")
    texts = [document.text for document in documents if document.index in unseen]
    best = max(names(), key=evaluation.recall)
    deployed = deploy(model, tokenizer, texts, predictors[best], confident_layers(evaluation.as_dict(), best))
    seconds = time.perf_counter() - begin
    result = {**evaluation.as_dict(), **deployed, "deployed_predictor": best, "seconds": seconds}
    write_json(DEMO_FILE, result)
    text = "\n\n".join(
        [
            f"\nrecall@k per target layer, {result['tokens']} test tokens",
            recall_table(evaluation),
            f"decoding with forecasts by {best}, {SLOTS} of "
            f"{result['experts'] * len(traces.view)} experts on the device, "
            f"link of {deployed['bandwidth'] / 1e6:.1f} MB/s",
            runs_table(deployed["runs"]),
            f"{seconds:.0f} seconds; wrote {DEMO_FILE}",
        ]
    )
    return result, text


def deploy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    predictor: Predictor,
    layers: list[int],
) -> Json:
    """Time, bytes, hits and perplexity of a model on unseen texts, on demand and in each mode with a predictor.

    `tokenizer` is the model's own; at `layers` hybrid mode executes forecasts.
    """
    ways = usual_runs(OffloadConfig(slots=SLOTS), predictor, layers)
    prompt_ids = tokenizer(texts[0], return_tensors="pt", verbose=False)["input_ids"][:, :PROMPT_TOKENS]
    resident = decode_greedily(model, prompt_ids, NEW_TOKENS)
    bandwidth = balanced_bandwidth(model, resident) / COPY_OVER_COMPUTE
    prompt = tokenizer.decode(prompt_ids[0])
    timed = benchmark(model, tokenizer, prompt, ways, BenchSettings(new_tokens=NEW_TOKENS), bandwidth=bandwidth)
    windows = {"test": text_windows(tokenizer, texts, length=WINDOW, count=QUALITY_TOKENS // WINDOW)}
    executed = {"speculate": QualityRun(predictor=predictor), "hybrid": QualityRun(predictor=predictor, layers=layers)}
    measured = measure_quality(model, find_moe_layers(model), windows, executed)["runs"]
    for name, way in timed["runs"].items():
        way["perplexity"] = measured[name if name in measured else "exact"]["perplexity"]
    return timed


def runs_table(runs: Json) -> str:
    """A row per run of :func:`deploy`."""
    rows = [("run", "ms per token", "kB per token", "hit rate", "perplexity", "identical")]
    for name, run_ in runs.items():
        rows.append(
            (
                name,
                f"{run_['tpot_s'] * 1e3:.2f}",
                f"{run_['bytes_per_token'] / 1e3:.0f}",
                f"{run_['hit_rate']:.3f}",
                f"{run_['perplexity']:.3f}",
                "yes" if run_["identical"] else "no",
            )
        )
    return aligned(rows)
