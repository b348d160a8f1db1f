"""Scores of predictors on traces or a running model, and their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from expertcast.commands.predictors import EVAL_BATCH
from expertcast.data.trace_file import is_live
from expertcast.data.traces import TraceSource
from expertcast.predictors import NextToken, Predictor
from expertcast.predictors.plain import Json
from expertcast.training.evaluation import evaluate
from expertcast.training.metrics.timely import Windows
from expertcast.training.results import link_table, recall_table
from expertcast.training.scoring import scored_batches
from expertcast.training.token_evaluation import evaluate_tokens, tokens_table

SHARED = (
    "a server's traffic is split by conversation: tokens of a system prompt or template that several begin with stand "
    "in every split, and count in these scores"
)


def scores(predictor: Predictor, source: TraceSource, split: str) -> tuple[Json, str]:
    """One predictor scored at all its distances, or tokens ahead if it looks that way: results and their tables."""
    if isinstance(predictor, NextToken):
        found = evaluate_tokens(predictor, source, split)
        return found, "\n\n".join([tokens_table(found["tokens_ahead"]), *_notes(source)])
    return scores_ahead({predictor.name: predictor}, source, split, predictor.ahead)


def scores_ahead(
    predictors: Mapping[str, Predictor],
    source: TraceSource,
    split: str,
    ahead: Sequence[int],
    windows: Mapping[str, Windows] | None = None,
) -> tuple[Json, str]:
    """Predictors scored at each distance, all on the same tokens.

    Args:
        predictors: by name.
        source: whose tokens score.
        split: of it.
        ahead: layers ahead, the shortest first.
        windows: as for :func:`evaluate`.

    Returns:
        The result at the shortest distance, with those at the others in its member `further`, by distance; and tables.

    Raises:
        ExpertcastError: as :func:`evaluate`.
    """
    result: Json = {}
    tables = []
    for distance in ahead:
        batches = scored_batches(source, split, EVAL_BATCH)
        evaluation = evaluate(predictors, batches, source.view, ahead=distance, windows=windows)
        if len(ahead) > 1:
            tables.append(f"{distance} layer{'s' * (distance > 1)} ahead")
        tables += [recall_table(evaluation), link_table(evaluation)]
        if result:
            result.setdefault("further", {})[str(distance)] = evaluation.as_dict()
        else:
            result = dict(evaluation.as_dict())
    return result, "\n\n".join([*tables, *_notes(source)])


def _notes(source: TraceSource) -> list[str]:
    """What must be known of the tokens that score."""
    return [SHARED] if is_live(source.info) else []
