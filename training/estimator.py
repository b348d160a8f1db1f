"""Fit `linear` and `estimator`: ridge regression, then distillation of the maps, then of the estimator's network.

T tokens, D hidden size, F features, E routed experts, P layer pairs, G gates.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from expertcast.data.batch import TraceBatch
from expertcast.data.processes import training_share
from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError, MoELayer, PredictorConfig, messages
from expertcast.predictors.base import boundary
from expertcast.predictors.estimator import Estimator, EstimatorConfig, EstimatorNetwork
from expertcast.predictors.linear import Linear, LinearConfig, default_inputs
from expertcast.predictors.messages import Json, format_bytes
from expertcast.training.linear import fit_ridge, pairs_at_once
from expertcast.training.loop import ROUNDS, NetworkTraining, TrainingData, run, steps_of
from expertcast.training.metrics import Recall
from expertcast.training.scoring import (
    NO_TRAINING,
    FitOptions,
    Fitted,
    device_of,
    mask_previous,
    pooled,
    require_stand_in,
    states_of,
    train_batches,
    train_tokens,
    validation_tokens,
)

L = TypeVar("L", bound=Linear)
C = TypeVar("C", bound=LinearConfig)

# Distillation of routers into maps and networks. The KL loss is that of Madan et al. (Speculating Experts, 2026,
# section 4). N rows (tokens, or layers x tokens).


class MapChange(nn.Module):
    """Change of the maps of all pairs, for standardised features; initially zero."""

    def __init__(self, pairs: int, features: int, experts: int) -> None:
        super().__init__()
        self.weight_PFE = nn.Parameter(torch.zeros(pairs, features, experts))
        self.bias_P1E = nn.Parameter(torch.zeros(pairs, 1, experts))

    def forward(self, x_PTF: Tensor) -> Tensor:
        """Return the change of the logits [P, T, E]."""
        return torch.baddbmm(self.bias_P1E, x_PTF, self.weight_PFE)


Network = MapChange | EstimatorNetwork
Scales = tuple[Tensor, Tensor, Tensor]
"""Spread of the target routers' logits around each token's mean [P]; mean and spread of the features [P, F]."""


GATES = (0.0, 0.5, 1.0)
"""Candidate factors of what is trained."""


class Distiller(NetworkTraining):
    """Trains what is added to the maps of one distance; all other tensors stay fixed.

    A validation round scores each gate; its recall is that of the best gate for all pairs together. Logs `loss` per
    step, and per validation round `recall` and, without a gate, `recall_per_layer/<target layer>`.
    """

    def __init__(
        self, predictor: Linear, network: Network, ahead: int, config: LinearConfig, *, loss: str, steps: int,
        scales: Scales,
    ) -> None:  # fmt: skip
        """
        Args:
            predictor: bound predictor with its maps set.
            network: network to train, of all pairs.
            ahead: distance in layers.
            config: training options.
            loss: key of `LOSSES`.
            steps: optimiser steps of the schedule.
            scales: spread that divides each pair's logits before the loss, mean and spread that standardise the
                features of the network.
        """
        super().__init__(network, config, steps)
        self._predictor = [predictor]  # a list hides it from nn.Module: only the network is trained and synchronised
        self._ahead, self.loss = ahead, loss
        scale_P, self._mean_PF, self._spread_PF = scales
        self.register_buffer("scale_P", scale_P.clone())
        self.recall = Recall(len(GATES) * len(scale_P))

    def identity(self) -> Json:
        return super().identity() | {"ahead": self._ahead, "loss": self.loss}

    def forecast(self, batch: TraceBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the routers' logits, those of the maps, and what the network adds to these, all [P, T, E]."""
        predictor, ahead = self._predictor[0], self._ahead
        with torch.no_grad():
            states = states_of(predictor.view, mask_previous(batch) if self.training else batch)
            x_PTF = torch.stack([predictor.features(state, ahead) for state in states[: len(self.scale_P)]])
            y_PTE = batch.logits_TLE[:, ahead:].transpose(0, 1).float().to(x_PTF.device)
            weight_PFE, bias_PE = predictor.map_of(ahead)
            base_PTE = torch.baddbmm(bias_PE[:, None], x_PTF, weight_PFE)
            x_PTF = x_PTF.sub_(self._mean_PF[:, None]).div_(self._spread_PF[:, None])
        return y_PTE, base_PTE, self.scale_P[:, None, None] * self.network(x_PTF).float()

    def training_step(self, batch: TraceBatch, batch_index: int) -> Tensor:
        y_PTE, base_PTE, added_PTE = self.forecast(batch)
        scale_P11 = self.scale_P[:, None, None]
        y_PTE, z_PTE = y_PTE / scale_P11, (base_PTE + added_PTE) / scale_P11
        loss = LOSSES[self.loss](y_PTE, z_PTE, boundary_weight(y_PTE, self._predictor[0].shape.top_k))
        self.log("loss", loss, batch_size=len(batch))
        return loss

    def validation_step(self, batch: TraceBatch, batch_index: int) -> None:
        y_PTE, base_PTE, added_PTE = self.forecast(batch)
        for pair, layer in enumerate(self._predictor[0].view.layers[self._ahead :]):
            ids_TK = layer.route(y_PTE[pair])[0]
            for row, gate in enumerate(GATES):
                forecast_TK = layer.route(base_PTE[pair] + gate * added_PTE[pair])[0]
                self.recall.update(row * len(self.scale_P) + pair, forecast_TK, ids_TK)

    def on_validation_epoch_end(self) -> None:
        recall_GP = self.recall.per_row().view(len(GATES), -1)
        self.recall.reset()
        for pair, value in enumerate(recall_GP[-1].float()):
            self.log(f"recall_per_layer/{pair + self._ahead}", value)
        self.end_round(recall_GP)


