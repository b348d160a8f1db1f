"""What a MoE layer puts out, from its input and routing alone: each expert as a mean and a map of low rank.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token, R rank.

A layer's output is sum_k w_k y_e(s) over its routed experts plus that of shared ones. Default vectors put the mean of
y_e in its place (rank 0; Speculating Experts, section 3.1); here y_e(s) = b_e + z A_e with z = s P - c, the R
directions in which the layer's input varies most. Least squares, so nothing is trained but sums over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from expertcast.predictors.quasi_hidden import weighted_rows
from expertcast.predictors.view import ModelShape

MOST_RANK = 4096
_FEW = 16
"""Up to so many tokens each reads the maps of its own experts; beyond, all experts' maps are multiplied at once."""


@dataclass(slots=True, kw_only=True)
class StandIn:
    """The tensors, on any device."""

    projection_LDR: Tensor
    """P, fp32."""
    centre_LR: Tensor
    """c, fp32."""
    base_LED: Tensor
    """b_e, fp32; zero where no token was routed to the expert."""
    map_LERD: Tensor
    """A_e, bf16."""
    shared_LD: Tensor
    """Mean output of the shared experts, fp32; zero for models without."""
    shared_map_LRD: Tensor
    """Their map, bf16."""

    @property
    def rank(self) -> int:
        """R"""
        return self.projection_LDR.shape[2]

    @classmethod
    def of_shape(cls, shape: ModelShape, rank: int, device: torch.device | str = "cpu") -> StandIn:
        """All zero."""
        layers, experts, hidden = shape.layers, shape.experts, shape.hidden

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            projection_LDR=zeros(layers, hidden, rank),
            centre_LR=zeros(layers, rank),
            base_LED=zeros(layers, experts, hidden),
            map_LERD=zeros(layers, experts, rank, hidden, dtype=torch.bfloat16),
            shared_LD=zeros(layers, hidden),
            shared_map_LRD=zeros(layers, rank, hidden, dtype=torch.bfloat16),
        )

    def to(self, device: torch.device | str) -> StandIn:
        """The same on a device."""
        return StandIn(**{name: tensor.to(device) for name, tensor in self.as_tensors().items()})

    def as_tensors(self) -> dict[str, Tensor]:
        """By field name, as a file of tensors holds them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def directions(self, layer: int, router_input_TD: Tensor) -> Tensor:
        """z = s P - c [T, R] of a layer's inputs, fp32."""
        return router_input_TD.float() @ self.projection_LDR[layer] - self.centre_LR[layer]

    def output(self, layer: int, router_input_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """What the layer puts out [T, D], in fp32.

        Args:
            layer: whose output.
            router_input_TD: s_l.
            ids_TK, weights_TK: the experts that tokens are routed to, and the model's own combine weights.
        """
        weights_TK = weights_TK.float()
        mixed_TD = weighted_rows(weights_TK, self.base_LED[layer], ids_TK) + self.shared_LD[layer]
        if not self.rank:
            return mixed_TD
        z_TR = self.directions(layer, router_input_TD)
        mixed_TD = torch.addmm(mixed_TD, z_TR, self.shared_map_LRD[layer].float())
        map_ERD = self.map_LERD[layer]
        if len(ids_TK) <= _FEW:
            wz_T1X = (weights_TK[:, :, None] * z_TR[:, None]).flatten(1).unsqueeze(1)
            map_TXD = map_ERD.index_select(0, ids_TK.flatten()).view(len(ids_TK), -1, map_ERD.shape[2]).float()
            return mixed_TD + torch.bmm(wz_T1X, map_TXD).squeeze(1)
        weight_TE = weights_TK.new_zeros(len(ids_TK), len(map_ERD)).scatter_(1, ids_TK, weights_TK)
        wz_TX = (weight_TE[:, :, None] * z_TR[:, None]).flatten(1)
        return torch.addmm(mixed_TD, wz_TX, map_ERD.flatten(0, 1).float())


class HeldStandIn(nn.Module):
    """A stand-in as part of a predictor's state dict."""

    def __init__(self, shape: ModelShape, rank: int) -> None:
        super().__init__()
        for name, tensor in StandIn.of_shape(shape, rank).as_tensors().items():
            self.register_buffer(name, tensor)

    def take(self, stand_in: StandIn) -> None:
        """Copy the values of one of the same shape."""
        for name, tensor in stand_in.as_tensors().items():
            self.get_buffer(name).copy_(tensor)

    @property
    def tensors(self) -> StandIn:
        """The tensors as they are held."""
        return StandIn(**{field.name: self.get_buffer(field.name) for field in fields(StandIn)})

    def output(self, layer: int, router_input_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """:meth:`StandIn.output`, with the same `layer`, `router_input_TD`, `ids_TK` and `weights_TK`."""
        return self.tensors.output(layer, router_input_TD, ids_TK, weights_TK)
