"""Recursive least squares against the normal equations of all rows at once, in fp64."""

from __future__ import annotations

import pytest
import torch

from expertcast.runtime.engine.refit import RecursiveRidge

FEATURES, OUTPUTS, PRIOR = 12, 5, 30.0


@pytest.mark.parametrize("keep", [1.0, 0.9])
def test_equals_batch_ridge_about_the_frozen_map(keep: float) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = [torch.randn(rows, FEATURES, generator=generator) + 0.5 for rows in (7, 32, 1, 32, 19)]
    frozen_GE = torch.randn(FEATURES + 1, OUTPUTS, generator=generator, dtype=torch.float64)
    true_GE = frozen_GE + torch.randn(FEATURES + 1, OUTPUTS, generator=generator, dtype=torch.float64)
    ridge = RecursiveRidge(FEATURES, OUTPUTS, prior=PRIOR)
    x_NG, y_NE, weight_N = torch.empty(0, FEATURES + 1), torch.empty(0, OUTPUTS), torch.empty(0)
    for x_NF in blocks:
        own_NG = torch.cat([x_NF.double(), torch.ones(len(x_NF), 1)], dim=1)
        own_NE = own_NG @ true_GE + torch.randn(len(x_NF), OUTPUTS, generator=generator)
        ridge.add(x_NF, (own_NE - own_NG @ frozen_GE).float(), keep=keep)
        x_NG, y_NE = torch.cat([x_NG.double(), own_NG]), torch.cat([y_NE.double(), own_NE])
        weight_N = torch.cat([weight_N * keep, torch.ones(len(x_NF))])
        # rows of zeros with weight PRIOR that ask for the frozen map: what a prior is, as data
        all_NG = torch.cat([x_NG * weight_N[:, None].double().sqrt(), PRIOR**0.5 * torch.eye(FEATURES + 1)])
        all_NE = torch.cat([y_NE * weight_N[:, None].double().sqrt(), PRIOR**0.5 * frozen_GE])
        expected_GE = torch.linalg.lstsq(all_NG, all_NE).solution
        change_GE = ridge.solve()
        assert change_GE is not None
        assert torch.allclose(frozen_GE + change_GE, expected_GE, atol=2e-5)


def test_nothing_seen_changes_nothing_and_no_answer_is_none() -> None:
    ridge = RecursiveRidge(3, 2, prior=1.0)
    change_GE = ridge.solve()
    assert change_GE is not None
    assert not change_GE.any()
    ridge.add(torch.full((4, 3), float("nan")), torch.zeros(4, 2))
    assert ridge.solve() is None
