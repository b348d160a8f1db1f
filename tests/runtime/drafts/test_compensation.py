"""Compensated rounding against the textbook's one column at a time, and against nearest rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from expertcast.runtime.drafts.quantised import DAMPING, compensated, expanded, inverse_factor, rounded, squared_error
from tests.runtime.drafts.by_hand import bf16


def _inputs(rows: int, inputs: int, seed: int = 0) -> Tensor:
    """Correlated, as activations are."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, inputs, generator=draw) @ torch.randn(inputs, inputs, generator=draw)


def _textbook(weights: list[float], hessian: Tensor, bits: int, group: int) -> list[float]:
    """The weights that one output's are rounded to, every inverse made anew."""
    damped = hessian.double().numpy() + DAMPING * float(hessian.double().diagonal().mean()) * np.eye(len(weights))
    left, found, lowest, scale = np.array(weights, dtype=np.float64), [], -(2 ** (bits - 1)), 1.0
    for i in range(len(left)):
        if i % group == 0:
            scale = bf16(max(left[i : i + group], key=abs) / lowest) or 1.0
        value = scale * min(max(round(left[i] / scale), lowest), -lowest - 1)
        inverse = np.linalg.inv(damped[i:, i:])
        left[i:] -= (left[i] - value) / inverse[0, 0] * inverse[:, 0]
        found.append(value)
    return found


@pytest.mark.parametrize(("bits", "group"), [(4, 4), (4, 12), (8, 12)])
def test_as_the_textbook_has_it(bits: int, group: int) -> None:
    weights = torch.randn(2, 10, 12, generator=torch.Generator().manual_seed(1))
    hessians = torch.stack([(rows := _inputs(40, 12, seed)).T @ rows for seed in (2, 3)])
    found = expanded(*compensated(weights, hessians, bits, group))
    nearest = expanded(*rounded(weights, bits, group))
    better = 0
    for expert in range(2):
        for output in range(10):
            textbook = torch.tensor(_textbook(weights[expert, output].tolist(), hessians[expert], bits, group))
            both = torch.stack((textbook, nearest[expert, output]))
            errors = squared_error(weights[expert, output][None], both, hessians[expert])
            better += int(errors[0] < errors[1])
            assert found[expert, output] == pytest.approx(both[int(errors.argmin())], rel=1e-6)
    assert better > 10, "most outputs gain"


def test_by_hand() -> None:
    """Scale -8 / -8 = 1. Inputs 2 and 3 are always the same: rounded by themselves, .4 and .4 are 0 and 0, .8 short;
    when the first is 0, the second takes its .4 and is rounded to 1, .2 too much."""
    rows = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0)) @ torch.tensor([[1.0, 0, 0], [0, 1, 1]])
    weights, hessians = torch.tensor([[[-8.0, 0.4, 0.4]]]), (rows.T @ rows)[None]
    assert expanded(*rounded(weights, 4, 3)).tolist() == [[[-8.0, 0.0, 0.0]]]
    assert expanded(*compensated(weights, hessians, 4, 3)).tolist() == [[[-8.0, 0.0, 1.0]]]


@pytest.mark.parametrize("rows", [1, 5, 500])
def test_no_output_is_worse_than_rounded_to_nearest(rows: int) -> None:
    """Few inputs too, whose H has no inverse. The error is that of the products themselves."""
    weights = torch.randn(1, 64, 96, generator=torch.Generator().manual_seed(rows))
    given = _inputs(rows, 96, rows)
    hessian = (given.T @ given)[None]
    error = {}
    for name, coded in (("calibrated", compensated(weights, hessian, 4, 32)), ("nearest", rounded(weights, 4, 32))):
        error[name] = (given.double() @ (weights - expanded(*coded))[0].double().T).square().sum(dim=0)
    assert bool((error["calibrated"] <= error["nearest"] * (1 + 1e-4)).all())
    assert float(error["calibrated"].sum()) < 0.7 * float(error["nearest"].sum())


def test_inputs_that_tell_nothing_round_to_nearest() -> None:
    """Uncorrelated inputs of the same size leave nothing to make good; no inputs at all count as those."""
    weights = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    hessians = torch.stack((torch.eye(32) * 3, torch.zeros(32, 32)))
    for found, expected in zip(compensated(weights, hessians, 4, 32), rounded(weights, 4, 32), strict=True):
        assert torch.equal(found, expected)


def test_factor() -> None:
    rows = _inputs(30, 16)
    hessian = rows.T @ rows
    factor = inverse_factor(hessian[None])[0].double()
    assert torch.equal(factor, factor.triu())
    damped = hessian.double() + DAMPING * hessian.double().diagonal().mean() * torch.eye(16)
    assert torch.allclose(factor.T @ factor @ damped, torch.eye(16, dtype=torch.float64), atol=1e-3)
