"""Early attention: recall, its price, and what executing it costs the model.

Collects traces with the bundled model (or takes those at --traces), fits the estimator with and without early inputs
(or takes checkpoints), and measures on the test split: recall@k teacher-forced and chained (with the model: traces hold
early attention on the model's own routing only), further distances, milliseconds of a forecast in a decode step on this
machine, and perplexity and agreement of executed forecasts with and without their routers. With --ranks also recall of
`early_attention`, which is not trained, by rank of the stand-in, each of which needs traces of its own.

    python scripts/bench_early.py --tokens 260000 --rank 16 --ranks 0 4 8 16 \\
        --set parameters=1300000 steps=1600 step_tokens=768 --out benchmarks/results/early.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.checkpoints.checkpoint import load_predictor, save_predictor
from expertcast.checkpoints.provenance import provenance
from expertcast.commands.output import write_json
from expertcast.data.batch import RouterCall
from expertcast.data.collect import collect
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.plan import make_plan
from expertcast.data.taps import RouterTaps
from expertcast.data.text import Document, load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, MoEView, Predictor, PredictorConfig
from expertcast.predictors.early_attention import EarlyConfig
from expertcast.predictors.estimator import INPUTS, EstimatorConfig
from expertcast.predictors.messages import Json
from expertcast.predictors.options import parse_settings
from expertcast.runtime import offload
from expertcast.runtime.engine.front import speculate
from expertcast.runtime.quality.forecasts import previous_logits
from expertcast.training.evaluation import evaluate
from expertcast.training.fit import fit
from expertcast.training.metrics import Recall

BATCH, WINDOW, WINDOWS = 4096, 256, 24
DISTANCES = (1, 2, 3)
PROMPT, NEW_TOKENS, ROUNDS = 64, 64, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with one line on standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=260_000, help="tokens to collect (default: %(default)s)")
    parser.add_argument("--traces", type=Path, help="traces to use, collected there first if there are none")
    parser.add_argument("--rank", type=int, default=16, help="rank of the stand-in (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[], help="further ranks, untrained")
    parser.add_argument(
        "--rank-tokens", type=int, default=100_000, help="tokens of their traces (default: %(default)s)"
    )
    parser.add_argument("--without", action="store_true", help="train the estimator without early inputs, too")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="fields of the estimators' config")
    parser.add_argument("--checkpoints", type=Path, help="folder where trained estimators are kept and looked for")
    parser.add_argument("--threads", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            write_json(args.out, measured(args, Path(temporary)))
    except ExpertcastError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def measured(args: argparse.Namespace, scratch: Path) -> Json:
    """Everything that the result file holds."""
    model, tokenizer = load_model(REFERENCE), load_tokenizer(REFERENCE)
    documents = load_documents(REFERENCE)
    folder = args.traces or scratch / "traces"
    result: Json = {}
    if not folder.is_dir():
        begun = time.perf_counter()
        collect(model, tokenizer, documents, folder, tokens=args.tokens, early_rank=args.rank)
        result["collection_s"] = time.perf_counter() - begun
    traces = TraceDataset.open(folder)
    config = parse_settings(args.set, EstimatorConfig, "--set")
    kept = args.checkpoints or scratch / "checkpoints"
    predictors, result["fit_s"] = _fitted(traces, kept, config, without=args.without)
    result["estimator"] = config.as_dict()
    result["splits"], result["rank"] = traces.info["splits"], traces.info["settings"].get("early_rank")
    result["recall_at_k"] = _recall(predictors, traces, 1)
    plan = make_plan(documents, tokenizer, tokens=traces.info["tokens"])
    windows = [window.token_ids for window in plan.windows_of(plan.documents, "test")]
    view = find_moe_layers(model)
    bound = {name: predictor.bind(view) for name, predictor in predictors.items()}
    whole = torch.from_numpy(np.stack([ids for ids in windows if len(ids) == WINDOW][:WINDOWS]).astype(np.int64))
    result["recall_at_k_chained"] = {
        name: {"mean": statistics.mean(values), "per_layer": values}
        for name, values in chained_recall(model, view, whole, bound).items()
    }
    result["distances"] = {str(ahead): _recall(_far(traces, ahead), traces, ahead) for ahead in DISTANCES}
    result["decode"] = _decode(model, predictors, whole[:2])
    result["ranks"] = {
        str(rank): _untrained(model, tokenizer, documents, scratch / f"rank-{rank}", rank, args.rank_tokens)
        for rank in args.ranks
    }
    return result | provenance()


def _fitted(
    traces: TraceDataset, folder: Path, config: EstimatorConfig, *, without: bool
) -> tuple[dict[str, Predictor], dict[str, float]]:
    """Predictors by name, and the seconds that each took to fit.

    Args:
        traces: what they learn from.
        folder: where they are kept; what lies there already is not fitted again.
        config: of the estimators.
        without: one of them without early inputs.
    """
    configs: dict[str, PredictorConfig | None] = {
        "quasi_hidden": None,
        "linear": None,
        "early_attention": None,
        "estimator": config,
    }
    if without:
        others = [name for name in INPUTS if name != "early"]
        configs["estimator without early attention"] = replace(config, inputs=others)
    found, seconds = {}, {}
    for name, own in configs.items():
        path = folder / name.replace(" ", "-")
        if not path.is_dir():
            path.parent.mkdir(exist_ok=True)
            fitted = fit(name.split()[0], traces, config=own)
            save_predictor(fitted.predictor, path, view=traces.view, extra={"training": fitted.report})
            seconds[name] = fitted.report["seconds"]
        found[name] = load_predictor(path, traces.view)
    return found, seconds


def _far(traces: TraceDataset, ahead: int) -> dict[str, Predictor]:
    """Predictors that are not trained, at a distance."""
    configs = {"quasi_hidden": PredictorConfig(ahead=(ahead,)), "early_attention": EarlyConfig(ahead=(ahead,))}
    return {name: fit(name, traces, config=config).predictor for name, config in configs.items()}


def _recall(predictors: Mapping[str, Predictor], traces: TraceDataset, ahead: int) -> Json:
    batches = traces.batches("test", BATCH)
    found: Json = evaluate(predictors, batches, traces.view, ahead=ahead, chained=False).as_dict()["recall_at_k"]
    print(f"{ahead} ahead: " + ", ".join(f"{name} {value['mean']:.4f}" for name, value in found.items()), flush=True)
    return found


def _decode(model: PreTrainedModel, predictors: Mapping[str, Predictor], ids_NW: Tensor) -> Json:
    """Processor milliseconds per token of greedy decoding with a cache that holds everything: what is left over the run
    without a predictor is what forecasts cost. Sides alternate; medians."""
    runs: dict[str, dict[str, object]] = {"none": {}}
    runs |= {name: {"predictor": predictor} for name, predictor in predictors.items()}
    runs |= {
        f"{name}, {what}": {"predictor": predictors[name], "mode": "speculate", "router_free": what == "no routers"}
        for name in ("quasi_hidden", "estimator")
        for what in ("routers", "no routers")
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    agreement: dict[str, float] = {}
    for _ in range(ROUNDS):
        expected = None
        for name, options in runs.items():
            with offload(model, slots=10**6, **options) as offloaded:
                begun = time.process_time()
                tokens = offloaded.generate(ids_NW[:1, :PROMPT], max_new_tokens=NEW_TOKENS, do_sample=False)
                times[name].append((time.process_time() - begun) / NEW_TOKENS * 1e3)
            expected = tokens if expected is None else expected
            length = min(tokens.shape[1], expected.shape[1])
            same = tokens[0, PROMPT:length] == expected[0, PROMPT:length]
            agreement[name] = float(same.float().mean())
    base = statistics.median(times["none"])
    layers = len(next(iter(predictors.values())).view) - 1
    return {
        name: {
            "ms_per_token": statistics.median(values),
            "forecast_ms": (statistics.median(values) - base) / layers,
            "same_tokens": agreement[name],
        }
        for name, values in times.items()
    }


def _untrained(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], folder: Path, rank: int,
    tokens: int,
) -> Json:  # fmt: skip
    """Recall of `early_attention` by the stand-in of one rank, and the stand-in's size in parts of the experts'.

    Args:
        model, tokenizer, documents: are run.
        folder: for the traces.
        rank: of the stand-in.
        tokens: to collect.
    """
    traces = collect(model, tokenizer, documents, folder, tokens=tokens, early_rank=rank)
    stand_in = traces.stand_in
    assert stand_in is not None
    nbytes = sum(tensor.nbytes for tensor in stand_in.state_dict().values())
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    found = _recall({"early_attention": fit("early_attention", traces).predictor}, traces, 1)
    return found["early_attention"] | {"bytes": nbytes, "share_of_experts": nbytes / experts}


@torch.no_grad()
def chained_recall(
    model: PreTrainedModel, view: MoEView, windows_NW: Tensor, predictors: Mapping[str, Predictor], batch_size: int = 8
) -> dict[str, list[float]]:
    """Recall@k of layers 1..L-1 by predictor, each forecast made from the one before it.

    Args:
        model: its experts in memory.
        view: its norms and routers.
        windows_NW: token ids; what a predictor reads of the previous token is the model's own routing of it.
        predictors: by name, bound to `view`.
        batch_size: windows per forward.
    """
    recall = {name: Recall(len(view)) for name in predictors}
    for ids_BW in torch.split(windows_NW, batch_size):
        previous_TLE = _own_previous(model, view, ids_BW)
        for name, predictor in predictors.items():

            def observe(call: RouterCall, ids_TK: Tensor, own: Recall = recall[name]) -> None:
                own.to(ids_TK.device).update(call.layer, ids_TK, call.ids_TK)

            with speculate(model, view, predictor, execute=False, observe=observe) as speculator:
                speculator.previous_logits_TLE = previous_TLE
                model.base_model(input_ids=ids_BW.to(model.device), use_cache=False)
    return {name: own.per_row()[1:].tolist() for name, own in recall.items()}


def _own_previous(model: PreTrainedModel, view: MoEView, ids_BW: Tensor) -> Tensor:
    """What the model's own routing of each window's tokens says of the token before, [T, L, E]."""
    logits: list[Tensor] = []
    with closing(RouterTaps(model, view, lambda call: logits.append(call.logits_TE))):
        model.base_model(input_ids=ids_BW.to(model.device), use_cache=False)
    return previous_logits(logits, ids_BW)


if __name__ == "__main__":
    sys.exit(main())
