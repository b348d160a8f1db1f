"""Fitting `estimator`: ridge in one pass, then distillation, then a gate per layer pair.

T tokens, D hidden size, F features, E routed experts, P layer pairs, S maps, G gates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from expertcast.data.traces import TraceSource
from expertcast.predictors import PredictorConfig, RouterState
from expertcast.predictors.estimator import Estimator, EstimatorConfig
from expertcast.predictors.plain import Json
from expertcast.training.distill import Distiller, distillation_data
from expertcast.training.fit_linear import gather, score_maps
from expertcast.training.losses import suited_loss
from expertcast.training.network_training import steps_of
from expertcast.training.options import FitOptions, Fitted
from expertcast.training.ridge import RidgeStatistics
from expertcast.training.scoring import candidate_recall, device_of, validation_batch
from expertcast.training.trainer import run

GATES = (0.5, 1.0)
"""Shares of the network's output to choose from, beside none of it."""
MARGIN = 5e-4
"""Recall on validation that a pair must gain before it leaves the plain ridge of `linear`."""
TRIAL_SHARE = 8
"""A trial of one temperature runs for a share 1/8 of the steps."""


def fit_estimator(source: TraceSource, config: PredictorConfig, options: FitOptions) -> Fitted:
    """The estimator, each distance on its own."""
    assert isinstance(config, EstimatorConfig)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        predictor = Estimator(config, source.view.shape)
    predictor.set_defaults(source.defaults)
    predictor.to(device_of(source.view)).bind(source.view)
    if predictor.uses_previous_token:
        logits_TLE = validation_batch(source, options).logits_TLE.float()
        predictor.get_buffer("usual_LE").copy_((logits_TLE - logits_TLE.mean(dim=2, keepdim=True)).mean(dim=0))
    sums = {} if config.form == "paper" else gather(source, predictor.features, config.ahead, options)
    report = {}
    for ahead in config.ahead:
        fit_one = _fit_paper if config.form == "paper" else _fit_residual
        report[str(ahead)] = fit_one(predictor, source, ahead, options, sums.get(ahead))
    return Fitted(predictor=predictor, report={"distances": report})


def _fit_paper(
    predictor: Estimator, source: TraceSource, ahead: int, options: FitOptions, _: RidgeStatistics | None
) -> Json:
    """The published network alone: plain KL on the logits as they are."""
    scale_P = torch.ones(source.view.shape.layers - ahead, device=device_of(source.view))
    return _distil(predictor, source, options, ahead, loss="kl", scale_P=scale_P)


def _fit_residual(
    predictor: Estimator, source: TraceSource, ahead: int, options: FitOptions, sums: RidgeStatistics | None
) -> Json:
    assert sums is not None
    maps = _base_maps(predictor, source, ahead, options, sums)
    base_P = maps.recall_SP.argmax(dim=0)
    _set_base(predictor, ahead, sums, *maps.pick(base_P))
    scale_P = _spread(source, ahead, options)
    report = _distil(predictor, source, options, ahead, loss=suited_loss(source.view[ahead]), scale_P=scale_P)
    recall_GP = _score_gates(predictor, source, options, ahead, scale_P)
    # where neither the wider ridge nor the network pays, the pair goes back to what `linear` would do
    best_P, linear_P = recall_GP.argmax(dim=0), maps.plain_recall()
    gates = torch.tensor([0.0, *GATES])[best_P]
    plain_P = recall_GP.amax(dim=0) < linear_P + MARGIN
    gates[plain_P] = 0.0
    chosen_P = torch.where(plain_P, maps.plain(), base_P)
    _set_base(predictor, ahead, sums, *maps.pick(chosen_P))
    predictor.get_buffer(f"gain_P_{ahead}").copy_(gates.to(scale_P) * scale_P)
    return report | {
        "base": ["linear" if index < maps.linear_count else "all inputs" for index in chosen_P],
        "gates": gates.tolist(),
        "linear_recall": linear_P.tolist(),
        "validation_recall": torch.where(plain_P, linear_P, recall_GP.amax(dim=0)).tolist(),
    }


class _Maps:
    """Ridge maps to start from: those of `linear` (q_l alone) first, then those over all inputs."""

    def __init__(self, weight_SPFE: Tensor, bias_SPE: Tensor, recall_SP: Tensor, linear_count: int) -> None:
        self.weight_SPFE, self.bias_SPE = weight_SPFE, bias_SPE
        self.recall_SP, self.linear_count = recall_SP, linear_count

    def plain(self) -> Tensor:
        """Index [P] of the best map over q_l alone."""
        return self.recall_SP[: self.linear_count].argmax(dim=0)

    def plain_recall(self) -> Tensor:
        """Its recall [P] on validation."""
        return self.recall_SP[: self.linear_count].amax(dim=0)

    def pick(self, index_P: Tensor) -> tuple[Tensor, Tensor]:
        pairs = torch.arange(len(index_P))
        return self.weight_SPFE[index_P, pairs], self.bias_SPE[index_P, pairs]


