"""Ridge regression for the maps of `linear` and `estimator`, layer pair by layer pair.

T tokens, P layer pairs, F features, E routed experts, S candidate maps.

With X the features and Y the target router's logits of a pair, both centred, and W0 the target's own router on the
first input, the map is W = W0 + (X'X + n s V)^-1 X'(Y - X W0), and b = mean(Y) - mean(X) W. n is the number of tokens,
s the strength and V the diagonal matrix of the features' variances, so s does not depend on the scale of a feature.
Shrinking towards W0 instead of 0 needs a tenth of the tokens. The candidate of infinite strength is the router itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from expertcast.data.processes import sum_over_ranks, training_share, wait_for_all
from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError, RouterState
from expertcast.predictors.folded import router_map
from expertcast.predictors.linear import Linear, LinearConfig
from expertcast.predictors.messages import Json, Progress
from expertcast.predictors.view import ModelShape, MoELayer
from expertcast.training.loop import fingerprint, usable_state, write_state
from expertcast.training.scoring import (
    FitOptions,
    candidate_recall,
    device_of,
    pooled,
    train_batches,
)

SUM_BYTES = 2 << 30
"""Memory of the sums and candidate maps of the pairs in one pass over the tokens."""
DOUBLE = 8192
"""Features up to which a map is solved for in fp64."""


@torch.no_grad()
def fit_ridge(predictor: Linear, source: TraceSource, ahead: int, config: LinearConfig, options: FitOptions) -> Json:
    """Set the maps of one distance, each of the strength with the highest recall on validation.

    Ranks share the pairs. With a folder for training states, the maps of each pass are kept there, and a killed
    training goes on with the others.

    Args:
        predictor: bound predictor, with all that its features depend on.
        source: traces, or a running model.
        ahead: distance in layers.
        config: inputs and strengths.
        options: number of tokens, and the folder for training states.

    Returns:
        The chosen `strengths` (None: the router itself) and their `validation_recall`, by pair.

    Raises:
        ExpertcastError: a split is empty, or has numbers that are not finite.
    """
    share, start, maps = training_share(), time.perf_counter(), predictor.map_of(ahead)
    mark = fingerprint({"ridge": config.inputs, "strengths": config.strengths, "ahead": ahead}, source, options)
    path = options.resume_folder and options.resume_folder / f"ridge{ahead}-{share.rank}.ckpt"
    state = usable_state(path, mark) if path else None
    wait_for_all(share)
    done: dict[int, list[Tensor]] = state["maps"] if state else {}
    options.earlier_s += state["seconds"] if state else 0.0
    rest = [pair for pair in range(share.rank, len(maps[0]), share.world) if pair not in done]
    at_once = pairs_at_once(source.view.shape, sum(predictor.sizes), len(config.strengths))
    for first in range(0, len(rest), at_once):
        done |= _fit_pairs(predictor, source, ahead, rest[first : first + at_once], config, options)
        if path:
            kept = {"maps": done, "global_step": len(done), "seconds": time.perf_counter() - start}
            write_state(path, {**kept, "fingerprint": mark})
    chosen_P, recall_P = torch.zeros(2, len(maps[0]), dtype=torch.float64)
    for pair, found in done.items():
        for values, value in zip((*maps, chosen_P, recall_P), found, strict=True):
            values[pair] = value
    sum_over_ranks(share, [*maps, chosen_P, recall_P])
    strengths = [None if math.isinf(each) else each for each in chosen_P.tolist()]  # JSON has no infinity
    return {"strengths": strengths, "validation_recall": recall_P.tolist()}


def pairs_at_once(shape: ModelShape, features: int, strengths: int) -> int:
    """Return the number of pairs whose sums and candidate maps fit `SUM_BYTES`; at least one."""
    return max(1, SUM_BYTES // (4 * features * (features + (strengths + 2) * shape.experts)))


def _fit_pairs(
    predictor: Linear, source: TraceSource, ahead: int, pairs: Sequence[int], config: LinearConfig, options: FitOptions
) -> dict[int, list[Tensor]]:
    """Return weights [F, E], bias [E], strength and validation recall of some pairs, from one pass over each split."""
    view, name = source.view, predictor.name
    sums = {pair: RidgeSums(pair) for pair in pairs}
    for batch in train_batches(source, options, f"{name}: sums of {len(pairs)} layer pairs", whole=True):
        batch = batch.to(device_of(view))
        for pair in pairs:
            x_TF = predictor.features(batch.state(view, pair), ahead)
            sums[pair].update(x_TF, batch.logits_TLE[:, pair + ahead])
    strengths = sorted(config.strengths, reverse=True)
    candidates: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for pair in Progress(f"{name}: solving {len(pairs)} layer pairs", unit="pair", steps=pairs, shown=options.progress):
        router = _router(view[pair + ahead], sum(predictor.sizes))
        weight_SFE, bias_SE = sums.pop(pair).solve(strengths, None if router is None else router[0])
        if router is not None:
            weight_SFE, bias_SE = torch.cat([router[0][None], weight_SFE]), torch.cat([router[1][None], bias_SE])
        candidates[pair] = weight_SFE, bias_SE, torch.tensor([math.inf] * (router is not None) + strengths)

    def forecasts(state: RouterState) -> Iterable[Tensor]:
        x_TF, layer = predictor.features(state, ahead), view[state.layer + ahead]
        for weight_FE, bias_E in zip(*candidates[state.layer][:2], strict=True):
            yield layer.route(torch.addmm(bias_E, x_TF, weight_FE))[0]

    what, count = f"{name}: choosing strengths, {ahead} ahead", len(candidates[pairs[0]][2])
    recall_SP = candidate_recall(source, ahead, options, count, forecasts, what, pairs)
    best_P = pooled(recall_SP, source, options).argmax(dim=0).tolist()
    return {
        pair: [*(each[best].clone() for each in candidates[pair]), recall_SP[best, column]]
        for column, (pair, best) in enumerate(zip(pairs, best_P, strict=True))
    }


def _router(layer: MoELayer, features: int) -> tuple[Tensor, Tensor] | None:
    """Return the router of a layer as a map [F, E] of the first D features, and its bias; None if it is not linear."""
    found = router_map(layer)
    if found is None:
        return None
    return functional.pad(found[0], (0, 0, 0, features - layer.hidden_size)), found[1]


class RidgeSums:
    """Sums over the tokens of one layer pair, in fp32 about the first batch's means: products of large means would
    drown the spread. Takes 4 F (F + E) bytes.

    Args:
        pair: source layer, for messages.
    """

    def __init__(self, pair: int) -> None:
        self.pair, self.count = pair, 0

    def update(self, x_TF: Tensor, y_TE: Tensor) -> None:
        """Add a batch of tokens."""
        x_TF, y_TE = x_TF.float(), y_TE.float()
        features, experts = x_TF.shape[1], y_TE.shape[1]
        if not self.count:
            self.near_F, self.near_E = x_TF.mean(dim=0), y_TE.mean(dim=0)
            self.x_F, self.y_E = x_TF.new_zeros(features), x_TF.new_zeros(experts)
            self.xx_FF, self.xy_FE = x_TF.new_zeros(features, features), x_TF.new_zeros(features, experts)
        x_TF, y_TE = x_TF - self.near_F, y_TE - self.near_E
        self.count += len(x_TF)
        self.x_F += x_TF.sum(dim=0)
        self.y_E += y_TE.sum(dim=0)
        self.xx_FF.addmm_(x_TF.T, x_TF)
        self.xy_FE.addmm_(x_TF.T, y_TE)

    def solve(self, strengths: Sequence[float], towards_FE: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights [S, F, E] and biases [S, E] in fp32.

        Args:
            strengths: ridge strengths.
            towards_FE: W0; None: 0.

        Raises:
            ExpertcastError: the tokens have numbers that are not finite.
        """
        dtype = torch.float64 if len(self.x_F) <= DOUBLE else torch.float32
        mean_F, mean_E = self.x_F.to(dtype) / self.count, self.y_E.to(dtype) / self.count
        covariance_FF = (self.xx_FF.to(dtype) / self.count).addr_(mean_F, mean_F, alpha=-1)
        cross_FE = (self.xy_FE.to(dtype) / self.count).addr_(mean_F, mean_E, alpha=-1)
        if not (covariance_FF.isfinite().all() and cross_FE.isfinite().all()):
            raise ExpertcastError(
                f"forecasts from MoE layer {self.pair}: inputs or targets in the train split contain NaN or infinity: "
                "collect again with the model in bf16 or fp32 (--dtype)"
            )
        start_FE = torch.zeros_like(cross_FE) if towards_FE is None else towards_FE.to(dtype)
        cross_FE = cross_FE - covariance_FF @ start_FE
        mean_F, mean_E = mean_F + self.near_F.to(dtype), mean_E + self.near_E.to(dtype)
        solved = [start_FE + _solve_spd(covariance_FF, cross_FE, strength) for strength in strengths]
        biases = [mean_E - mean_F @ weight_FE for weight_FE in solved]
        return torch.stack([each.float() for each in solved]), torch.stack([each.float() for each in biases])


def _solve_spd(covariance_FF: Tensor, cross_FE: Tensor, strength: float) -> Tensor:
    variance_F = covariance_FF.diagonal()
    # a constant feature (an expert without tokens) would yield a zero pivot
    floor = (1e-6 * variance_F.mean()).clamp(min=torch.finfo(torch.float32).tiny)
    penalty_F = variance_F.clamp(min=floor)
    while True:
        factor_FF = covariance_FF.clone()
        factor_FF.diagonal().add_(strength * penalty_F)
        factor_FF, failed = torch.linalg.cholesky_ex(factor_FF)
        if not failed:
            return torch.cholesky_solve(cross_FE, factor_FF)
        # rounding of the fp32 products can make repeated features indefinite
        strength *= 10
