"""The sums of one layer's regressions: of what each expert puts out, on a few directions of the layer's input.

The down projection is linear, so an expert's inner activations are summed in place of its outputs: no output of a
single expert is needed, and the layer runs as it does without this. The directions are chosen in the end, from more
than are asked for: they are those of all the text that was summed, as far as the text that the first choice was made
by shows them.

T tokens, D hidden size, E routed experts, K experts per token, I inner width of an expert, R rank, B = R or more
directions that are summed over, Y = B + 1 and Z = R + 1 with a constant.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from expertcast.data.directions import Moments, largest
from expertcast.data.experts import Experts
from expertcast.data.means import down_projections, inner_width
from expertcast.predictors.stand_in import StandIn
from expertcast.predictors.view import MoELayer

PRIOR_TOKENS = 16.0
"""Tokens' worth of holding maps back: an expert that few tokens reach keeps to its mean."""
_BESIDE = 40
"""Directions summed over beside those that are asked for."""


class ExpertSums:
    """Of the regressions of one layer's experts and of its shared experts' sum, which comes last.

    Args:
        rank: R
    """

    def __init__(self, layer: MoELayer, rank: int) -> None:
        self.layer, self._rank = layer, rank
        self._basis: tuple[Tensor, Tensor] | None = None
        """Where they start from [B], and the directions [D, B]."""
        self._linear = not getattr(layer.experts, "has_post_expert_norm", False)
        device = layer.experts.get_parameter("down_proj").device
        wide = 1 + (min(layer.hidden_size, rank + _BESIDE) if rank else 0)
        self._token_YY = torch.zeros(wide, wide, device=device)
        self._yy_EYY = torch.zeros(layer.num_experts + 1, wide, wide, device=device)
        self._inner_EYI = torch.zeros(layer.num_experts, wide, inner_width(layer), device=device)
        self._shared_YD = torch.zeros(wide, layer.hidden_size, device=device)

    @property
    def lacks_directions(self) -> bool:
        """Whether nothing can be added yet."""
        return self._basis is None and self._rank > 0

    def choose_among(self, moments: Moments) -> None:
        """Take the directions of the largest variance of some of the layer's inputs."""
        mean_D, directions_DB = moments.principal(len(self._token_YY) - 1)
        self._basis = mean_D @ directions_DB, directions_DB

    def add(self, hidden_TD: Tensor, ids_TK: Tensor) -> _Rows:
        """The layer's inputs and routing of one batch; what is returned takes the experts' part."""
        y_TY = self._y(hidden_TD)
        self._token_YY += y_TY.T @ y_TY
        return _Rows(self, y_TY, ids_TK)

    def add_expert(self, expert: int, y_SY: Tensor, inner_SI: Tensor) -> None:
        """The rows of one expert."""
        self._yy_EYY[expert] += y_SY.T @ y_SY
        if self._linear:
            # a copy: how a slice is aligned is another matter where the experts come in parts, and products round by it
            self._inner_EYI[expert] += y_SY.T @ inner_SI.to(torch.float32, copy=True)

    def add_shared(self, hidden_TD: Tensor, shared_TD: Tensor) -> None:
        """The layer's inputs, and what the shared experts put out for them."""
        y_TY = self._y(hidden_TD)
        self._yy_EYY[-1] += y_TY.T @ y_TY
        self._shared_YD += y_TY.T @ shared_TD.float()

    def solve_into(self, stand_in: StandIn, experts: Experts) -> None:
        """Directions, means and maps into a stand-in's rows of this layer.

        Args:
            stand_in: of the rank.
            experts: of the model; their weights are read once.
        """
        layer, map_YZ = self.layer.index, self._chosen(stand_in)
        zz_EZZ = map_YZ.T @ self._yy_EYY.double() @ map_YZ
        zi_EZI = map_YZ.T @ self._inner_EYI.double()
        total_ZZ = zz_EZZ[:-1].sum(dim=0)
        spread_Z = total_ZZ.diagonal() / total_ZZ[0, 0].clamp(min=1)
        spread_Z[0] = 1e-6  # the mean itself is not held back
        penalty_ZZ = (PRIOR_TOKENS * spread_Z).clamp(min=1e-12).diag()
        solved_EZZ = torch.linalg.inv(zz_EZZ + penalty_ZZ)
        if self._linear:
            for expert, (weight_ID, bias_D) in enumerate(down_projections(experts, self.layer)):
                solved_ZD = (solved_EZZ[expert] @ zi_EZI[expert]).float() @ weight_ID
                if bias_D is not None:
                    solved_ZD += (solved_EZZ[expert] @ zz_EZZ[expert, :, :1]).float() * bias_D
                stand_in.base_LED[layer, expert] = solved_ZD[0]
                stand_in.map_LERD[layer, expert] = solved_ZD[1:]
        shared_ZD = solved_EZZ[-1] @ map_YZ.T @ self._shared_YD.double()
        stand_in.shared_LD[layer] = shared_ZD[0]
        stand_in.shared_map_LRD[layer] = shared_ZD[1:]

    def _y(self, hidden_TD: Tensor) -> Tensor:
        if self._basis is None:
            return torch.ones(len(hidden_TD), 1, device=hidden_TD.device)
        centre_B, directions_DB = self._basis
        return nn.functional.pad(hidden_TD.float() @ directions_DB - centre_B, (1, 0), value=1.0)

    def _chosen(self, stand_in: StandIn) -> Tensor:
        """From what was summed over to the constant and the stand-in's directions [Y, Z], which are written to it."""
        total_YY = self._token_YY.double()
        map_YZ = total_YY.new_zeros(len(total_YY), self._rank + 1)
        map_YZ[0, 0] = 1
        if self._basis is None:
            return map_YZ
        centre_B, directions_DB = self._basis
        mean_B = total_YY[0, 1:] / total_YY[0, 0]
        chosen_BR = largest(total_YY[1:, 1:] / total_YY[0, 0] - torch.outer(mean_B, mean_B), self._rank)
        map_YZ[0, 1:], map_YZ[1:, 1:] = -mean_B @ chosen_BR, chosen_BR
        stand_in.projection_LDR[self.layer.index] = directions_DB.double() @ chosen_BR
        stand_in.centre_LR[self.layer.index] = (centre_B.double() + mean_B) @ chosen_BR
        return map_YZ


class _Rows:
    """Adds what enters the experts' down projections, which comes expert by expert in the kernel's order."""

    def __init__(self, sums: ExpertSums, y_TY: Tensor, ids_TK: Tensor) -> None:
        self._sums, self._y_TY = sums, y_TY
        ids_P, order_P = torch.sort(ids_TK.reshape(-1))  # as the kernel sorts them, ties as well
        self._token_P = order_P // ids_TK.shape[1]
        ends = torch.bincount(ids_P, minlength=sums.layer.num_experts).cumsum(0).tolist()
        self._starts = [0, *ends]

    def __call__(self, inner_SI: Tensor, expert_G: Tensor, count_G: Tensor) -> None:
        """See :data:`expertcast.data.experts.Inner`."""
        start = 0
        for expert, count in zip(expert_G.tolist(), count_G.tolist(), strict=True):
            first, end = self._starts[expert], start + count
            if count:
                token_S = self._token_P[first : first + count]
                self._sums.add_expert(expert, self._y_TY[token_S], inner_SI[start:end])
            start = end
