"""Row B12 word by word: x = A q + pos_l; h = x + C SiLU(B x); theta = W_head LN(h)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from expertcast.predictors.estimator import EstimatorNetwork

PAIRS, FEATURES, EXPERTS = 3, 10, 6


def network() -> EstimatorNetwork:
    """With weights in which every term of the equation is worth something."""
    made = EstimatorNetwork(PAIRS, FEATURES, EXPERTS, width=8, expansion=2.0)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return made.requires_grad_(False)


def theta(net: EstimatorNetwork, q_F: Tensor, pair: int) -> list[float]:
    """One token's logits, number by number."""
    columns: Callable[[Tensor], list[list[float]]] = lambda matrix: matrix.T.tolist()  # noqa: E731
    project = columns(net.projection_PFW[pair])
    x = [
        sum(a * q for a, q in zip(row, q_F.tolist(), strict=True)) + position
        for row, position in zip(project, net.position_PW[pair].tolist(), strict=True)
    ]
    up = [sum(b * v for b, v in zip(row, x, strict=True)) for row in columns(net.up_WH)]
    silu = [v / (1 + math.exp(-v)) for v in up]
    back = [sum(c * v for c, v in zip(row, silu, strict=True)) for row in columns(net.down_HW)]
    h = [v + added for v, added in zip(x, back, strict=True)]
    mean = sum(h) / len(h)
    spread = math.sqrt(sum((v - mean) ** 2 for v in h) / len(h) + net.norm.eps)
    scaled = zip(h, net.norm.weight.tolist(), net.norm.bias.tolist(), strict=True)
    normed = [(v - mean) / spread * weight + bias for v, weight, bias in scaled]
    return [sum(w * v for w, v in zip(row, normed, strict=True)) for row in columns(net.head_PWE[pair])]


def test_the_network_is_the_papers_equation() -> None:
    """The residual connection and the position embedding among its terms, in training's form and in that of a step."""
    net = network()
    q_PTF = torch.randn(PAIRS, 2, FEATURES, generator=torch.Generator().manual_seed(1))
    together_PTE = net(q_PTF)
    for pair in range(PAIRS):
        for token in range(2):
            expected = torch.tensor(theta(net, q_PTF[pair, token], pair))
            torch.testing.assert_close(together_PTE[pair, token], expected, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(net.one(q_PTF[pair, token : token + 1], pair)[0], expected, rtol=1e-3, atol=1e-3)