def _base_maps(
    predictor: Estimator, source: TraceSource, ahead: int, options: FitOptions, sums: RidgeStatistics
) -> _Maps:
    config, hidden = predictor.config, predictor.shape.hidden
    weight_SPFE, bias_SPE = sums.solve(config.strengths)
    linear_SPDE, linear_SPE = sums.solve(config.strengths, features=hidden)
    padded_SPFE = torch.zeros_like(weight_SPFE)
    padded_SPFE[:, :, :hidden] = linear_SPDE
    weight_SPFE, bias_SPE = torch.cat([padded_SPFE, weight_SPFE]), torch.cat([linear_SPE, bias_SPE])
    recall_SP = score_maps(source, predictor.features, ahead, (weight_SPFE, bias_SPE), options)
    return _Maps(weight_SPFE, bias_SPE, recall_SP, len(config.strengths))


def _set_base(predictor: Estimator, ahead: int, sums: RidgeStatistics, weight_PFE: Tensor, bias_PE: Tensor) -> None:
    """Take a ridge map of plain inputs over, rewritten for standardised ones."""
    mean_PF, spread_PF = sums.moments()
    inverse_PF = torch.where(spread_PF > 0, 1 / spread_PF, 0.0)
    predictor.get_buffer(f"mean_PF_{ahead}").copy_(mean_PF)
    predictor.get_buffer(f"inverse_PF_{ahead}").copy_(inverse_PF)
    predictor.get_buffer(f"weight_PFE_{ahead}").copy_(weight_PFE * spread_PF[:, :, None])
    predictor.get_buffer(f"bias_PE_{ahead}").copy_(bias_PE + torch.einsum("pf,pfe->pe", mean_PF, weight_PFE))


def _spread(source: TraceSource, ahead: int, options: FitOptions) -> Tensor:
    """Standard deviation [P] of the target routers' logits about each token's mean."""
    logits_TPE = validation_batch(source, options).logits_TLE[:, ahead:].float()
    centred_TPE = logits_TPE - logits_TPE.mean(dim=2, keepdim=True)
    return centred_TPE.square().mean(dim=(0, 2)).sqrt().clamp(min=1e-6).to(device_of(source.view))


def _distil(
    predictor: Estimator, source: TraceSource, options: FitOptions, ahead: int, *, loss: str, scale_P: Tensor
) -> Json:
    """Train the network of one distance and leave it at its best validation round; what to report of it."""
    config, network = predictor.config, predictor.network(ahead)
    initial = {key: tensor.detach().clone() for key, tensor in network.state_dict().items()}
    steps = steps_of(config, source, options)

    def attempt(temperature: float, steps: int, name: str) -> Distiller:
        network.load_state_dict(initial)
        module = Distiller(predictor, source, ahead, loss=loss, temperature=temperature, scale_P=scale_P, steps=steps)
        run(module, distillation_data(source, options, config.step_tokens), source, options, name)
        return module

    temperature, trials = config.temperatures[0], {}
    if len(config.temperatures) > 1:
        short = max(1, steps // TRIAL_SHARE)
        for value in config.temperatures:
            trials[value] = attempt(value, short, f"ahead{ahead}_trial{value:g}").best.score
        temperature = max(trials, key=lambda value: trials[value])
    return {
        "loss": loss,
        "temperature": temperature,
        "trials": {str(value): recall for value, recall in trials.items()},
        **attempt(temperature, steps, f"ahead{ahead}").finish(),
    }


@torch.no_grad()
def _score_gates(predictor: Estimator, source: TraceSource, options: FitOptions, ahead: int, scale_P: Tensor) -> Tensor:
    """Recall@k [G, P] on validation without the network and with each share of it."""

    def forecasts(states: list[RouterState]) -> Iterator[Iterable[Tensor]]:
        x_PTF = torch.stack([predictor.features(state, ahead) for state in states[: len(scale_P)]])
        x_PTF = predictor.standardised(x_PTF, ahead)
        base_PTE = predictor.base(x_PTF, ahead)
        added_PTE = scale_P[:, None, None] * predictor.network(ahead)(x_PTF)
        for layer, base_TE, added_TE in zip(source.view.layers[ahead:], base_PTE, added_PTE, strict=True):
            yield [layer.route(base_TE + gate * added_TE)[0] for gate in gates]

    gates = (0.0, *GATES)
    return candidate_recall(source, ahead, options, len(gates), forecasts)
