"""Fit `estimator`: ridge regression in one pass, then distillation of the network, then a gate per layer pair.

T tokens, D hidden size, F features, E routed experts, P layer pairs, S maps, G gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from expertcast.data.batch import TraceBatch
from expertcast.data.processes import sum_over_ranks, training_share
from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError, MoELayer, PredictorConfig, RouterState
from expertcast.predictors.estimator import INPUTS, Estimator, EstimatorConfig
from expertcast.predictors.messages import Json
from expertcast.training.linear import RidgeStatistics, gather, score_maps
from expertcast.training.loop import NetworkTraining, TrainingData, run, steps_of
from expertcast.training.metrics import Recall
from expertcast.training.scoring import (
    NO_TRAINING,
    FitOptions,
    Fitted,
    candidate_recall,
    device_of,
    mask_previous,
    require_stand_in,
    states_of,
    train_batches,
    validation_batch,
)

# Distillation of routers into the network. The KL loss is that of Madan et al. (Speculating Experts, 2026, section 4).
# N rows (tokens, or layers x tokens).


class Distiller(NetworkTraining):
    """Trains the network of one distance of an estimator; all other tensors stay fixed.

    Logs `loss` per step, and per validation round `recall` and `recall_per_layer/<target layer>`.
    """

    def __init__(self, estimator: Estimator, ahead: int, *, loss: str, scale_P: Tensor, steps: int) -> None:
        """
        Args:
            estimator: bound estimator with its standardisation and ridge maps set.
            ahead: distance in layers.
            loss: key of `LOSSES`.
            scale_P: divides each pair's logits before the loss (1 for the paper's form).
            steps: optimiser steps of the schedule.
        """
        super().__init__(estimator.network(ahead), estimator.config, steps)
        self._estimator = [estimator]  # a list hides it from nn.Module: only the network is trained and synchronised
        self._ahead, self._loss = ahead, loss
        self.register_buffer("scale_P", scale_P.clone())
        self.recall = Recall(len(scale_P))

    def identity(self) -> Json:
        return super().identity() | {"ahead": self._ahead, "loss": self._loss}

    def forecast(self, batch: TraceBatch) -> tuple[Tensor, Tensor]:
        """Return the routers' logits and the forecast logits of a batch, both [P, T, E]."""
        estimator, ahead = self._estimator[0], self._ahead
        with torch.no_grad():
            states = states_of(estimator.view, mask_previous(batch) if self.training else batch)
            x_PTF = torch.stack([estimator.features(state, ahead) for state in states[: len(self.scale_P)]])
            y_PTE = batch.logits_TLE[:, ahead:].transpose(0, 1).float().to(x_PTF.device)
            x_PTF = estimator.standardised(x_PTF, ahead)
        return y_PTE, estimator.base(x_PTF, ahead) + self.scale_P[:, None, None] * self.network(x_PTF).float()

    def training_step(self, batch: TraceBatch, batch_index: int) -> Tensor:
        y_PTE, z_PTE = self.forecast(batch)
        scale_P11 = self.scale_P[:, None, None]
        estimator, y_PTE = self._estimator[0], y_PTE / scale_P11
        weight_PTE = None if estimator.config.form == "paper" else boundary_weight(y_PTE, estimator.shape.top_k)
        loss = LOSSES[self._loss](y_PTE, z_PTE / scale_P11, self.config.temperature, weight_PTE)
        self.log("loss", loss, batch_size=len(batch))
        return loss

    def validation_step(self, batch: TraceBatch, batch_index: int) -> None:
        y_PTE, z_PTE = self.forecast(batch)
        for pair, layer in enumerate(self._estimator[0].view.layers[self._ahead :]):
            self.recall.update(pair, layer.route(z_PTE[pair])[0], layer.route(y_PTE[pair])[0])

    def on_validation_epoch_end(self) -> None:
        recall_P = self.recall.per_row().float()
        self.recall.reset()
        for pair, value in enumerate(recall_P):
            self.log(f"recall_per_layer/{pair + self._ahead}", value)
        self.end_round(float(recall_P.mean()))


def kl_divergence(
    target_NE: Tensor, forecast_NE: Tensor, temperature: float = 1.0, weight_NE: Tensor | None = None
) -> Tensor:
    """Return the mean over rows of T^2 sum w (p log(p / q) - p + q), p and q the softmax of target and forecast over T.

    Without weights w this is T^2 KL(p || q). The factor T^2 keeps the scale of gradients independent of T.
    """
    log_p_NE = functional.log_softmax(target_NE.float() / temperature, dim=-1)
    log_q_NE = functional.log_softmax(forecast_NE.float() / temperature, dim=-1)
    divergence_NE = functional.kl_div(log_q_NE, log_p_NE, log_target=True, reduction="none")
    if weight_NE is not None:
        divergence_NE = weight_NE * (divergence_NE - log_p_NE.exp() + log_q_NE.exp())
    return temperature**2 * divergence_NE.sum(dim=-1).mean()


