"""The network of `next_token`: what the text has routed so far, the last residual and the coming token's id, to the
routing of that token and of those after it.

B sequences (or examples), N = L * E experts of all layers, J = L * K experts that a token uses, A averages, P numbers
that stand for an expert, D hidden size, V known token ids, W width, S tokens forecast one by one.

    u   = averages over the text of the sum of its experts' P numbers        kept up to date, never computed anew
    z_0 = z + mix(z),  z = SiLU(norm(state(u) + residual's map + token's row))
    z_h = z_0 + step_h(z_0)                                                  the h-th token after it; h = S: later ones
    logits_h = head(z_h) + bias_h

A token names J of the N experts: what reading it costs, and what a forecast reads, does not grow with N but for the
head. An earlier form took the averages of all N experts themselves, and stepped from token to token: five times the
work.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

GAIN = 4.0
"""What rows of ids are multiplied by: each is trained by few examples, and must get somewhere in them."""


class NextTokenNetwork(nn.Module):
    """Logits of every expert's use at S tokens, and in the mean of the tokens after them.

    Args:
        experts: N.
        used: J.
        hidden: D.
        averages: A moving averages of the routing.
        inner: P.
        known_ids: V.
        steps: S.
        width: W.
    """

    def __init__(
        self, *, experts: int, used: int, hidden: int, averages: int, inner: int, known_ids: int, steps: int, width: int
    ) -> None:
        super().__init__()
        self.expert_NP = nn.Parameter(torch.randn(experts, inner) / used**0.5)
        self.state = nn.Linear(averages * inner, width)
        self.residual = nn.Linear(hidden, width)
        self.token_VW = nn.Parameter(torch.zeros(known_ids + 1, width))
        """Row V is of ids that are not known."""
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.step = nn.Linear(width, steps * width)
        self.head = nn.Linear(width, experts, bias=False)
        nn.init.zeros_(self.head.weight)  # it begins with how often experts are used
        self.bias_RN = nn.Parameter(torch.zeros(steps + 1, experts))

    def stand_ins(self, ids_XJ: Tensor) -> Tensor:
        """What stands for tokens that use some experts (numbered 0..N-1): [X, P]."""
        return functional.embedding_bag(ids_XJ, self.expert_NP, mode="sum")

    def first(self, text_BF: Tensor, residual_BD: Tensor, row_B: Tensor) -> Tensor:
        """z_0 [B, W], from averages `text_BF` [B, A * P], standardised residuals and the rows of the tokens' ids."""
        x_BW = self.state(text_BF) + self.residual(residual_BD) + GAIN * self.token_VW[row_B]
        z_BW = functional.silu(self.norm(x_BW))
        return z_BW + self.mix(z_BW)  # type: ignore[no-any-return]

    def row(self, z_BW: Tensor, row: int) -> Tensor:
        """Logits [B, N] of one row, from z_0: of the token itself (0), the `row`-th after it, or all later ones (S)."""
        if row:
            part = slice((row - 1) * z_BW.shape[1], row * z_BW.shape[1])
            z_BW = z_BW + functional.linear(z_BW, self.step.weight[part], self.step.bias[part])
        logits_BN: Tensor = self.head(z_BW) + self.bias_RN[row]
        return logits_BN

    def forward(self, text_BF: Tensor, residual_BD: Tensor, row_B: Tensor) -> Tensor:
        """Logits [B, S + 1, N] of all rows; arguments are those of :meth:`first`."""
        z_BW = self.first(text_BF, residual_BD, row_B)
        z_B1W = z_BW[:, None]
        z_BRW = torch.cat([z_B1W, z_B1W + self.step(z_BW).view(len(z_BW), -1, z_BW.shape[1])], dim=1)
        if len(z_BRW) == 1:  # the same, in one operation
            return torch.addmm(self.bias_RN, z_BRW[0], self.head.weight.t())[None]
        logits_BRN: Tensor = self.head(z_BRW) + self.bias_RN
        return logits_BRN