def kl_divergence(target_NE: Tensor, forecast_NE: Tensor, weight_NE: Tensor) -> Tensor:
    """Return the mean over rows of sum w (p log(p / q) - p + q), p and q the softmax of target and forecast.

    With equal weights w this is KL(p || q).
    """
    log_p_NE = functional.log_softmax(target_NE.float(), dim=-1)
    log_q_NE = functional.log_softmax(forecast_NE.float(), dim=-1)
    divergence_NE = functional.kl_div(log_q_NE, log_p_NE, log_target=True, reduction="none")
    return (weight_NE * (divergence_NE - log_p_NE.exp() + log_q_NE.exp())).sum(dim=-1).mean()


def sigmoid_kl(target_NE: Tensor, forecast_NE: Tensor, weight_NE: Tensor) -> Tensor:
    """Return the mean over rows of the weighted sum of the experts' Bernoulli KL divergences.

    For routers that score experts independently: a sigmoid router's choice depends on the mean of its logits, to which
    the softmax of :func:`kl_divergence` is invariant.
    """
    target_NE, forecast_NE = target_NE.float(), forecast_NE.float()
    p_NE = torch.sigmoid(target_NE)
    cross_NE = functional.binary_cross_entropy_with_logits(forecast_NE, p_NE, reduction="none")
    entropy_NE = functional.binary_cross_entropy_with_logits(target_NE, p_NE, reduction="none")
    return (weight_NE * (cross_NE - entropy_NE)).sum(dim=-1).mean()


LOSSES: dict[str, Callable[..., Tensor]] = {"kl": kl_divergence, "sigmoid_kl": sigmoid_kl}


def boundary_weight(target_NE: Tensor, top_k: int) -> Tensor:
    """Return weights .3 + exp(-2 d^2) [N, E] for the loss, with d the distance of a logit from the K-th rank's end.

    The end is the middle between the K-th and the (K+1)-th logit: only errors near it change the chosen experts.

    Args:
        target_NE: logits with a standard deviation of about 1.
        top_k: K
    """
    if top_k >= target_NE.shape[-1]:
        return torch.ones_like(target_NE)
    return 0.3 + torch.exp(-2.0 * (target_NE - boundary(target_NE, top_k)).square())


def suited_loss(layer: MoELayer) -> str:
    """Return `kl` if the layer's routing is invariant to a constant added to all logits, else `sigmoid_kl`.

    A router in bf16 may choose another expert where rounding makes two logits equal: a tenth of the rows may differ.
    """
    generator = torch.Generator().manual_seed(0)
    logits_TE = torch.randn(64, layer.num_experts, generator=generator)
    weight = next(layer.router.parameters())
    logits_TE = logits_TE.to(weight.device)
    ids_TK, weights_TK = layer.route(logits_TE)
    shifted_ids_TK, shifted_weights_TK = layer.route(logits_TE + 2.0)
    same_T = (ids_TK == shifted_ids_TK).all(dim=1)
    same = torch.allclose(weights_TK[same_T], shifted_weights_TK[same_T], rtol=0.05, atol=1e-2)
    return "kl" if same and same_T.float().mean() >= 0.9 else "sigmoid_kl"


def fit_linear(source: TraceSource, config: PredictorConfig, options: FitOptions) -> Fitted:
    """Fit the maps of every distance: ridge regression, then distillation where it gains on validation."""
    assert isinstance(config, LinearConfig)
    config = with_inputs(config, source)
    predictor, first = _prepared(Linear, config, source, options)
    report = {
        str(ahead): _fit_maps(predictor, source, ahead, config, options, _scales(predictor, first, ahead))
        for ahead in config.ahead
    }
    return Fitted(predictor=predictor, report={"distances": report})


