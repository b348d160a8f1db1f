"""Options and results of a fit, batches to fit from, and recall on the validation split.

T tokens, P layer pairs, C candidates, E routed experts, K experts per token. Reports are
:mod:`expertcast.training.evaluation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from expertcast.data.batch import TraceBatch
from expertcast.data.processes import training_share
from expertcast.data.trace_format import is_live
from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError, MoEView, Predictor, RouterState
from expertcast.predictors.early_attention import StandIn
from expertcast.predictors.messages import Json, tokens_read
from expertcast.training.metrics import Recall

NO_TRAINING = "no tokens in the train split to fit from: collect more text"
NO_VALIDATION = "no tokens in the validation split to choose by: collect more text, in more documents"


@dataclass(kw_only=True)
class FitOptions:
    """How a predictor is fitted; what it is, is its own config."""

    tokens: int | None = None
    """Tokens of the train split to learn from; all of them when not given. On the command line, with MODEL: tokens of
    the text that it is run over, all splits together."""
    validation_tokens: int | None = None
    """Tokens of the validation split to choose by; all of them when not given."""
    seed: int = 0
    """Order of tokens and initial weights."""
    log_folder: Path | None = None
    """Where TensorBoard logs go; nothing is logged when not given."""
    progress: bool = True
    """Whether stages that take some seconds show on standard error how far they are."""
    resume_folder: Path | None = None
    """Where trainings keep their state against a kill (:mod:`expertcast.training.loop`); nowhere when not given."""

    def __post_init__(self) -> None:
        for name in ("tokens", "validation_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ExpertcastError(f"{name}={value}: give at least 1")


@dataclass(kw_only=True)
class Fitted:
    """A fitted predictor and how it came about."""

    predictor: Predictor
    """Bound to the source's model, in eval mode."""
    report: Json = field(default_factory=dict)
    """Plain values: seconds, tokens, and what was chosen on validation. Goes into the checkpoint's config.json."""


def train_tokens(source: TraceSource, options: FitOptions) -> int:
    """How many tokens of the train split a fit uses."""
    available = source.token_count("train")
    return available if options.tokens is None else min(options.tokens, available)


def validation_tokens(source: TraceSource, options: FitOptions) -> int:
    """How many tokens of the validation split a fit chooses by."""
    available = source.token_count("validation")
    return available if options.validation_tokens is None else min(options.validation_tokens, available)


BATCH = 4096
"""Tokens per batch where order and size do not matter to the result (counts, sums, scores)."""
RANK_BATCH = 256
FORGET_EVERY = 10
Candidates = Callable[[list[RouterState]], Iterable[Iterable[Tensor]]]
"""The states of all layers to each layer pair's forecast expert ids [T, K] by each candidate."""


