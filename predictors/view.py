"""The view of a model's MoE layers: what predictors, collection and the runtime stand on.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
Finding the layers in a model is :mod:`expertcast.data.discovery`; this module only describes them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from expertcast.predictors.routing_rule import route


@dataclass(frozen=True, slots=True, kw_only=True)
class MoELayer:
    """One MoE layer of a `transformers` model; modules belong to the model and are never changed here."""

    index: int
    """MoE layer index, 0..L-1 (dense layers are not counted)."""
    block_name: str
    """Path of the MoE block in the model."""
    norm_name: str
    """Path of the norm whose output is the block's input."""
    router_name: str
    """Path of the router module."""
    experts_name: str
    """Path of the decorated experts module."""
    decoder: nn.Module
    """What the block stands in: a decoder layer, attention included."""
    block: nn.Module
    norm: nn.Module
    router: nn.Module
    experts: nn.Module
    num_experts: int
    """E"""
    top_k: int
    """K"""
    hidden_size: int
    """D"""
    has_shared: bool
    """Whether shared experts add to the block's output."""

    def router_input(self, residual_TD: Tensor) -> Tensor:
        """LN of this layer over [T, D] of any float dtype: s_l for its own residual, q for an earlier one's r + d."""
        parameter = next(self.norm.parameters(), None)
        dtype = residual_TD.dtype if parameter is None else parameter.dtype
        output: Tensor = self.norm(residual_TD.to(dtype))
        return output

    def router_logits(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, E] that this layer's own router gives for [T, D] inputs."""
        logits: Tensor = self.router(hidden_TD)[0]
        return logits

    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids (int64) and combine weights [T, K] that this layer's router would return with these logits."""
        return route(self, logits_TE)


@dataclass(frozen=True, slots=True)
class MoEView:
    """The MoE layers of one model, first to last."""

    layers: tuple[MoELayer, ...]
    model_id: str
    """Hub id or local path the model came from."""

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[MoELayer]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> MoELayer:
        return self.layers[index]

    @property
    def shape(self) -> ModelShape:
        """L, E, K and D of the model."""
        first = self.layers[0]
        layers, experts = len(self.layers), first.num_experts
        return ModelShape(layers=layers, experts=experts, top_k=first.top_k, hidden=first.hidden_size)

    def fingerprint(self) -> str:
        """SHA-256 over the routers' weights, rounded to bf16 so that the loading dtype does not matter."""
        digest = hashlib.sha256()
        for layer in self.layers:
            for name, tensor in sorted(layer.router.state_dict().items()):
                digest.update(f"{layer.index}.{name}{tuple(tensor.shape)}".encode())
                rounded = tensor.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()
                digest.update(rounded.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The four numbers that a predictor is built for."""

    layers: int
    experts: int
    top_k: int
    hidden: int

    def as_dict(self) -> dict[str, int]:
        """By letter, as checkpoints and traces write it."""
        return {"L": self.layers, "E": self.experts, "K": self.top_k, "D": self.hidden}

    @classmethod
    def from_dict(cls, values: dict[str, int]) -> ModelShape:
        """What :meth:`as_dict` gave."""
        return cls(layers=values["L"], experts=values["E"], top_k=values["K"], hidden=values["D"])


def overfetched(factor: float, top_k: int, experts: int) -> int:
    """Experts fetched for one token at an overfetch factor: ceil(factor x K), never more than there are (row A20).

    The one rule of runtime, simulator and evaluation. The product is rounded to nine decimals first: 1.12 x 25 is 28,
    and 28.000000000000004 in floating point.
    """
    return min(experts, math.ceil(round(factor * top_k, 9)))
