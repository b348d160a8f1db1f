"""Early attention: forecast with the target's router, after the next block's attention on a stand-in for its input.

While the experts of layer l wait or run, block l+1 runs its attention on r_l plus a stand-in for the layer's output.
Its cache holds the true keys and values of the past, so only the newest position is approximate. The target's norm and
router follow. Only the stand-in is fitted: default vectors, or maps of low rank by least squares.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from expertcast.predictors.base import Predictor, PredictorConfig, RouterState
from expertcast.predictors.baselines import ThroughRouter
from expertcast.predictors.folded import Maps, mixed, router_map
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape

# The stand-in for the output of a MoE layer
#
# A layer's output is sum_k w_k y_e(s) over its routed experts, plus the output of its shared experts. Default vectors
# replace y_e by its mean (rank 0; Speculating Experts, section 3.1). Here y_e(s) = b_e + z A_e, where z = s P - c are
# the R directions in which the layer's input varies most. Least squares needs only sums over tokens.

MOST_RANK = 4096
_CHUNK = 256
"""Tokens whose mixed maps are in memory at once."""


class StandIn(nn.Module):
    """Stand-in for the output of each MoE layer: a module of buffers, initially zero, in a predictor's state dict.

    Args:
        shape: shape of the model.
        rank: R; 0 keeps the means only.
        device: device of the tensors.
    """

    projection_LDR: Tensor
    """P, fp32."""
    centre_LR: Tensor
    """c, fp32."""
    map_LEZD: Tensor
    """b_e and A_e, Z = R + 1 rows for 1 and z, bf16; zero for experts without tokens."""
    shared_LZD: Tensor
    """The same for all shared experts together, fp32; zero for models without."""

    def __init__(self, shape: ModelShape, rank: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        layers, experts, hidden, self.rank = shape.layers, shape.experts, shape.hidden, rank

        def zeros(name: str, *size: int, dtype: torch.dtype = torch.float32) -> None:
            self.register_buffer(name, torch.zeros(size, dtype=dtype, device=device))

        zeros("projection_LDR", layers, hidden, rank)
        zeros("centre_LR", layers, rank)
        zeros("map_LEZD", layers, experts, rank + 1, hidden, dtype=torch.bfloat16)
        zeros("shared_LZD", layers, rank + 1, hidden)

    def equals(self, other: StandIn) -> bool:
        """Return whether all tensors are equal."""
        theirs = other.state_dict()
        return all(torch.equal(tensor.cpu(), theirs[name].cpu()) for name, tensor in self.state_dict().items())

    def directions(self, layer: int, router_input_TD: Tensor) -> Tensor:
        """Return z = s P - c [T, R] in fp32 for inputs of a layer."""
        return torch.addmm(self.centre_LR[layer], router_input_TD.float(), self.projection_LDR[layer], beta=-1)

    def output(self, layer: int, router_input_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the stand-in for a layer's output [T, D] in fp32.

        Args:
            layer: MoE layer.
            router_input_TD: s_l.
            ids_TK: experts of each token.
            weights_TK: the model's combine weights of these experts.
        """
        map_EV, shared_V = self.map_LEZD[layer].flatten(1), self.shared_LZD[layer].flatten()
        if len(ids_TK) == 1:  # fewer operations than the sum below
            mixed_ZD = mixed(map_EV, shared_V, ids_TK, weights_TK).view(self.shared_LZD.shape[1:])
            return torch.addmm(mixed_ZD[:1], self.directions(layer, router_input_TD), mixed_ZD[1:])
        outputs = []
        parts = (torch.split(each, _CHUNK) for each in (ids_TK, weights_TK, router_input_TD))
        for own_TK, weight_TK, input_TD in zip(*parts, strict=True):
            mixed_TV = shared_V + functional.embedding_bag(
                own_TK, map_EV, mode="sum", per_sample_weights=weight_TK.to(map_EV.dtype)
            )
            z_TZ = functional.pad(self.directions(layer, input_TD), (1, 0), value=1.0)
            outputs.append(torch.bmm(z_TZ.unsqueeze(1), mixed_TV.view(*z_TZ.shape, -1)).squeeze(1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@dataclass(kw_only=True)
class EarlyConfig(PredictorConfig):
    """Options of predictors that read early attention."""

    stand_in_rank: Annotated[int, Field(ge=0, le=MOST_RANK)] | None = None
    """Rank of the stand-in for each expert; taken from the traces if none."""


class LooksEarly(Predictor):
    """Base of predictors that may read early attention; holds the stand-in."""

    held: StandIn | None
    """The stand-in; None if the predictor does not read early attention."""

    def set_stand_in(self, stand_in: StandIn) -> None:
        """Copy the stand-in of the traces; its rank must be that of the config."""
        assert self.held is not None
        self.held.load_state_dict(stand_in.state_dict())

    def stand_in(self, state: RouterState) -> Tensor:
        """Return r_l plus the stand-in for the layer's output, [T, D] in fp32."""
        assert self.held is not None
        output_TD = self.held.output(state.layer, state.router_input_TD, state.topk_ids_TK, state.topk_weights_TK)
        return state.residual_TD.float() + output_TD

    def early_input(self, state: RouterState, ahead: int) -> Tensor:
        """Return LN_{l+ahead} of the early residual, [T, D].

        Raises:
            ExpertcastError: the state has no early attention.
        """
        if state.early_TD is None:
            raise ExpertcastError(
                f"{self.name} reads early attention, which these traces lack: collect them again without "
                "--early-rank none, or choose other inputs"
            )
        return self.view[state.layer + ahead].router_input(state.early_TD)


class EarlyAttention(LooksEarly, ThroughRouter):
    """Forecasts layer l+n by applying its norm and router to the early residual of layer l+1."""

    name: ClassVar[str] = "early_attention"
    config_class: ClassVar[type[PredictorConfig]] = EarlyConfig
    config: EarlyConfig
    uses_early = True

    def __init__(self, config: PredictorConfig, shape: ModelShape) -> None:
        assert isinstance(config, EarlyConfig)
        super().__init__(config, shape)
        self.held = StandIn(shape, config.stand_in_rank or 0)

    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        """Return LN_{l+ahead} of the early residual, [T, D]."""
        return self.early_input(state, ahead)

    def maps(self, layer: int, ahead: int) -> Maps | None:
        found = router_map(self.view[layer + ahead])
        return None if found is None else Maps(of={"early": found[0]}, bias_X=found[1])
