"""Evaluate predictors on traces, with teacher-forced and chained forecasts.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.

Teacher-forced: the state at layer l has the model's own routing, as in exact execution. Chained: the state has the
routing that the previous forecast of the chain executed, as in speculative execution; the first `ahead` layers use the
model's routing. Both forms use the recorded residual. The drift of the residual after wrong experts needs a model run
(:func:`expertcast.runtime.quality`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from expertcast.checkpoints.results import CHAINED, mean_tables
from expertcast.data.batch import TraceBatch
from expertcast.data.routing_file import ABSENT, Routing
from expertcast.data.traces import TraceSource
from expertcast.predictors import predictor_class
from expertcast.predictors.base import Forecast, Predictor, RouterState
from expertcast.predictors.baselines import Frequency, PreviousToken
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.view import ModelShape, MoEView, overfetched
from expertcast.training.fit import fit_counts
from expertcast.training.metrics import (
    BUDGETS,
    Calibration,
    ExpertRecall,
    RankedRouting,
    RoutingMeans,
    chance_levels,
    compare,
    rank_routing,
)
from expertcast.training.scoring import FitOptions, batch_tokens, device_of, states_of

# Results


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of :func:`evaluate` as JSON values. Its repr is a table of means over layers."""

    values: Json

    def __repr__(self) -> str:
        return mean_tables(self.values)[0].text()

    def as_dict(self) -> Json:
        """Return `{metric: {predictor: {"mean": x, "per_layer": [..]}}}` with `chance`, `tokens`, `k` and others."""
        return self.values

    def recall(self, predictor: str) -> float:
        """Return the mean teacher-forced recall@k of a predictor."""
        value: float = self.values["recall_at_k"][predictor]["mean"]
        return value


def summary(value_L: Tensor) -> Json:
    """Return `mean` over the layers with a value, and `per_layer` with None for the others."""
    return {"mean": plain(value_L.double().nanmean(dim=0)), "per_layer": plain(value_L.double())}


def expert_counts(metrics: Mapping[str, ExpertRecall]) -> Json:
    """Return `used` [L][E], the tokens routed to each expert, and by predictor how many of them it `found` [L][E]."""
    counts = {name: metric.compute() for name, metric in metrics.items()}
    used_LE = next(iter(counts.values()))["used"]
    return {"used": used_LE.tolist(), "found": {name: each["found"].tolist() for name, each in counts.items()}}


def reliability(result: dict[str, Tensor]) -> Json:
    """Return the expected calibration error over all pairs, over likely pairs and per layer, and equal-width bins."""
    number = len(result["count_B"])
    bins = [
        {
            "low": index / number,
            "high": (index + 1) / number,
            "count": int(result["count_B"][index]),
            "confidence": plain(result["confidence_B"][index]),
            "frequency": plain(result["frequency_B"][index]),
        }
        for index in range(number)
    ]
    errors = {name: plain(result[name]) for name in ("ece", "ece_likely")}
    return {**errors, "ece_per_layer": plain(result["ece_L"].reshape(-1)), "bins": bins}


def plain(values: Tensor) -> object:
    """Convert to a number or nested lists, with None for NaN."""
    array = values.cpu().numpy()
    return np.where(np.isnan(array), np.array(None), array).tolist()


CHUNK_TOKENS = 2048
"""Tokens per chunk: its [T, E] tensors fit the processor's cache."""


def evaluate(
    predictors: Mapping[str, Predictor],
    batches: Iterable[TraceBatch],
    view: MoEView,
    *,
    ahead: int = 1,
    chained: bool = True,
) -> Evaluation:
    """Evaluate predictors on the same tokens.

    Args:
        predictors: predictors by name, bound to `view` and on its device.
        batches: trace batches; in document order if a predictor reads the previous token.
        view: the model's MoE layers.
        ahead: distance in layers from the state to the forecast routing.
        chained: whether to score chained forecasts too, under `*_chained` (every metric except the cosine).

    Returns:
        For each metric and predictor, `mean` and `per_layer` over the target layers `ahead`..L-1 (listed in
        `targets`). The cosine is None for predictors without an input vector.

    Raises:
        ExpertcastError: there are no predictors or no tokens, or a predictor does not support `ahead` or is bound to
            another model's routers.

    Example:
        >>> import expertcast
        >>> traces = expertcast.TraceDataset.open("traces")
        >>> fitted = expertcast.fit("frequency", traces)
        >>> scores = expertcast.evaluate({"frequency": fitted.predictor}, traces.batches("test", 1024), traces.view)
        >>> 0.0 < scores.recall("frequency") < 1.0
        True
    """
    _check(predictors, view, ahead)
    previous = any(predictor.uses_previous_token for predictor in predictors.values())
    plain = {name: _Score(view, ahead) for name in predictors}
    # chained early attention would need the model: traces have it for the model's own routing only
    followed = {name: each for name, each in predictors.items() if chained and not each.uses_early}
    chains = {name: _Score(view, ahead) if each.reads_routing else plain[name] for name, each in followed.items()}
    with torch.no_grad():
        for states in _states(batches, view, previous):
            truths = [rank_routing(state) for state in states]
            for name, predictor in predictors.items():
                chain = chains.get(name) if predictor.reads_routing else None
                _score_chunk(predictor, states, truths, ahead, plain[name], chain)
    tokens = next(iter(plain.values())).means.tokens()
    if not tokens:
        raise ExpertcastError("no tokens to score: the split is empty; collect more tokens or choose another split")
    return Evaluation(_values(plain, chains, view.shape, ahead) | {"tokens": tokens})


