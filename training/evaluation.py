"""Scoring predictors on traces: every forecast teacher-forced and chained.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.

Teacher-forced, the state at layer l carries the model's own routing there: what a predictor sees when forecasts
are only hints. Chained, it carries the executed routing, which is the forecast made for l earlier in the same
chain (the first `ahead` layers are routed by the model), as in speculative execution (trap 2 of the definitions).
The residual stays the recorded one in both: how it drifts once wrong experts have run is measured by running the
model (`expertcast.runtime.quality.forecasts`), and no trace can tell it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from expertcast.checkpoints.results import CHAINED
from expertcast.data.batch import TraceBatch
from expertcast.data.traces import TraceDataset, TraceSource
from expertcast.predictors import PredictorConfig, predictor_class
from expertcast.predictors.base import Forecast, Predictor, RouterState
from expertcast.predictors.baselines import Frequency, PreviousToken
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.predictors.linear import LinearConfig
from expertcast.predictors.messages import ExpertcastError, Json, Progress, tokens_read
from expertcast.predictors.next_token import NextToken
from expertcast.predictors.view import ModelShape, MoEView
from expertcast.training.fit import fit, fit_counts
from expertcast.training.metrics import (
    BUDGETS,
    Calibration,
    ExpertRecall,
    RankedRouting,
    RoutingMeans,
    TokenMean,
    Windows,
    budget,
    chance_levels,
    compare,
    rank_routing,
    ratio_windows,
)
from expertcast.training.next_token import WINDOW, TokenExamples, token_chunks
from expertcast.training.scoring import BATCH, FitOptions, device_of, states_of

# The result of an evaluation, and its tables.

Curve = Mapping[str, Mapping[str, float]]
"""Per predictor, recall by number of training tokens (a number, or the text that JSON makes of it)."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of :func:`evaluate`: plain numbers, ready for JSON."""

    values: Json

    def as_dict(self) -> Json:
        """`{metric: {predictor: {"mean": x, "per_layer": [..]}}}`, plus `chance`, `tokens`, `k` and so on."""
        return self.values

    def recall(self, predictor: str) -> float:
        """Mean recall@k of a predictor, teacher-forced."""
        value: float = self.values["recall_at_k"][predictor]["mean"]
        return value


def summary(value_L: Tensor) -> Json:
    """`mean` over the layers that have a value, and `per_layer` with None where there is none."""
    return {"mean": plain(value_L.double().nanmean(dim=0)), "per_layer": plain(value_L.double())}


def expert_counts(metrics: Mapping[str, ExpertRecall]) -> Json:
    """`used` [L][E], the tokens that needed each expert, and `found` [L][E] of them by predictor."""
    counts = {name: metric.compute() for name, metric in metrics.items()}
    used_LE = next(iter(counts.values()))["used"]
    return {"used": used_LE.tolist(), "found": {name: each["found"].tolist() for name, each in counts.items()}}


def reliability(result: dict[str, Tensor]) -> Json:
    """Expected calibration error over all layers, the same of likely pairs, per layer, and the bins of equal width."""
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
    """A number or nested lists of them, None for NaN."""
    array = values.cpu().numpy()
    return np.where(np.isnan(array), np.array(None), array).tolist()


CHUNK_TOKENS = 2048
"""Tokens scored at a time: a chunk's [T, E] tensors stay in the processor's cache."""