def train_batches(source: TraceSource, options: FitOptions, what: str) -> Iterator[TraceBatch]:
    """This rank's share of the train split, in order; `what` is what progress is shown of."""
    share = training_share()
    # several ranks get equally many full batches: small ones leave few tokens over
    size = BATCH if share.world == 1 else RANK_BATCH
    batches = source.batches("train", size, max_tokens=options.tokens, share=share)
    return tokens_read(batches, what, train_tokens(source, options) // share.world, shown=options.progress)


def validation_batches(source: TraceSource, options: FitOptions, size: int = BATCH) -> Iterator[TraceBatch]:
    """The validation split in order, in full on every rank, so that all ranks choose alike."""
    return source.batches("validation", size, max_tokens=options.validation_tokens)


def validation_pass(source: TraceSource, options: FitOptions, what: str) -> Iterator[TraceBatch]:
    """The same, with `what` it is for shown as progress."""
    total = validation_tokens(source, options)
    return tokens_read(validation_batches(source, options), what, total, shown=options.progress)


def scored_batches(source: TraceSource, split: str) -> Iterator[TraceBatch]:
    """A split in order, for an evaluation whose progress is shown."""
    return tokens_read(source.batches(split, BATCH), f"scoring on split {split!r}", source.token_count(split))


def validation_batch(source: TraceSource, options: FitOptions) -> TraceBatch:
    """The first batch of validation tokens, the same on every rank.

    Raises:
        ExpertcastError: the validation split is empty.
    """
    batch = next(iter(validation_batches(source, options)), None)
    if batch is None:
        raise ExpertcastError(NO_VALIDATION)
    return batch


def device_of(view: MoEView) -> torch.device:
    """Where the model's routers are; whatever is fitted is fitted there."""
    return next(view[0].router.parameters()).device


def states_of(view: MoEView, batch: TraceBatch) -> list[RouterState]:
    """The router states of a batch at all layers, on the routers' device."""
    batch = batch.to(device_of(view))
    return [batch.state(view, layer) for layer in range(len(view))]


def known_stand_in(source: TraceSource, what: str) -> StandIn:
    """The stand-in that early attention ran on; `what` needs it, for messages.

    Raises:
        ExpertcastError: early attention did not run.
    """
    if source.stand_in is None and is_live(source.info):
        raise ExpertcastError(
            f"{what}: traces of a server's traffic hold no early attention: train the estimator with --set "
            "inputs=quasi_hidden/router_input/routing/previous, or another predictor"
        )
    if source.stand_in is None:
        raise ExpertcastError(
            f"{what}: these traces hold no early attention: collect them again, without --early-rank none, or choose "
            "another predictor (of a model whose attention cannot be run early, as inspect says)"
        )
    return source.stand_in


def check_stand_in(predictor: Predictor, source: TraceSource, name: str) -> None:
    """See that what `predictor` reads of early attention was made with the stand-in that it was trained on.

    Raises:
        ExpertcastError: the source's early attention ran on another one.
    """
    own = None if source.stand_in is None else source.stand_in.state_dict()
    for part in predictor.modules():
        if isinstance(part, StandIn) and own is not None:
            held = part.state_dict()
            if not all(torch.equal(tensor.cpu(), own[key].cpu()) for key, tensor in held.items()):
                raise ExpertcastError(
                    f"{name} reads early attention as the traces that it was trained on hold it, and these traces ran "
                    "it on another stand-in: evaluate it on those traces, with --model and --data for other text"
                )


def forget_some(batch: TraceBatch) -> TraceBatch:
    """The batch with the previous token's routing unknown in every tenth row.

    A network trained without gaps leans on it: where nothing is known (a whole prompt at once) recall on the bootstrap
    was .892, and .902 with gaps in training; where all is known, gaps cost .001.
    """
    if batch.previous_TLE is None:
        return batch
    previous_TLE = batch.previous_TLE.clone()
    previous_TLE[::FORGET_EVERY] = float("nan")
    return replace(batch, previous_TLE=previous_TLE)


@torch.no_grad()
def candidate_recall(
    source: TraceSource, ahead: int, options: FitOptions, count: int, forecasts: Candidates, what: str
) -> Tensor:
    """Recall@k [C, P] of some candidates on the validation split, teacher-forced, all on the same tokens.

    Args:
        source: whose validation split.
        ahead: layers from a pair's first to its second.
        options: how many tokens.
        count: how many candidates there are.
        forecasts: what they forecast.
        what: is chosen, for progress.
    """
    pairs = source.view.shape.layers - ahead
    recall = Recall(pairs * count).to(device_of(source.view))
    for batch in validation_pass(source, options, what):
        states = states_of(source.view, batch)
        for pair, candidates in enumerate(forecasts(states)):
            for index, ids_TK in enumerate(candidates):
                recall.update(pair * count + index, ids_TK, states[pair + ahead].topk_ids_TK)
    recall_PC: Tensor = recall.per_row().nan_to_num().view(pairs, count)
    return recall_PC.T.cpu()


def validation_recall(
    members: Mapping[str, Predictor], source: TraceSource, ahead: int, options: FitOptions
) -> dict[str, Tensor]:
    """Recall@k [P] of each predictor on the validation split.

    Args:
        members: the predictors by name, bound to the source's view.
        source: whose validation split.
        ahead: the distance.
        options: how many tokens.
    """

    def forecasts(states: list[RouterState]) -> Iterator[Iterable[Tensor]]:
        for state in states[: len(states) - ahead]:
            yield (member.forecast(state, ahead).topk_ids_TK for member in members.values())

    return dict(
        zip(members, candidate_recall(source, ahead, options, len(members), forecasts, "comparing"), strict=True)
    )
