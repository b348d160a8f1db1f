"""Options and results of a fit, batches for fitting, and recall on the validation split.

T tokens, P layer pairs, C candidates, E routed experts, K experts per token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from expertcast.data.batch import TraceBatch
from expertcast.data.processes import Share, training_share
from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError, MoEView, Predictor, RouterState
from expertcast.predictors.early_attention import StandIn
from expertcast.predictors.messages import Json, with_token_progress
from expertcast.predictors.options import Validated
from expertcast.training.metrics import Recall

NO_TRAINING = "the train split is empty: collect more text"
NO_VALIDATION = "the validation split is empty: collect more text, in more documents"


@dataclass(kw_only=True)
class FitOptions(Validated):
    """Options of a fit: data, seed, logging and resuming. The predictor's own options are its config."""

    tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of the train split to learn from; default: all. On the command line, with MODEL: tokens of text to run the
    model on, over all splits."""
    validation_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of the validation split used for selection; default: all."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the order of tokens and of initial weights."""
    log_folder: Path | None = None
    """Folder for TensorBoard logs; default: no logs."""
    progress: bool = True
    """Whether long stages show a progress bar."""
    resume_folder: Path | None = None
    """Folder for training states, so that a killed training can resume; default: none are saved."""
    earlier_s: float = field(default=0.0, init=False, repr=False)
    """Seconds that killed trainings spent on states which were resumed with these options."""


@dataclass(kw_only=True)
class Fitted:
    """A fitted predictor with the report of its fit."""

    predictor: Predictor
    """Bound to the source's model, in eval mode."""
    report: Json = field(default_factory=dict)
    """JSON values: seconds, tokens, and choices on validation. Saved in the checkpoint's config.json."""


def train_tokens(source: TraceSource, options: FitOptions) -> int:
    """Return the number of train tokens that a fit uses."""
    return min(source.token_count("train"), options.tokens or sys.maxsize)


def validation_tokens(source: TraceSource, options: FitOptions) -> int:
    """Return the number of validation tokens that a fit uses."""
    return min(source.token_count("validation"), options.validation_tokens or sys.maxsize)


BATCH = 4096
"""Largest number of tokens per batch for sums and scores, whose result does not depend on the batch size."""
BATCH_BYTES = 256 << 20
RANK_BATCH = 256
MASK_EVERY = 10
Candidates = Callable[[RouterState], Iterable[Tensor]]
"""Maps the state of a source layer to the expert ids [T, K] forecast by each candidate."""


