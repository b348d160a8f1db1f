"""`expertcast train` and `expertcast eval` of predictors that look tokens ahead."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from expertcast.checkpoints.store import save_predictor
from expertcast.data.distributed import current_share
from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError, Predictor
from expertcast.predictors.next_token import NextToken
from expertcast.training.options import Fitted
from expertcast.training.resume import forget
from expertcast.training.token_evaluation import evaluate_tokens, tokens_table


def save_token_predictor(args: argparse.Namespace, fitted: Fitted, source: TraceSource) -> tuple[dict[str, Any], str]:
    """Score on the validation and test splits, save; what `train` returns."""
    predictor = fitted.predictor
    assert isinstance(predictor, NextToken)
    metrics = {
        "split": "test",
        "traces": source.info.get("id"),
        **evaluate_tokens(predictor, source, "test"),
        "validation": evaluate_tokens(predictor, source, "validation"),
    }
    if current_share().rank == 0:  # every rank has fitted and scored the same
        save_predictor(predictor, args.out, view=source.view, metrics=metrics, extra={"training": fitted.report})
        forget(args.out)
    table = tokens_table(metrics["tokens_ahead"])
    text = f"{table}\n\nfitted in {fitted.report['seconds']:.0f} s; wrote {args.out}"
    return {"checkpoint": str(args.out), "training": fitted.report, **metrics}, text


def split_by_looks(
    args: argparse.Namespace, predictors: Mapping[str, Predictor]
) -> tuple[dict[str, Predictor], NextToken | None]:
    """Those that look layers ahead, and the one that looks tokens ahead.

    Raises:
        ExpertcastError: only the latter, with an option that needs one of the former.
    """
    ahead = next((predictor for predictor in predictors.values() if isinstance(predictor, NextToken)), None)
    layers = {name: predictor for name, predictor in predictors.items() if predictor is not ahead}
    needing = [option for option in ("model", "curve", "report") if getattr(args, option)]
    if not layers and needing:
        raise ExpertcastError(
            f"--{needing[0]} is about forecasts of layers and {', '.join(predictors)} looks tokens ahead: "
            "name another predictor beside it"
        )
    return layers, ahead


def token_scores(predictor: NextToken, source: TraceSource, split: str) -> tuple[dict[str, Any], str]:
    """What `eval` adds for a predictor that looks tokens ahead: results, and their table."""
    found = evaluate_tokens(predictor, source, split)
    return found, tokens_table(found["tokens_ahead"])