def fit_estimator(source: TraceSource, config: PredictorConfig, options: FitOptions) -> Fitted:
    """Fit the maps as those of `linear`, then the network of each distance."""
    assert isinstance(config, EstimatorConfig)
    config = with_inputs(config, source)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        predictor, first = _prepared(Estimator, config, source, options)
    report = {}
    for ahead in config.ahead:
        scales = _scales(predictor, first, ahead)
        linear = _fit_maps(predictor, source, ahead, config.linear(), options, scales)
        report[str(ahead)] = {**_fit_network(predictor, source, ahead, options, scales, linear), "linear": linear}
    return Fitted(predictor=predictor, report={"distances": report})


def _prepared(cls: type[L], config: LinearConfig, source: TraceSource, options: FitOptions) -> tuple[L, TraceBatch]:
    """Return a bound predictor with default vectors, stand-in and usual logits, and the first batch for training."""
    predictor = cls(config, source.view.shape)
    if "quasi_hidden" in config.inputs:
        predictor.set_defaults(source.defaults)
    if predictor.uses_early and source.stand_in is not None:
        predictor.set_stand_in(source.stand_in)
    predictor.to(device_of(source.view)).bind(source.view)
    batch = next(train_batches(source, replace(options, progress=False), cls.name, whole=True), None)
    if batch is None:
        raise ExpertcastError(NO_TRAINING)
    if predictor.uses_previous_token:
        logits_TLE = batch.logits_TLE.float()
        predictor.get_buffer("usual_LE").copy_((logits_TLE - logits_TLE.mean(dim=2, keepdim=True)).mean(dim=0))
    if options.progress and training_share().rank == 0:
        say_cost(predictor, source, options)
    return predictor, batch


@torch.no_grad()
def say_cost(predictor: Linear, source: TraceSource, options: FitOptions) -> None:
    """Print what a fit takes at most, unless that is short: time on this machine, memory beside the model's, and bytes
    of the checkpoint.

    The time is that of its matrix products at the speed of a measured one, and that of reading tokens and making
    features, also measured. Validation rounds count as steps.
    """
    config, features, experts, ahead = predictor.config, sum(predictor.sizes), predictor.shape.experts, predictor.ahead
    pairs, count, maps = predictor.shape.layers - min(ahead), len(config.strengths) + 1, features * experts
    tokens, checked = train_tokens(source, options), validation_tokens(source, options)
    x_TF = torch.randn(config.step_tokens, features, device=device_of(source.view))
    for _ in range(2):  # the first product is slower
        start = time.perf_counter()
        float((x_TF.T @ x_TF)[0, 0])
        product_s = (time.perf_counter() - start) / (len(x_TF) * features**2)
    start = time.perf_counter()
    batch = next(train_batches(source, replace(options, progress=False), predictor.name, whole=True))
    for state in states_of(source.view, batch)[:pairs]:
        predictor.features(state, min(ahead))
    token_s = (time.perf_counter() - start) / len(batch)
    width: float = 0
    trainings: list[tuple[LinearConfig, float]] = [(config, 3 * maps)]
    if isinstance(config, EstimatorConfig):
        width = predictor.get_parameter(f"networks.{min(ahead)}.position_PW").shape[1]
        network = width * (features + 2 * config.expansion * width + experts)
        trainings = [(config.linear(), 3 * maps), (config, maps + 3 * network)]
    seen = [(tokens, features**2 + maps), (checked, count * maps)] + [
        (steps_of(each, source, options) * each.step_tokens + ROUNDS * checked, products)
        for each, products in trainings
        if each.steps
    ]
    solving = 6 * count * features**2 * (features / 6 + experts)  # several times slower than products
    products = pairs * (solving + sum(number * products for number, products in seen))
    seconds = len(ahead) * (products * product_s + sum(number for number, _ in seen) * token_s)
    if seconds < messages.DELAY_S:
        return
    minutes = math.ceil(seconds / 60)
    size = sum(tensor.nbytes for tensor in predictor.state_dict().values())
    sums = min(pairs, pairs_at_once(predictor.shape, features, count)) * features * (features + (count + 1) * experts)
    steps = pairs * (8 * features * max(experts, width) + config.step_tokens * (3 * features + 10 * experts))
    print(
        f"{predictor.name}: at most about {minutes} minute{'s' * (minutes != 1)} on this machine as busy as it is, "
        f"{format_bytes(size + max(4 * sums + 24 * features**2, 4 * steps))} of memory beside the model, and "
        f"{format_bytes(size)} of checkpoint; less if the validation score stops improving, and --set steps=N makes "
        "fewer steps",
        file=sys.stderr,
    )


