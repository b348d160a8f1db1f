"""Ridge from streamed sums, against least squares and the normal equations over all tokens at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from expertcast.predictors import ExpertcastError
from expertcast.training.linear import RidgeSums

TOKENS, FEATURES, EXPERTS = 400, 12, 5


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x_TF = torch.randn(TOKENS, FEATURES, generator=generator) * torch.logspace(-1, 1, FEATURES) + 3.0
    noise_TE = torch.randn(TOKENS, EXPERTS, generator=generator)
    noise_TE = torch.randn(TOKENS, EXPERTS, generator=generator)
    y_TE = x_TF @ torch.randn(FEATURES, EXPERTS, generator=generator) + noise_TE
    return x_TF, y_TE


def streamed(data: tuple[Tensor, Tensor], sizes: tuple[int, ...]) -> RidgeSums:
    sums = RidgeSums(0)
    for x_TF, y_TE in zip(data[0].split(sizes), data[1].split(sizes), strict=True):
        sums.update(x_TF, y_TE)
    return sums


def test_without_penalty_it_is_least_squares(data: tuple[Tensor, Tensor]) -> None:
    x_TF, y_TE = data
    weight, bias = streamed(data, (150, 250)).solve([1e-12])
    with_one = torch.cat([x_TF, torch.ones(TOKENS, 1)], dim=1)
    solution = torch.linalg.lstsq(with_one.double(), y_TE.double()).solution.float()
    torch.testing.assert_close(weight[0], solution[:-1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(bias[0], solution[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("strength", [1e-3, 1.0])
@pytest.mark.parametrize("towards", [0.0, 1.0])
def test_penalty_is_relative_to_each_variance_and_spares_the_intercept(
    data: tuple[Tensor, Tensor], strength: float, towards: float
) -> None:
    start = towards * torch.randn(FEATURES, EXPERTS, generator=torch.Generator().manual_seed(2)).double()
    x_TF, y_TE = data[0].double(), data[1].double()
    x_TF, mean_F = x_TF - x_TF.mean(0), x_TF.mean(0)
    centred = y_TE - y_TE.mean(0)
    penalty = strength * TOKENS * x_TF.var(0, correction=0).diag()
    expected = start + torch.linalg.solve(x_TF.T @ x_TF + penalty, x_TF.T @ (centred - x_TF @ start))
    weight, bias = streamed(data, (400,)).solve([strength], start if towards else None)
    torch.testing.assert_close(weight[0].double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bias[0].double(), y_TE.mean(0) - mean_F @ expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_how_tokens_are_cut_into_batches_does_not_matter(data: tuple[Tensor, Tensor], offset: float) -> None:
    """Also where the mean is a hundred times the spread, as in features of massive activations."""
    moved = data[0].double() + offset, data[1].double()
    one, many = streamed(data, (400,)), streamed((moved[0].float(), data[1]), (1, 99, 200, 100))
    torch.testing.assert_close(one.solve([1e-3])[0], many.solve([1e-3])[0], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_named(data: tuple[Tensor, Tensor], bad: float) -> None:
    x_TF = data[0].clone()
    x_TF[7, 3] = bad
    with pytest.raises(ExpertcastError, match=r"MoE layer 0: .*NaN or infinity"):
        streamed((x_TF, data[1]), (400,)).solve([1e-3])


def test_dead_and_repeated_features_are_solved_all_the_same(data: tuple[Tensor, Tensor]) -> None:
    x_TF = data[0].clone()
    x_TF[:, 0] = 0.0
    x_TF[:, 1] = x_TF[:, 2]
    weight, bias = streamed((x_TF, data[1]), (400,)).solve([1e-9])
    assert torch.isfinite(weight).all()
    residual = data[1] - (x_TF @ weight[0] + bias[0])
    best = torch.linalg.lstsq(torch.cat([x_TF, torch.ones(TOKENS, 1)], 1).double(), data[1].double(), driver="gelsd")
    floor = (data[1] - torch.cat([x_TF, torch.ones(TOKENS, 1)], 1) @ best.solution.float()).square().mean()
    assert residual.square().mean() < floor * 1.001
