"""The network of `next_token`: what the text has routed so far, and one residual, to the routing of the coming tokens.

B sequences (or examples), N = L * E experts of all layers, A averages, D hidden size, W width, S steps rolled out.

    z_0 = state(averages, last routing) + residual's map        one map per trigger
    z_{s+1} = z_s + f(z_s)                                       a learned step from one token to the next
    logits_s = head(z_s) + what the averages alone say
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

FEW, MANY = 2e-3, 1 - 2e-3
"""Averages are kept within these before their log-odds are taken."""


class NextTokenNetwork(nn.Module):
    """Logits of every expert's use at S tokens, and in the mean of the tokens after them.

    Args:
        experts: N.
        hidden: D.
        averages: A moving averages of the routing.
        triggers: points in a token's pass at which a forecast can be made, each with its own residual.
        steps: S.
        width: W.
        spread: by what averages and last routing are multiplied to be of unit size.
    """

    usual_N: Tensor

    def __init__(
        self, *, experts: int, hidden: int, averages: int, triggers: int, steps: int, width: int, spread: float
    ) -> None:
        super().__init__()
        self.steps, self._spread = steps, spread
        self.register_buffer("usual_N", torch.zeros(experts))
        """Log-odds of each expert's use over the train split."""
        self.state = nn.Linear((averages + 1) * experts, width)
        self.residual = nn.ModuleList(nn.Linear(hidden, width) for _ in range(triggers))
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.step = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
        )
        self.head = nn.Linear(width, experts, bias=False)
        self.later_head = nn.Linear(width, experts, bias=False)
        for head in (self.head, self.later_head):  # it begins as what the averages say, and adds to it
            nn.init.zeros_(head.weight)
        rows = steps + 1
        self.bias_RN = nn.Parameter(torch.zeros(rows, experts))
        self.usual_R = nn.Parameter(torch.ones(rows))
        self.average_RA = nn.Parameter(torch.full((rows, averages), 0.5 / averages))
        self.last_R = nn.Parameter(torch.zeros(rows))

    def start(self, average_BAN: Tensor, last_BN: Tensor) -> Tensor:
        """What the state of the text adds to z_0 [B, W]: the same at every trigger of a token."""
        x = torch.cat([average_BAN.flatten(1), last_BN], dim=1) * self._spread
        return self.state(x)  # type: ignore[no-any-return]

    def forward(self, start_BW: Tensor, average_BAN: Tensor, last_BN: Tensor, residual_BD: Tensor, at: int) -> Tensor:
        """Logits [B, S + 1, N]; the last row is the mean of the tokens after the first S.

        `start_BW` is what :meth:`start` gave for `average_BAN`, the moving averages of the routing, and `last_BN`, the
        last token's router probabilities; `residual_BD` is standardised, and of the trigger with the number `at`.
        """
        z_BW = functional.silu(self.norm(start_BW + self.residual[at](residual_BD)))
        z_BW = z_BW + self.mix(z_BW)
        steps = []
        for _ in range(self.steps):
            steps.append(z_BW)
            z_BW = z_BW + self.step(z_BW)
        coming_BSN = self.head(torch.stack(steps, dim=1))
        later_B1N = self.later_head(z_BW)[:, None]
        return torch.cat([coming_BSN, later_B1N], dim=1) + self._known(average_BAN, last_BN)

    def _known(self, average_BAN: Tensor, last_BN: Tensor) -> Tensor:
        """Logits [B, S + 1, N] without any mixing of experts."""
        odds_BAN = average_BAN.clamp(FEW, MANY).logit() - self.usual_N
        known_BRN = torch.einsum("ban,ra->brn", odds_BAN, self.average_RA) + self.bias_RN
        return known_BRN + self.usual_R[:, None] * self.usual_N + self.last_R[:, None] * last_BN[:, None]