def with_inputs(config: C, source: TraceSource) -> C:
    """Return the config with its inputs resolved: by default those of :func:`default_inputs` that the source has.

    Raises:
        ExpertcastError: `inputs` include early attention, which the source does not have.
    """
    without = [] if source.stand_in is not None else ["early"]
    inputs = list(config.inputs) or default_inputs(source.view.shape, without)
    rank = require_stand_in(source, "inputs=early").rank if "early" in inputs else None
    return replace(config, inputs=inputs, stand_in_rank=rank)


@torch.no_grad()
def _scales(predictor: Linear, batch: TraceBatch, ahead: int) -> Scales:
    """Return the scales over a batch of the train split."""
    logits_TPE = batch.logits_TLE[:, ahead:].float()
    centred_TPE = logits_TPE - logits_TPE.mean(dim=2, keepdim=True)
    scale_P = centred_TPE.square().mean(dim=(0, 2)).sqrt().clamp(min=1e-6).to(device_of(predictor.view))
    found = []
    for state in states_of(predictor.view, batch)[:-ahead]:
        x_TF = predictor.features(state, ahead)
        spread_F = x_TF.std(dim=0, correction=0)
        # an expert that the batch rarely chose must not be blown up
        found.append((x_TF.mean(dim=0), spread_F.clamp(min=max(1e-6, 0.05 * float(spread_F.mean())))))
    return scale_P, torch.stack([mean_F for mean_F, _ in found]), torch.stack([spread_F for _, spread_F in found])


def _fit_maps(
    predictor: Linear, source: TraceSource, ahead: int, config: LinearConfig, options: FitOptions, scales: Scales
) -> Json:
    """Set the maps of one distance, and return their report."""
    report = fit_ridge(predictor, source, ahead, config, options)
    if not config.steps:
        return report
    weight_PFE, bias_PE = predictor.map_of(ahead)
    change = MapChange(*weight_PFE.shape).to(weight_PFE.device)
    trained, factor_P = _distil(predictor, change, source, ahead, config, options, scales, report, f"maps{ahead}")
    _, mean_PF, spread_PF = scales
    change_PFE = change.weight_PFE * factor_P[:, None, None] / spread_PF[:, :, None]
    weight_PFE += change_PFE
    bias_PE += factor_P[:, None] * change.bias_P1E[:, 0] - torch.einsum("pf,pfe->pe", mean_PF, change_PFE)
    return report | {"validation_recall": trained["validation_recall"], "distillation": trained}


def _fit_network(
    predictor: Estimator, source: TraceSource, ahead: int, options: FitOptions, scales: Scales, linear: Json
) -> Json:
    """Train the network of one distance, fold the standardisation into it, and return the report."""
    network = predictor.network(ahead)
    report, factor_P = _distil(
        predictor, network, source, ahead, predictor.config, options, scales, linear, f"ahead{ahead}"
    )
    _, mean_PF, spread_PF = scales
    network.projection_PFW.div_(spread_PF[:, :, None])
    network.position_PW.sub_(torch.einsum("pf,pfw->pw", mean_PF, network.projection_PFW))
    network.head_PWE.mul_(factor_P[:, None, None])
    return report


def _distil(
    predictor: Linear, network: Network, source: TraceSource, ahead: int, config: LinearConfig, options: FitOptions,
    scales: Scales, maps: Json, name: str,
) -> tuple[Json, Tensor]:  # fmt: skip
    """Train what is added to the maps, and choose its gate of each pair on validation.

    Args:
        predictor, network, ahead, config: as for :class:`Distiller`.
        source: traces, or a running model.
        options: number of tokens, and the folder for training states.
        scales: result of :func:`_scales`.
        maps: report of the ridge regression.
        name: name of the training.

    Returns:
        The report, and the factor of each pair (its gate times the spread of its logits).
    """
    module = Distiller(
        predictor, network, ahead, config, loss=suited_loss(source.view[ahead]),
        steps=steps_of(config, source, options), scales=scales,
    )  # fmt: skip
    run(module, TrainingData(source, options, config.step_tokens), source, options, name)
    report = {"loss": module.loss, **module.finish()}
    recall_GP = torch.tensor(module.best.recall_GP, dtype=torch.float64)
    untrained_P = torch.tensor([strength is None for strength in maps["strengths"]])
    best_P = pooled(recall_GP, source, options, untrained_P).argmax(dim=0)
    gates_P, recall_P = torch.tensor(GATES)[best_P], recall_GP.gather(0, best_P[None])[0]
    report |= {"gates": gates_P.tolist(), "validation_recall": recall_P.tolist()}
    return report, gates_P.to(scales[0]) * scales[0]