class _Score:
    """Metrics of one predictor in one form (teacher-forced or chained)."""

    def __init__(self, view: MoEView, ahead: int) -> None:
        shape, layers = view.shape, view.shape.layers - ahead
        device = device_of(view)
        self.means = RoutingMeans(shape, layers, device)
        self.calibration = Calibration(layers).to(device)
        self.before = Calibration(layers, calibrated=False).to(device)
        self.experts = ExpertRecall(layers, shape.experts).to(device)
        self._first_target = ahead

    def add(self, forecast: Forecast, truth: RankedRouting, cosine_T: Tensor | None = None) -> None:
        comparison = compare(forecast, truth, cosine_T)
        layer = forecast.layer - self._first_target
        for each in (self.means, self.calibration, self.before, self.experts):
            each.update(layer, comparison)


def _check(predictors: Mapping[str, Predictor], view: MoEView, ahead: int) -> None:
    if not predictors:
        raise ExpertcastError("no predictor to evaluate: pass at least one")
    if not 1 <= ahead < len(view):
        raise ExpertcastError(f"ahead={ahead}: the model has {len(view)} MoE layers, use 1 to {len(view) - 1}")
    for name, predictor in predictors.items():
        predictor.check_ahead(ahead)
        if predictor.view is not view and predictor.view.fingerprint() != view.fingerprint():
            raise ExpertcastError(
                f"predictor {name} is bound to another model than the traces: collect traces with its model, or train "
                "it on these traces"
            )


def _states(batches: Iterable[TraceBatch], view: MoEView, previous: bool) -> Iterator[list[RouterState]]:
    """Yield the router states of all layers, chunk by chunk."""
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
        vector_TD, cosine_T = predictor.input_vector(states[source], ahead), None
        if vector_TD is not None:
            input_TD = states[target].router_input_TD
            cosine_T = functional.cosine_similarity(vector_TD.float(), input_TD.float(), dim=1)
        plain.add(forecast, truths[target], cosine_T)
        if chain is None:
            continue
        if source in executed:
            forecast = predictor.forecast(executed[source], ahead)
        chain.add(forecast, truths[target])
        executed[target] = replace(  # the layer executed the forecast, on the recorded residual
            states[target],
            logits_TE=forecast.logits_TE,
            topk_ids_TK=forecast.topk_ids_TK,
            topk_weights_TK=forecast.topk_weights_TK,
        )


def _values(plain: dict[str, _Score], chains: dict[str, _Score], shape: ModelShape, ahead: int) -> Json:
    values: Json = {}
    for suffix, scores in (("", plain), (CHAINED, chains)):
        for name, score in scores.items():
            for metric, mean_L in score.means.per_layer().items():
                if metric == "cosine" and suffix:
                    continue  # chained forecasts are scored by their routing only
                values.setdefault(metric + suffix, {})[name] = summary(mean_L)
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
        "budgets": {name: overfetched(factor, shape.top_k, shape.experts) for name, factor in BUDGETS.items()},
    }


# Baselines in a checkpoint's metrics and card: recall of forecasts without training

TOKENS = 50_000
"""Maximum number of counted tokens: with a live model, counting runs the model again."""


def baseline_recall(source: TraceSource, split: str, ahead: int) -> Json:
    """Return recall@k of the most frequent experts and of the previous token's experts.

    Args:
        source: traces; frequencies come from the train split.
        split: split to score.
        ahead: distance in layers.

    Returns:
        By predictor, `mean` and `per_layer` over the target layers `ahead`..L-1.

    Raises:
        ExpertcastError: a split has no tokens.
    """
    counted = fit_counts(Frequency, source, Frequency.config_class(ahead=(ahead,)), FitOptions(tokens=TOKENS)).predictor
    baselines: dict[str, Predictor] = {}
    for name in (Frequency.name, PreviousToken.name):
        cls = predictor_class(name)
        predictor = cls(cls.config_class(ahead=(ahead,)), source.view.shape)
        predictor.load_state_dict(counted.state_dict())
        baselines[name] = predictor.to(device_of(source.view)).bind(source.view).eval()
    batches = source.batches(split, batch_tokens(source))
    found = evaluate(baselines, batches, source.view, ahead=ahead, chained=False).as_dict()
    return dict(found["recall_at_k"])


# Recorded routing, without logits and residuals

COUNTED = 0.5
"""Share of a routing file's tokens that predictors count; the others are scored."""