def sigmoid_kl(
    target_NE: Tensor, forecast_NE: Tensor, temperature: float = 1.0, weight_NE: Tensor | None = None
) -> Tensor:
    """Return the mean over rows of the (weighted) sum of the experts' Bernoulli KL divergences, times T^2.

    For routers that score experts independently: a sigmoid router's choice depends on the mean of its logits, to which
    the softmax of :func:`kl_divergence` is invariant.
    """
    target_NE, forecast_NE = target_NE.float() / temperature, forecast_NE.float() / temperature
    p_NE = torch.sigmoid(target_NE)
    cross_NE = functional.binary_cross_entropy_with_logits(forecast_NE, p_NE, reduction="none")
    entropy_NE = functional.binary_cross_entropy_with_logits(target_NE, p_NE, reduction="none")
    divergence_NE = cross_NE - entropy_NE
    if weight_NE is not None:
        divergence_NE = weight_NE * divergence_NE
    return temperature**2 * divergence_NE.sum(dim=-1).mean()


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
    boundary_N1 = target_NE.topk(top_k + 1, dim=-1).values[..., -2:].mean(dim=-1, keepdim=True)
    return 0.3 + torch.exp(-2.0 * (target_NE - boundary_N1).square())


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


GATES = (0.0, 0.5, 1.0)
"""Candidate factors of the network's output."""
MARGIN = 5e-4
"""Minimum gain in validation recall for which a layer pair uses more than the ridge map of `linear`."""


def fit_estimator(source: TraceSource, config: PredictorConfig, options: FitOptions) -> Fitted:
    """Fit an estimator, each distance separately."""
    assert isinstance(config, EstimatorConfig)
    config = with_inputs(config, source)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        predictor = Estimator(config, source.view.shape)
    predictor.set_defaults(source.defaults)
    if predictor.uses_early and source.stand_in is not None:
        predictor.set_stand_in(source.stand_in)
    predictor.to(device_of(source.view)).bind(source.view)
    if predictor.uses_previous_token:
        predictor.get_buffer("usual_LE").copy_(_usual_logits(source, options))
    sums = {} if config.form == "paper" else gather(source, predictor.features, config, options, Estimator.name)
    report = {}
    for ahead in config.ahead:
        if config.form == "paper":  # no ridge map; plain KL on unscaled logits
            scale_P = torch.ones(source.view.shape.layers - ahead, device=device_of(source.view))
            report[str(ahead)] = _distil(predictor, source, options, ahead, loss="kl", scale_P=scale_P)
        else:
            report[str(ahead)] = _fit_residual(predictor, source, ahead, options, sums[ahead])
    return Fitted(predictor=predictor, report={"distances": report})


def _usual_logits(source: TraceSource, options: FitOptions) -> Tensor:
    """Return the mean of the centred router logits [L, E] over each rank's first batch of the train split.

    Raises:
        ExpertcastError: the train split is empty.
    """
    batch = next(train_batches(source, replace(options, progress=False), Estimator.name), None)
    if batch is None:
        raise ExpertcastError(NO_TRAINING)
    logits_TLE = batch.logits_TLE.float()
    mean_LE = (logits_TLE - logits_TLE.mean(dim=2, keepdim=True)).mean(dim=0)
    sum_over_ranks(training_share(), [mean_LE])  # the batches of ranks are of one size
    return mean_LE / training_share().world


def with_inputs(config: EstimatorConfig, source: TraceSource) -> EstimatorConfig:
    """Return the config with its inputs resolved: by default all that the source has.

    Raises:
        ExpertcastError: `inputs` include early attention, which the source does not have.
    """
    if not config.inputs:
        inputs = [name for name in INPUTS if name != "early" or source.stand_in is not None]
    else:
        inputs = list(config.inputs)
    if "early" not in inputs:
        return replace(config, inputs=inputs, stand_in_rank=None)
    return replace(config, inputs=inputs, stand_in_rank=require_stand_in(source, "inputs=early").rank)


