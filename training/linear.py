"""Fit `linear`: one pass over train for the sums, one over validation for the ridge strengths; no token is stored.

T tokens, P layer pairs, F features (the hidden size D for `linear`), E routed experts, S ridge strengths.

With X the features and Y the targets of a pair, both centred, the map is W = (X'X + n s V)^-1 X'Y and
b = mean(Y) - mean(X) W. n is the number of tokens, s the strength and V the diagonal matrix of the features' variances,
so s does not depend on the scale of a feature.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from expertcast.data.processes import sum_over_ranks, training_share, wait_for_all
from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError, PredictorConfig, RouterState
from expertcast.predictors.linear import Linear, LinearConfig
from expertcast.predictors.messages import Json, Progress
from expertcast.training.loop import fingerprint
from expertcast.training.scoring import (
    NO_TRAINING,
    FitOptions,
    Fitted,
    candidate_recall,
    device_of,
    states_of,
    train_batches,
)

Features = Callable[[RouterState, int], Tensor]
"""Maps a router state and a distance to inputs [T, F]."""


def fit_linear(source: TraceSource, config: PredictorConfig, options: FitOptions) -> Fitted:
    """Fit a ridge map for every layer pair and distance; validation recall chooses each strength."""
    assert isinstance(config, LinearConfig)
    predictor = Linear(config, source.view.shape)
    if config.reads == "quasi_hidden":
        predictor.set_defaults(source.defaults)
    predictor.to(device_of(source.view)).bind(source.view)
    report: Json = {"strengths": {}, "validation_recall": {}}
    for ahead, statistics in gather(source, predictor.input_vector, config, options, Linear.name).items():
        weight_SPFE, bias_SPE = solved = statistics.solve(config.strengths)
        recall_SP = score_maps(source, predictor.input_vector, ahead, solved, options, Linear.name)
        best_P = recall_SP.argmax(dim=0)
        pairs = torch.arange(len(best_P))
        chosen = [config.strengths[index] for index in best_P]
        predictor.set_map(ahead, weight_SPFE[best_P, pairs], bias_SPE[best_P, pairs], torch.tensor(chosen))
        report["strengths"][str(ahead)] = chosen
        report["validation_recall"][str(ahead)] = recall_SP.amax(dim=0).tolist()
    return Fitted(predictor=predictor, report=report)


@torch.no_grad()
def gather(
    source: TraceSource, features: Features, config: PredictorConfig, options: FitOptions, name: str
) -> dict[int, RidgeStatistics]:
    """Accumulate the sums for every distance in one pass over the train split, and reduce them over ranks.

    With a folder for training states they are kept there, unless the disk is short of room, and a killed training reads
    them when it resumes.

    Args:
        source: traces, or a running model.
        features: computes the inputs of the map.
        config: distances in layers, and all else that the inputs depend on.
        options: number of tokens, and the folder for training states.
        name: name of the predictor in the progress bar.

    Raises:
        ExpertcastError: the train split is empty.
    """
    shape, start = source.view.shape, time.perf_counter()
    mark = fingerprint({"sums": name, "config": config.as_dict()}, source, options)
    kept = None if options.resume_folder is None else options.resume_folder / f"{name}.safetensors"
    sums = _read_sums(kept, mark, options, device_of(source.view))
    wait_for_all(training_share())  # all ranks must have read the sums before rank 0 writes
    if sums:
        return sums
    for batch in train_batches(source, options, f"{name}: sums"):
        states = states_of(source.view, batch)
        for ahead in config.ahead:
            for pair in range(shape.layers - ahead):
                x_TF = features(states[pair], ahead)
                if ahead not in sums:
                    sums[ahead] = RidgeStatistics(shape.layers - ahead, x_TF.shape[1], shape.experts, x_TF.device)
                sums[ahead].update(pair, x_TF, states[pair + ahead].logits_TE)
    if not sums:
        raise ExpertcastError(NO_TRAINING)
    for statistics in sums.values():
        statistics.all_reduce()
    if kept is not None and training_share().rank == 0:
        _write_sums(kept, sums, {"fingerprint": mark, "seconds": str(time.perf_counter() - start)})
    return sums


def _read_sums(path: Path | None, mark: str, options: FitOptions, device: torch.device) -> dict[int, RidgeStatistics]:
    """Return the sums of a killed training by distance; empty if there are none with this fingerprint."""
    if path is None or not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            about = file.metadata()
            if about["fingerprint"] != mark:
                return {}
            sums: dict[int, RidgeStatistics] = {}
            for key in file.keys():  # noqa: SIM118 (no mapping)
                ahead, _, name = key.partition(".")
                setattr(sums.setdefault(int(ahead), RidgeStatistics(0, 0, 0)), name, file.get_tensor(key))
    except (OSError, SafetensorError):
        return {}
    options.earlier_s += float(about["seconds"])
    return sums


def _write_sums(path: Path, sums: Mapping[int, RidgeStatistics], about: dict[str, str]) -> None:
    tensors = {f"{ahead}.{name}": each for ahead, own in sums.items() for name, each in vars(own).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    if 2 * sum(each.nbytes for each in tensors.values()) < shutil.disk_usage(path.parent).free:
        new = path.with_suffix(".new")
        save_file(tensors, new, about)
        os.replace(new, path)


def score_maps(
    source: TraceSource, features: Features, ahead: int, solved: tuple[Tensor, Tensor], options: FitOptions, name: str
) -> Tensor:
    """Return recall@k [S, P] of S maps per layer pair on the validation split.

    Args:
        source: traces, or a running model.
        features: computes the inputs of the maps.
        ahead: distance in layers.
        solved: weights [S, P, F, E] and biases [S, P, E].
        options: number of tokens.
        name: name of the predictor in the progress bar.
    """
    weight_SPFE, bias_SPE = solved

    def forecasts(states: list[RouterState]) -> Iterator[Iterable[Tensor]]:
        for pair, layer in enumerate(source.view.layers[ahead:]):
            x_TF = features(states[pair], ahead).float()
            maps = zip(weight_SPFE[:, pair], bias_SPE[:, pair], strict=True)
            yield [layer.route(x_TF @ weight_FE + bias_E)[0] for weight_FE, bias_E in maps]

    what = f"{name}: choosing strengths, {ahead} ahead"
    return candidate_recall(source, ahead, options, len(weight_SPFE), forecasts, what)


class RidgeStatistics:
    """Sums over tokens for each layer pair: products in fp32, accumulated in fp64. Takes 8 P F (F + E) bytes."""

    def __init__(self, pairs: int, features: int, experts: int, device: torch.device | str = "cpu") -> None:

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float64, device=device)

        self.count_P = zeros(pairs)
        self.x_PF = zeros(pairs, features)
        self.y_PE = zeros(pairs, experts)
        self.xx_PFF = zeros(pairs, features, features)
        self.xy_PFE = zeros(pairs, features, experts)

    def update(self, pair: int, x_TF: Tensor, y_TE: Tensor) -> None:
        """Add a batch of tokens to the sums of one pair."""
        x_TF, y_TE = x_TF.float(), y_TE.float()
        # centre by the batch mean: fp32 products of a large mean would drown the spread
        near_F, near_E = x_TF.mean(dim=0), y_TE.mean(dim=0)
        x_TF, y_TE = x_TF - near_F, y_TE - near_E
        near_F, near_E, count = near_F.double(), near_E.double(), x_TF.shape[0]
        rest_F, rest_E = x_TF.sum(dim=0, dtype=torch.float64), y_TE.sum(dim=0, dtype=torch.float64)
        sum_F, sum_E = rest_F + count * near_F, rest_E + count * near_E
        self.count_P[pair] += count
        self.x_PF[pair] += sum_F
        self.y_PE[pair] += sum_E
        self.xx_PFF[pair] += (x_TF.T @ x_TF).double() + torch.outer(near_F, sum_F) + torch.outer(rest_F, near_F)
        self.xy_PFE[pair] += (x_TF.T @ y_TE).double() + torch.outer(near_F, sum_E) + torch.outer(rest_F, near_E)

    def all_reduce(self) -> None:
        """Sum over ranks; no effect outside a process group."""
        sum_over_ranks(training_share(), [self.count_P, self.x_PF, self.y_PE, self.xx_PFF, self.xy_PFE])

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation [P, F] of the features."""
        mean_PF = self.x_PF / self.count_P[:, None]
        second_PF = self.xx_PFF.diagonal(dim1=1, dim2=2) / self.count_P[:, None]
        return mean_PF.float(), (second_PF - mean_PF.square()).clamp(min=0).sqrt().float()

    def solve(self, strengths: Sequence[float], features: int | None = None) -> tuple[Tensor, Tensor]:
        """Return weights [S, P, F, E] and biases [S, P, E] in fp32, for the first `features` features or all."""
        width = self.x_PF.shape[1] if features is None else features
        pairs = range(len(self.count_P))
        with Progress("solving", total=len(strengths) * len(pairs), unit="map") as bar:

            def solve(pair: int, strength: float) -> tuple[Tensor, Tensor]:
                bar.update()
                return self._solve_pair(pair, strength, width)

            solved = [[solve(pair, strength) for pair in pairs] for strength in strengths]
        weights = torch.stack([torch.stack([weight_FE for weight_FE, _ in row]) for row in solved])
        biases = torch.stack([torch.stack([bias_E for _, bias_E in row]) for row in solved])
        return weights, biases

    def _solve_pair(self, pair: int, strength: float, width: int) -> tuple[Tensor, Tensor]:
        count = self.count_P[pair]
        mean_F, mean_E = self.x_PF[pair, :width] / count, self.y_PE[pair] / count
        covariance_FF = self.xx_PFF[pair, :width, :width] / count - torch.outer(mean_F, mean_F)
        cross_FE = self.xy_PFE[pair, :width] / count - torch.outer(mean_F, mean_E)
        if not (covariance_FF.isfinite().all() and cross_FE.isfinite().all()):
            raise ExpertcastError(
                f"forecasts from MoE layer {pair}: inputs or targets in the train split contain NaN or infinity: "
                "collect again with the model in bf16 or fp32 (--dtype)"
            )
        weight_FE = _solve_spd(covariance_FF, cross_FE, strength)
        return weight_FE.float(), (mean_E - mean_F @ weight_FE).float()


def _solve_spd(covariance_FF: Tensor, cross_FE: Tensor, strength: float) -> Tensor:
    variance_F = covariance_FF.diagonal()
    # a constant feature (an expert without tokens) would yield a zero pivot
    floor = (1e-6 * variance_F.mean()).clamp(min=torch.finfo(torch.float32).tiny)
    penalty_FF = variance_F.clamp(min=floor).diag()
    while True:
        factor_FF, failed = torch.linalg.cholesky_ex(covariance_FF + strength * penalty_FF)
        if not failed:
            return torch.cholesky_solve(cross_FE, factor_FF)
        # rounding of the fp32 products can make repeated features indefinite
        strength *= 10