@torch.no_grad()
def evaluate_routing(names: Sequence[str], routing: Routing) -> Json:
    """Score predictors that read routing only: they count the first tokens, and the others are scored.

    Args:
        names: names of predictors, :class:`Frequency` or subclasses.
        routing: recorded routing; layers without experts for a token are not scored.

    Returns:
        Recall@k in the form of :func:`evaluate` one layer ahead, and `counted`, the number of counted tokens.

    Raises:
        ExpertcastError: a predictor needs more than routing, or there are fewer than two tokens or layers.
    """
    ids_TLK, counted = torch.from_numpy(routing.ids_TLK), int(COUNTED * len(routing.ids_TLK))
    shape = ModelShape(layers=routing.layers, experts=routing.experts, top_k=routing.top_k, hidden=0)
    if not counted or shape.layers < 2:
        raise ExpertcastError(f"{routing.source}: forecasts need two tokens and two MoE layers: record more")
    predictors = {name: _counted(name, ids_TLK[:counted], shape, routing.source) for name in names}
    previous_TLK = ids_TLK.roll(1, dims=0)
    previous_TLK[1:][torch.from_numpy(routing.prompt_T[1:] & ~routing.prompt_T[:-1])] = ABSENT  # a new sequence
    found_L = {name: torch.zeros(shape.layers, dtype=torch.int64) for name in names}
    for start in range(counted, len(ids_TLK), CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        logits_TLE, previous_TLE = (_as_logits(ids[rows], shape) for ids in (ids_TLK, previous_TLK))
        empty_TD = logits_TLE[:, 0, :0]
        for target in range(1, shape.layers):
            state = RouterState(
                layer=target - 1, residual_TD=empty_TD, router_input_TD=empty_TD, logits_TE=logits_TLE[:, target - 1],
                topk_ids_TK=ids_TLK[rows, target - 1], topk_weights_TK=empty_TD, previous_logits_TLE=previous_TLE,
            )  # fmt: skip
            for name, predictor in predictors.items():
                forecast_TK = predictor.logits(state, 1).topk(shape.top_k).indices
                found_L[name][target] += (ids_TLK[rows, target, :, None] == forecast_TK[:, None]).sum()
    used_L = (ids_TLK[counted:, 1:] != ABSENT).sum(dim=(0, 2))
    return {
        "recall_at_k": {name: summary(found[1:] / used_L) for name, found in found_L.items()},
        "chance": {"recall_at_k": shape.top_k / shape.experts},
        "targets": list(range(1, shape.layers)),
        "k": shape.top_k,
        "experts": shape.experts,
        "layers": shape.layers,
        "tokens": len(ids_TLK) - counted,
        "counted": counted,
    }


def _counted(name: str, ids_TLK: Tensor, shape: ModelShape, source: str) -> Frequency:
    """Return a predictor of a class derived from :class:`Frequency` that has counted recorded routing."""
    cls = predictor_class(name)
    if not issubclass(cls, Frequency):
        raise ExpertcastError(
            f"predictor {name} reads hidden states, {source} has expert ids only: use {Frequency.name}, "
            f"{PreviousToken.name}, or the traces of `expertcast collect`"
        )
    predictor = cls(cls.config_class(), shape)
    for layer in range(shape.layers):
        ids = ids_TLK[:, layer][ids_TLK[:, layer] != ABSENT]
        predictor.observe(layer, ids, torch.ones(ids.shape))
    return predictor


def _as_logits(ids_TLK: Tensor, shape: ModelShape) -> Tensor:
    """Return logits [T, L, E] that rank the recorded experts first, NaN where there are none."""
    logits_TLE = torch.zeros(*ids_TLK.shape[:2], shape.experts + 1)  # absent ranks go to the last column
    logits_TLE.scatter_(2, ids_TLK % (shape.experts + 1), torch.arange(shape.top_k, 0, -1.0).expand(ids_TLK.shape))
    logits_TLE[ids_TLK[:, :, 0] == ABSENT] = float("nan")
    return logits_TLE[:, :, :-1]


# Ledger: parameters, bytes, time per forecast, seconds of training and collection


def ledger_entry(predictor: Predictor, report: Json, forecast_s: float | None) -> Json:
    """Return the costs of a predictor; unknown costs are None.

    Args:
        predictor: its state dict and its calibration count as parameters.
        report: report of its fit, `training` in a checkpoint's config.
        forecast_s: seconds of one forecast for one token on this machine, averaged over layers.

    Returns:
        `parameters`, `bytes`, `forecast_ms`, `training_s` (including candidates that were fitted earlier) and
        `collection_s` (None if the traces do not record it, or training ran the model itself).
    """
    tensors = list(predictor.state_dict().values())
    readings = 3 * sum(len(pairs) for pairs in predictor.calibration.values())
    trained = report.get("seconds")
    return {
        "parameters": sum(tensor.numel() for tensor in tensors) + readings,
        "bytes": sum(tensor.nbytes for tensor in tensors) + 8 * readings,
        "forecast_ms": None if forecast_s is None else 1e3 * forecast_s,
        "training_s": None if trained is None else trained + report.get("known_seconds", 0.0),
        "collection_s": report.get("collection_s"),
    }