def evaluate(
    predictors: Mapping[str, Predictor],
    batches: Iterable[TraceBatch],
    view: MoEView,
    *,
    ahead: int = 1,
    chained: bool = True,
    windows: Mapping[str, Windows] | None = None,
) -> Evaluation:
    """Score predictors on the same tokens.

    Args:
        predictors: by name; bound to `view`, on its device.
        batches: in document order (unshuffled) if a predictor looks at the previous token.
        view: the norms and routers of the model the batches come from.
        ahead: layers between the state and the routing it forecasts.
        chained: also score forecasts made from executed forecasts; adds every metric but the cosine under `*_chained`.
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
    plain = {name: _Score(view, ahead, links[name]) for name in predictors}
    # traces hold early attention on the model's own routing: only a model can tell it of another
    followed = {name: each for name, each in predictors.items() if chained and not each.uses_early}
    chains = {
        name: _Score(view, ahead, links[name]) if each.reads_routing else plain[name] for name, each in followed.items()
    }
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
    """All metrics of one predictor in one form (teacher-forced or chained)."""

    def __init__(self, view: MoEView, ahead: int, windows: Windows) -> None:
        shape, layers = view.shape, view.shape.layers - ahead
        device = device_of(view)
        self.means = RoutingMeans(shape, layers, windows, device)
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


def _values(plain: dict[str, _Score], chains: dict[str, _Score], shape: ModelShape, ahead: int) -> Json:
    values: Json = {}
    for suffix, scores in (("", plain), (CHAINED, chains)):
        for name, score in scores.items():
            for metric, mean_L in score.means.per_layer().items():
                if metric == "cosine" and suffix:
                    continue  # a chain is scored by what it routes, not by what it reads
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
        "budgets": {name: budget(factor, shape) for name, factor in BUDGETS.items()},
    }


# Recall of forecasts tokens ahead: `next_token`, frequencies and the last token's routing.
#
# B tokens, L MoE layers, E routed experts, N = L * E, K experts per token, S tokens ahead.

FURTHER = 3
"""Experts beyond K that the wider recall allows."""
TOKENS_BATCH = 512
RECALLS = ("recall_at_k", f"recall_at_k_plus_{FURTHER}")


@torch.no_grad()
def evaluate_tokens(predictor: NextToken, source: TraceSource, split: str) -> Json:
    """Score a split, all forecasts on the same tokens.

    Returns:
        `tokens` that were forecast one ahead, and `tokens_ahead`: per forecast, the mean share of a token's experts
        that are among the K, and the K + 3, forecast ones of their layer: `mean` [S] over layers and `per_layer`
        [S][L], one token ahead first. `next_token` knows the text before a token, `next_token_by_id` that token's own
        id as well: its first number is of that very token.

    Raises:
        ExpertcastError: the split holds no token with one before it, or the source does not know its tokens' ids.
    """
    scores: dict[str, _Recall] = {}
    chunks = token_chunks(predictor, source, split)
    for chunk in tokens_read(chunks, f"scoring on split {split!r}", source.token_count(split)):
        follows_T = chunk.document_T == chunk.document_T.roll(1)
        follows_T[0] = False  # its token before is in another chunk, if anywhere
        for window_W in torch.split(torch.arange(chunk.windows, device=follows_T.device), TOKENS_BATCH // WINDOW):
            examples = chunk.examples(window_W)
            examples = examples.only(follows_T[examples.index_B])
            if not len(examples):
                continue
            for name, rank_BSN in _forecasts(predictor, examples):
                if name not in scores:
                    scores[name] = _Recall(predictor).to(rank_BSN.device)
                scores[name].update(rank_BSN, examples)
    if not scores:
        raise ExpertcastError(f"no tokens to score: split {split!r} is empty; collect more tokens or choose another")
    return {
        "tokens": int(scores["frequency"].count_L[0]),
        "tokens_ahead": {name: score.as_dict() for name, score in scores.items()},
    }


def _forecasts(predictor: NextToken, examples: TokenExamples) -> Iterator[tuple[str, Tensor]]:
    """Name, and something to rank experts by [B, S, N]."""
    steps, chunk = predictor.config.tokens, examples.chunk
    text_BF, row_B = examples.text(), examples.row_B
    unknown_B = torch.full_like(row_B, predictor.config.known_ids)
    for name, given_B in (("next_token", unknown_B), ("next_token_by_id", row_B)):
        yield name, predictor.probability(text_BF, examples.residual_BD, given_B)[:, :steps]
    yield "frequency", predictor.usual_LE.flatten().expand(len(examples), steps, -1)
    # the last token's own experts in front, whatever the router's rule, then its next likeliest ones
    before_B = examples.index_B - 1
    last_BN = chunk.logits_TLE[before_B.cpu()].float().softmax(dim=-1).flatten(1).to(row_B.device)
    yield "previous_token", (chunk.membership(before_B) + last_BN)[:, None].expand(-1, steps, -1)


class _Recall(TokenMean):
    """Recall [S, 2, L] per token ahead, among K and among K + 3 forecast experts, and layer."""

    def __init__(self, predictor: NextToken) -> None:
        self._shape = predictor.shape
        self._budgets = (self._shape.top_k, min(self._shape.experts, self._shape.top_k + FURTHER))
        super().__init__(predictor.config.tokens, len(self._budgets) * self._shape.layers)

    def update(self, rank_BSN: Tensor, examples: TokenExamples) -> None:
        """Add some tokens, their experts ranked by `rank_BSN`."""
        rank_BSLE = rank_BSN.reshape(*rank_BSN.shape[:2], self._shape.layers, self._shape.experts)
        for step in range(rank_BSLE.shape[1]):
            known_B = examples.known(step).nonzero().flatten()
            ids_BLW = rank_BSLE[known_B, step].topk(self._budgets[-1], dim=-1).indices
            hits_BLW = examples.used(step, known_B).view(-1, *rank_BSLE.shape[2:]).gather(2, ids_BLW)
            hits = [hits_BLW[..., :budget].sum(dim=(0, 2)) for budget in self._budgets]
            self.total_LR[step] += torch.cat(hits) / self._shape.top_k
            self.count_L[step] += len(known_B)

    def as_dict(self) -> Json:
        """Per recall `mean` [S] over layers and `per_layer` [S][L]."""
        mean_S2L = self.compute().view(-1, 2, self._shape.layers)
        return {
            name: {"mean": plain(mean_SL.nanmean(dim=1)), "per_layer": [plain(mean_L) for mean_L in mean_SL]}
            for name, mean_SL in zip(RECALLS, mean_S2L.unbind(1), strict=True)
        }


# Learning curve: recall against training tokens (Fig. 9 of Speculating Experts).

PAPER = "estimator (paper's form)"
PAPER_PARAMETERS = 200_000
"""One network serves all layers there, so a parameter costs as many times more work as there are layer pairs."""
VALIDATION_SHARE = 8
"""Choosing costs tokens too: a budget of N tokens has N / 8 validation tokens beside it, as the split itself has."""


def learning_curve(traces: TraceDataset, counts: Sequence[int], *, ahead: int = 1) -> dict[str, dict[str, float]]:
    """Mean recall@k on the test split of `linear` and both forms of `estimator`, each fitted on so many tokens.

    Returns:
        Per form `{str(tokens): recall}`.

    Raises:
        ExpertcastError: a count is under 1 or above the tokens of the train split.
    """
    available = traces.token_count("train")
    for count in counts:
        if not 1 <= count <= available:
            raise ExpertcastError(
                f"learning curve at {count} tokens: give 1 to {available}, what the train split has, or collect more"
            )
    forms: dict[str, tuple[str, PredictorConfig]] = {
        "linear": ("linear", LinearConfig(ahead=(ahead,))),
        "estimator": ("estimator", EstimatorConfig(ahead=(ahead,))),
        PAPER: ("estimator", EstimatorConfig(ahead=(ahead,), form="paper", parameters=PAPER_PARAMETERS)),
    }
    curve: dict[str, dict[str, float]] = {form: {} for form in forms}
    fits = [(count, form) for count in counts for form in forms]
    for count, form in (bar := Progress("learning curve", unit="fit", steps=fits)):
        options = FitOptions(tokens=count, validation_tokens=max(1, count // VALIDATION_SHARE), progress=False)
        name, config = forms[form]
        predictor = fit(name, traces, config=config, options=options).predictor
        evaluation = evaluate({form: predictor}, traces.batches("test", BATCH), traces.view, ahead=ahead, chained=False)
        curve[form][str(count)] = evaluation.recall(form)
        bar.set_postfix_str(f"{form} at {count}: {curve[form][str(count)]:.4f}", refresh=False)
    return curve


# Baselines in a checkpoint's metrics and card: recall of forecasts that need no training.

TOKENS = 50_000
"""That are counted at most: a running model would be run over all its text once more."""


def baseline_recall(source: TraceSource, split: str, ahead: int) -> Json:
    """Recall@k of the most used experts and of the previous token's.

    Args:
        source: whose train split is counted.
        split: that scores.
        ahead: layers ahead that forecasts look.

    Returns:
        By predictor, `mean` and `per_layer`, target layers `ahead`..L-1.

    Raises:
        ExpertcastError: a split without tokens.
    """
    counted = fit_counts(Frequency, source, Frequency.config_class(ahead=(ahead,)), FitOptions(tokens=TOKENS)).predictor
    made: dict[str, Predictor] = {}
    for name in (Frequency.name, PreviousToken.name):
        cls = predictor_class(name)
        predictor = cls(cls.config_class(ahead=(ahead,)), source.view.shape)
        predictor.load_state_dict(counted.state_dict())
        made[name] = predictor.to(device_of(source.view)).bind(source.view).eval()
    found = evaluate(made, source.batches(split, BATCH), source.view, ahead=ahead, chained=False).as_dict()
    return dict(found["recall_at_k"])


# Ledger: parameters, bytes, time per forecast, seconds of training and collection.


def ledger_entry(predictor: Predictor, report: Json, forecast_s: float | None) -> Json:
    """One predictor's costs, None where one is not known.

    Args:
        predictor: its state dict is what it keeps, default vectors and counts included, and the numbers of its
            calibration.
        report: of its fit, in a checkpoint the member `training`.
        forecast_s: seconds of one forecast for one token on this machine, mean over layers.

    Returns:
        `parameters`, `bytes`, `forecast_ms`; `training_s`, with the seconds of candidates that were fitted before; and
        `collection_s` of the traces, None where they say nothing of it or the model was run in training itself.
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
