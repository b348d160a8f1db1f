"""Fitting `estimator`: ridge in one pass, then distillation, then a gate per layer pair.

T tokens, D hidden size, F features, E routed experts, P layer pairs, S maps, G gates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from expertcast.data.traces import TraceSource
from expertcast.predictors import PredictorConfig, RouterState
from expertcast.predictors.estimator import INPUTS, Estimator, EstimatorConfig
from expertcast.predictors.plain import Json
from expertcast.training.distill import Distiller, distillation_data, suited_loss
from expertcast.training.fit_linear import RidgeStatistics, gather, score_maps
from expertcast.training.network_training import steps_of
from expertcast.training.options import FitOptions, Fitted
from expertcast.training.scoring import candidate_recall, device_of, known_stand_in, validation_batch
from expertcast.training.trainer import run

GATES = (0.0, 0.5, 1.0)
"""Shares of the network's output to choose from."""
MARGIN = 5e-4
"""Recall on validation that a pair must gain before it leaves the plain ridge of `linear`."""
TRIAL_SHARE = 8
"""A trial of one temperature runs for a share 1/8 of the steps."""


def fit_estimator(source: TraceSource, config: PredictorConfig, options: FitOptions) -> Fitted:
    """The estimator, each distance on its own."""
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
        logits_TLE = validation_batch(source, options).logits_TLE.float()
        predictor.get_buffer("usual_LE").copy_((logits_TLE - logits_TLE.mean(dim=2, keepdim=True)).mean(dim=0))
    sums = {} if config.form == "paper" else gather(source, predictor.features, config.ahead, options, Estimator.name)
    report = {}
    for ahead in config.ahead:
        if config.form == "paper":  # the published network alone: plain KL on the logits as they are
            scale_P = torch.ones(source.view.shape.layers - ahead, device=device_of(source.view))
            report[str(ahead)] = _distil(predictor, source, options, ahead, loss="kl", scale_P=scale_P)
        else:
            report[str(ahead)] = _fit_residual(predictor, source, ahead, options, sums[ahead])
    return Fitted(predictor=predictor, report={"distances": report})


def with_inputs(config: EstimatorConfig, source: TraceSource) -> EstimatorConfig:
    """The config with inputs that the source has: all of them where it names none.

    Raises:
        ExpertcastError: it names early attention, and the source holds none.
    """
    if not config.inputs:
        inputs = [name for name in INPUTS if name != "early" or source.stand_in is not None]
    else:
        inputs = list(config.inputs)
    if "early" not in inputs:
        return replace(config, inputs=inputs, stand_in_rank=None)
    return replace(config, inputs=inputs, stand_in_rank=known_stand_in(source, "inputs=early").rank)


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
    # where neither the wider ridge nor the network pays, the pair goes back to what `linear` would do
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
    """Ridge maps to start from, [S, P, F, E] and [S, P, E]: those of `linear` (q_l alone), then those of all inputs."""
    strengths, hidden = predictor.config.strengths, predictor.shape.hidden
    weight_SPFE, bias_SPE = sums.solve(strengths)
    linear_SPDE, linear_SPE = sums.solve(strengths, features=hidden)
    padded_SPFE = torch.zeros_like(weight_SPFE)
    padded_SPFE[:, :, :hidden] = linear_SPDE
    return torch.cat([padded_SPFE, weight_SPFE]), torch.cat([linear_SPE, bias_SPE])


def _set_base(
    predictor: Estimator, ahead: int, sums: RidgeStatistics, maps: tuple[Tensor, Tensor], index_P: Tensor
) -> None:
    """Take over each pair's map of plain inputs, rewritten for standardised ones."""
    weight_PFE, bias_PE = (values[index_P, torch.arange(len(index_P))] for values in maps)
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
        module = Distiller(predictor, ahead, loss=loss, temperature=temperature, scale_P=scale_P, steps=steps)
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
    """Recall@k [G, P] on validation with each share of the network's output."""

    def forecasts(states: list[RouterState]) -> Iterator[Iterable[Tensor]]:
        x_PTF = torch.stack([predictor.features(state, ahead) for state in states[: len(scale_P)]])
        x_PTF = predictor.standardised(x_PTF, ahead)
        base_PTE = predictor.base(x_PTF, ahead)
        added_PTE = scale_P[:, None, None] * predictor.network(ahead)(x_PTF)
        for layer, base_TE, added_TE in zip(source.view.layers[ahead:], base_PTE, added_PTE, strict=True):
            yield [layer.route(base_TE + gate * added_TE)[0] for gate in GATES]

    what = f"{Estimator.name}: choosing gates, {ahead} ahead"
    return candidate_recall(source, ahead, options, len(GATES), forecasts, what)