def batch_tokens(source: TraceSource) -> int:
    """Return the tokens per batch for sums and scores: `BATCH`, fewer if they exceed `BATCH_BYTES`."""
    shape = source.view.shape
    return max(1, min(BATCH, BATCH_BYTES // (4 * shape.layers * (shape.hidden + shape.experts))))


def train_batches(source: TraceSource, options: FitOptions, what: str, *, whole: bool = False) -> Iterator[TraceBatch]:
    """Yield this rank's share of the train split in order, or the whole split, with a progress bar `what`."""
    share = Share() if whole else training_share()
    # ranks use equally many full batches, so small batches waste fewer tokens
    size = batch_tokens(source) if share.world == 1 else RANK_BATCH
    batches = source.batches("train", size, max_tokens=options.tokens, share=share)
    return with_token_progress(batches, what, train_tokens(source, options) // share.world, shown=options.progress)


def validation_batches(source: TraceSource, options: FitOptions, size: int | None = None) -> Iterator[TraceBatch]:
    """Yield the validation split in order, in full on every rank, so that all ranks choose alike."""
    return source.batches("validation", size or batch_tokens(source), max_tokens=options.validation_tokens)


def validation_pass(source: TraceSource, options: FitOptions, what: str) -> Iterator[TraceBatch]:
    """Yield the validation split like :func:`validation_batches`, with a progress bar labelled `what`."""
    total = validation_tokens(source, options)
    return with_token_progress(validation_batches(source, options), what, total, shown=options.progress)


def scored_batches(source: TraceSource, split: str) -> Iterator[TraceBatch]:
    """Yield a split in order, with a progress bar."""
    batches = source.batches(split, batch_tokens(source))
    return with_token_progress(batches, f"scoring on split {split!r}", source.token_count(split))


def device_of(view: MoEView) -> torch.device:
    """Return the device of the model's routers, on which predictors are fitted."""
    return next(view[0].router.parameters()).device


def states_of(view: MoEView, batch: TraceBatch) -> list[RouterState]:
    """Return the router states of a batch at all layers, on the routers' device."""
    batch = batch.to(device_of(view))
    return [batch.state(view, layer) for layer in range(len(view))]


def require_stand_in(source: TraceSource, what: str) -> StandIn:
    """Return the stand-in of early attention.

    Raises:
        ExpertcastError: the source has no early attention, which `what` needs.
    """
    if source.stand_in is None:
        raise ExpertcastError(
            f"{what}: these traces have no early attention, as all traces of a server's traffic: leave it out of --set "
            "inputs, choose another predictor, or collect again without --early-rank none (`expertcast inspect` tells "
            "whether the model supports early attention)"
        )
    return source.stand_in


def check_stand_in(predictor: Predictor, source: TraceSource, name: str) -> None:
    """Check that the source has the early attention that a predictor reads, of the same stand-in.

    Raises:
        ExpertcastError: the source has none, or the stand-ins differ.
    """
    for part in predictor.modules():
        if isinstance(part, StandIn) and (source.stand_in is None or not part.equals(source.stand_in)):
            why = "reads early attention with a stand-in that these traces lack"
            raise ExpertcastError(f"{name} {why}: collect them again with --stand-in {name}")


def mask_previous(batch: TraceBatch) -> TraceBatch:
    """Return the batch with the previous token's routing set to unknown in every tenth row.

    A network trained without unknown rows depends on this input. Measured recall on the bundled model: .892 without and
    .902 with unknown rows in training if no previous token is known (prefill); .001 lower if all are known.
    """
    if batch.previous_TLE is None:
        return batch
    previous_TLE = batch.previous_TLE.clone()
    previous_TLE[::MASK_EVERY] = float("nan")
    return replace(batch, previous_TLE=previous_TLE)


@torch.no_grad()
def candidate_recall(
    source: TraceSource, ahead: int, options: FitOptions, count: int, forecasts: Candidates, what: str,
    pairs: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Return teacher-forced recall@k [C, P] of several candidates on the same validation tokens.

    Args:
        source: traces, or a running model.
        ahead: distance in layers.
        options: number of tokens.
        count: C.
        forecasts: computes the candidates' forecasts.
        what: label of the progress bar.
        pairs: source layers; default: all that have a target.

    Raises:
        ExpertcastError: the validation split is empty.
    """
    view = source.view
    pairs = range(view.shape.layers - ahead) if pairs is None else pairs
    recall = Recall(len(pairs) * count).to(device_of(view))
    for batch in validation_pass(source, options, what):
        batch = batch.to(device_of(view))
        for row, pair in enumerate(pairs):
            target_TK = view[pair + ahead].route(batch.logits_TLE[:, pair + ahead])[0]
            for index, ids_TK in enumerate(forecasts(batch.state(view, pair))):
                recall.update(row * count + index, ids_TK, target_TK)
    if not recall.count_L.all():
        raise ExpertcastError(NO_VALIDATION)
    recall_PC: Tensor = recall.per_row().view(len(pairs), count)
    return recall_PC.T.cpu()


POOLED = 1000
"""Validation tokens that the mean over layer pairs counts for in a choice for one pair."""
MARGIN = 5e-4
"""Minimum gain in validation recall for which a layer pair uses what was trained."""
ONE_DOCUMENT = 1e-2
"""More of it for a pair that is untrained so far, over the number of training documents: validation text may be like a
few documents by chance."""


def pooled(recall_CP: Tensor, source: TraceSource, options: FitOptions, untrained_P: Tensor | float = 1.0) -> Tensor:
    """Return a score of each candidate [C, P]: recall, drawn towards its mean over pairs the fewer tokens were scored.

    It is lower by the minimum gain for all candidates but the first, which adds no training; `untrained_P` is 0 for the
    pairs that were trained before.
    """
    own = validation_tokens(source, options) / (validation_tokens(source, options) + POOLED)
    score_CP = own * recall_CP + (1 - own) * recall_CP.mean(dim=1, keepdim=True)
    begins = accumulate((document.tokens for document in source.chosen("train")), initial=0)
    documents = sum(begin < train_tokens(source, options) for begin in begins)
    score_CP[1:] -= MARGIN + ONE_DOCUMENT * untrained_P / documents
    return score_CP


def validation_recall(
    members: Mapping[str, Predictor], source: TraceSource, ahead: int, options: FitOptions
) -> dict[str, Tensor]:
    """Return recall@k [P] of each predictor on the validation split.

    Args:
        members: predictors by name, bound to the source's view.
        source, ahead, options: as for :func:`candidate_recall`.
    """

    def forecasts(state: RouterState) -> Iterable[Tensor]:
        return (member.forecast(state, ahead).topk_ids_TK for member in members.values())

    found_CP = candidate_recall(source, ahead, options, len(members), forecasts, "comparing")
    return dict(zip(members, found_CP, strict=True))