def _fit_residual(
    predictor: Estimator, source: TraceSource, ahead: int, options: FitOptions, sums: RidgeStatistics
) -> Json:
    maps, linear_count = _base_maps(predictor, sums), len(predictor.config.strengths)
    recall_SP = score_maps(source, predictor.features, ahead, maps, options, Estimator.name)
    linear_P, plain_P = recall_SP[:linear_count].max(dim=0)
    base_P = recall_SP.argmax(dim=0)
    _set_base(predictor, ahead, sums, maps, base_P)
    scale_P = _spread(source, ahead, options)
    report = _distil(predictor, source, options, ahead, loss=suited_loss(source.view[ahead]), scale_P=scale_P)
    best_P, gate_P = _score_gates(predictor, source, options, ahead, scale_P).max(dim=0)
    # where neither the wider ridge map nor the network gains enough, the pair uses the map of `linear`
    back_P = best_P < linear_P + MARGIN
    gates = torch.tensor(GATES)[gate_P].masked_fill(back_P, 0.0)
    chosen_P = torch.where(back_P, plain_P, base_P)
    _set_base(predictor, ahead, sums, maps, chosen_P)
    predictor.get_buffer(f"gain_P_{ahead}").copy_(gates.to(scale_P) * scale_P)
    return report | {
        "base": ["linear" if index < linear_count else "all inputs" for index in chosen_P],
        "gates": gates.tolist(),
        "linear_recall": linear_P.tolist(),
        "validation_recall": torch.where(back_P, linear_P, best_P).tolist(),
    }


def _base_maps(predictor: Estimator, sums: RidgeStatistics) -> tuple[Tensor, Tensor]:
    """Solve the candidate ridge maps, [S, P, F, E] and [S, P, E]: first those on q_l alone, then on all inputs."""
    strengths, hidden = predictor.config.strengths, predictor.shape.hidden
    weight_SPFE, bias_SPE = sums.solve(strengths)
    linear_SPDE, linear_SPE = sums.solve(strengths, features=hidden)
    padded_SPFE = torch.zeros_like(weight_SPFE)
    padded_SPFE[:, :, :hidden] = linear_SPDE
    return torch.cat([padded_SPFE, weight_SPFE]), torch.cat([linear_SPE, bias_SPE])


def _set_base(
    predictor: Estimator, ahead: int, sums: RidgeStatistics, maps: tuple[Tensor, Tensor], index_P: Tensor
) -> None:
    """Set each pair's ridge map, converted from raw to standardised inputs."""
    weight_PFE, bias_PE = (values[index_P, torch.arange(len(index_P))] for values in maps)
    mean_PF, spread_PF = sums.moments()
    inverse_PF = torch.where(spread_PF > 0, 1 / spread_PF, 0.0)
    predictor.get_buffer(f"mean_PF_{ahead}").copy_(mean_PF)
    predictor.get_buffer(f"inverse_PF_{ahead}").copy_(inverse_PF)
    predictor.get_buffer(f"weight_PFE_{ahead}").copy_(weight_PFE * spread_PF[:, :, None])
    predictor.get_buffer(f"bias_PE_{ahead}").copy_(bias_PE + torch.einsum("pf,pfe->pe", mean_PF, weight_PFE))


def _spread(source: TraceSource, ahead: int, options: FitOptions) -> Tensor:
    """Return the standard deviation [P] of the target routers' logits around each token's mean."""
    logits_TPE = validation_batch(source, options).logits_TLE[:, ahead:].float()
    centred_TPE = logits_TPE - logits_TPE.mean(dim=2, keepdim=True)
    return centred_TPE.square().mean(dim=(0, 2)).sqrt().clamp(min=1e-6).to(device_of(source.view))


def _distil(
    predictor: Estimator, source: TraceSource, options: FitOptions, ahead: int, *, loss: str, scale_P: Tensor
) -> Json:
    """Train the network of one distance, restore its best validation round, and return its report."""
    config = predictor.config
    module = Distiller(predictor, ahead, loss=loss, scale_P=scale_P, steps=steps_of(config, source, options))
    run(module, TrainingData(source, options, config.step_tokens), source, options, f"ahead{ahead}")
    return {"loss": loss, **module.finish()}


@torch.no_grad()
def _score_gates(predictor: Estimator, source: TraceSource, options: FitOptions, ahead: int, scale_P: Tensor) -> Tensor:
    """Return recall@k [G, P] on validation for each candidate factor of the network's output."""

    def forecasts(states: list[RouterState]) -> Iterator[Iterable[Tensor]]:
        x_PTF = torch.stack([predictor.features(state, ahead) for state in states[: len(scale_P)]])
        x_PTF = predictor.standardised(x_PTF, ahead)
        base_PTE = predictor.base(x_PTF, ahead)
        added_PTE = scale_P[:, None, None] * predictor.network(ahead)(x_PTF)
        for layer, base_TE, added_TE in zip(source.view.layers[ahead:], base_PTE, added_PTE, strict=True):
            yield [layer.route(base_TE + gate * added_TE)[0] for gate in GATES]

    what = f"{Estimator.name}: choosing gates, {ahead} ahead"
    return candidate_recall(source, ahead, options, len(GATES), forecasts, what)
