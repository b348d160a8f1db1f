"""Scoring predictors on traces: every forecast teacher-forced and chained.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.

Teacher-forced, the state at layer l carries the model's own routing there: what a predictor sees when forecasts
are only hints. Chained, it carries the executed routing, which is the forecast made for l earlier in the same
chain (the first `ahead` layers are routed by the model), as in speculative execution (trap 2 of the definitions).
The residual stays the recorded one in both: how it drifts once wrong experts have run is measured by running the
model (`expertcast.runtime.quality.forecasts`), and no trace can tell it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import fields, replace

import torch
from torch import Tensor
from torch.nn import functional

from expertcast.data.batch import TraceBatch
from expertcast.predictors.base import Forecast, Predictor, RouterState
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.predictors.view import ModelShape, MoEView
from expertcast.training.comparison import RankedRouting, compare, rank_routing
from expertcast.training.metrics.calibration import Calibration
from expertcast.training.metrics.experts import ExpertRecall
from expertcast.training.metrics.routing import (
    BUDGETS,
    PerLayerMetric,
    budget,
    chance_levels,
    routing_metrics,
)
from expertcast.training.metrics.timely import Windows, ratio_windows, timely_metrics
from expertcast.training.results import CHAINED, Evaluation, expert_counts, reliability, summary
from expertcast.training.scoring import device_of, states_of

CHUNK_TOKENS = 2048
"""Tokens scored at a time: a chunk's [T, E] tensors stay in the processor's cache."""


def evaluate(
    predictors: Mapping[str, Predictor],
    batches: Iterable[TraceBatch],
    view: MoEView,
    *,
    ahead: int = 1,
    chained: bool = True,
    distributed: bool = False,
    windows: Mapping[str, Windows] | None = None,
) -> Evaluation:
    """Score predictors on the same tokens.

    Args:
        predictors: by name; bound to `view`, on its device.
        batches: in document order (unshuffled) if a predictor looks at the previous token.
        view: the norms and routers of the model the batches come from.
        ahead: layers between the state and the routing it forecasts.
        chained: also score forecasts made from executed forecasts; adds every metric but the cosine under `*_chained`.
        distributed: every rank scores its share of the batches, and each gets the scores of all.
        windows: for each predictor the links of timely recall, as copies between a forecast and its layer; where
            nothing is given, K experts' copies that take 1, 2 and 5 times as long as a layer (:mod:`.metrics.timely`).

    Returns:
        An `Evaluation` whose dict holds per metric and predictor `mean` and `per_layer`, the latter listing the
        target layers `ahead`..L-1 (named in `targets`); a cosine is None where the predictor has no input vector.

    Raises:
        ExpertcastError: no predictor, no tokens, `ahead` is not one a predictor was made for, or it is bound to
                another model's routers.
    """
    _check(predictors, view, ahead)
    previous = any(predictor.uses_previous_token for predictor in predictors.values())
    links = windows or dict.fromkeys(predictors, ratio_windows(view.shape.top_k))
    plain = {name: _Score(view, ahead, distributed, links[name]) for name in predictors}
    # traces hold early attention on the model's own routing: only a model can tell it of another
    followed = [name for name, each in predictors.items() if not each.uses_early] if chained else []
    chains = {name: _Score(view, ahead, distributed, links[name]) for name in followed}
    blind: set[str] | None = None
    with torch.no_grad():
        for states in _states(batches, view, previous):
            truths = [rank_routing(state) for state in states]
            if chained and blind is None:
                blind = {name for name, each in predictors.items() if not _reads_routing(each, states, ahead)}
            for name, predictor in predictors.items():
                chain = chains.get(name) if name not in (blind or ()) else None
                _score_chunk(predictor, states, truths, ahead, plain[name], chain)
    chains |= {name: deepcopy(plain[name]) for name in blind or () if name in followed}  # a copy: each syncs on its own
    tokens = next(iter(plain.values())).tokens()
    if not tokens:
        raise ExpertcastError("no tokens to score: the split is empty; collect more tokens or choose another split")
    return Evaluation(_values(plain, chains, view.shape, ahead) | {"tokens": tokens})


class _Score:
    """All metrics of one predictor in one form (teacher-forced or chained)."""

    def __init__(self, view: MoEView, ahead: int, distributed: bool, windows: Windows) -> None:
        shape, layers = view.shape, view.shape.layers - ahead
        self.metrics = routing_metrics(shape, layers, sync_on_compute=distributed)
        self.metrics |= timely_metrics(layers, windows, sync_on_compute=distributed)
        self.calibration = Calibration(layers, sync_on_compute=distributed)
        self.before = Calibration(layers, calibrated=False, sync_on_compute=distributed)
        self.experts = ExpertRecall(layers, shape.experts, sync_on_compute=distributed)
        self.all: list[PerLayerMetric | Calibration | ExpertRecall] = [
            *self.metrics.values(), self.calibration, self.before, self.experts
        ]  # fmt: skip
        for metric in self.all:
            metric.to(device_of(view))
        self._first_target = ahead
        self._distributed = distributed

    def add(self, forecast: Forecast, truth: RankedRouting, cosine_T: Tensor | None = None) -> None:
        comparison = compare(forecast, truth, cosine_T)
        layer = forecast.layer - self._first_target
        for metric in self.all:
            metric.update(layer, comparison)

    def tokens(self) -> int:
        """Tokens scored, on all ranks together when distributed."""
        metric = self.metrics["recall_at_k"]
        with metric.sync_context(should_sync=self._distributed):
            return int(metric.count_L[0])


def _check(predictors: Mapping[str, Predictor], view: MoEView, ahead: int) -> None:
    if not predictors:
        raise ExpertcastError("no predictor to score: name at least one")
    if not 1 <= ahead < len(view):
        raise ExpertcastError(f"ahead={ahead}: the model has {len(view)} MoE layers, give 1 to {len(view) - 1}")
    for name, predictor in predictors.items():
        predictor.check_ahead(ahead)
        if predictor.view is not view and predictor.view.fingerprint() != view.fingerprint():
            raise ExpertcastError(
                f"predictor {name} is bound to other routers than those of the traces: collect traces with its model, "
                "or train it on these"
            )


def _states(batches: Iterable[TraceBatch], view: MoEView, previous: bool) -> Iterator[list[RouterState]]:
    """The router states of all layers, a chunk of tokens at a time."""
    before: TraceBatch | None = None
    for batch in batches:
        for start in range(0, len(batch), CHUNK_TOKENS):
            chunk = batch[start : start + CHUNK_TOKENS]
            if previous and chunk.previous_TLE is None:
                chunk = chunk.with_previous(before)
            yield states_of(view, chunk)
            before = chunk[-1:]


def _score_chunk(
    predictor: Predictor,
    states: list[RouterState],
    truths: list[RankedRouting],
    ahead: int,
    plain: _Score,
    chain: _Score | None,
) -> None:
    executed: dict[int, RouterState] = {}
    for source, target in zip(range(len(states) - ahead), range(ahead, len(states)), strict=True):
        forecast = predictor.forecast(states[source], ahead)
        plain.add(forecast, truths[target], _cosine(predictor, states[source], states[target], ahead))
        if chain is None:
            continue
        if source in executed:
            forecast = predictor.forecast(executed[source], ahead)
        chain.add(forecast, truths[target])
        executed[target] = replace(  # the layer ran the forecast, on the recorded residual
            states[target],
            logits_TE=forecast.logits_TE,
            topk_ids_TK=forecast.topk_ids_TK,
            topk_weights_TK=forecast.topk_weights_TK,
        )


def _cosine(predictor: Predictor, state: RouterState, target: RouterState, ahead: int) -> Tensor | None:
    vector_TD = predictor.input_vector(state, ahead)
    if vector_TD is None:
        return None
    return functional.cosine_similarity(vector_TD.float(), target.router_input_TD.float(), dim=1)


def _reads_routing(predictor: Predictor, states: list[RouterState], ahead: int) -> bool:
    """Whether forecasts depend on the routing of the state's own layer at all; if not, a chain changes nothing.

    Asked of the predictor itself with a few tokens at every layer: other expert ids, and NaN for the rest, must
    leave every logit as it was.
    """
    for state in states[: len(states) - ahead]:
        few = _first_tokens(state)
        other = replace(
            few,
            logits_TE=torch.full_like(few.logits_TE, torch.nan),
            topk_ids_TK=(few.topk_ids_TK + 1) % few.logits_TE.shape[1],
            topk_weights_TK=torch.full_like(few.topk_weights_TK, torch.nan),
        )
        logits = [predictor.forecast(each, ahead).logits_TE for each in (few, other)]
        if not torch.equal(*logits):
            return True
    return False


def _first_tokens(state: RouterState, tokens: int = 4) -> RouterState:
    names = [field.name for field in fields(state) if isinstance(getattr(state, field.name), Tensor)]
    return replace(state, **{name: getattr(state, name)[:tokens] for name in names})


def _values(plain: dict[str, _Score], chains: dict[str, _Score], shape: ModelShape, ahead: int) -> Json:
    values: Json = {}
    for suffix, scores in (("", plain), (CHAINED, chains)):
        for name, score in scores.items():
            for metric, state in score.metrics.items():
                if metric == "cosine" and suffix:
                    continue  # a chain is scored by what it routes, not by what it reads
                values.setdefault(metric + suffix, {})[name] = summary(state.per_layer())
            before = {"before": reliability(score.before.compute())}
            values.setdefault("calibration" + suffix, {})[name] = reliability(score.calibration.compute()) | before
    return values | {
        "per_expert": expert_counts({name: score.experts for name, score in plain.items()}),
        "chance": chance_levels(shape),
        "ahead": ahead,
        "targets": list(range(ahead, shape.layers)),
        "k": shape.top_k,
        "experts": shape.experts,
        "layers": shape.layers,
        "budgets": {name: budget(factor, shape) for name, factor in BUDGETS.items()},
    }
