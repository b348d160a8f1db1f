"""Default vectors: what each expert, and the shared experts, put out on average.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
Source: Speculating Experts, section 3.1 (rows B1 and B2 of the definitions).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True)
class DefaultVectors:
    """Mean outputs in fp32, with the counts they come from so that two sets can be merged exactly."""

    expert_LED: Tensor
    """d_{l,e}: raw mean of expert e's output over the tokens routed to it; zero where it was never routed to."""
    shared_LD: Tensor
    """Mean output of the shared experts; zero for models without."""
    count_LE: Tensor
    """Tokens routed to each expert (int64)."""
    token_count: int
    """Tokens seen."""

    def as_tensors(self) -> dict[str, Tensor]:
        """By field name, as a file of tensors holds them."""
        return {field.name: torch.as_tensor(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> DefaultVectors:
        """What :meth:`as_tensors` gave."""
        return cls(**{**tensors, "token_count": int(tensors["token_count"])})  # type: ignore[arg-type]


def layer_default(expert_ED: Tensor, shared_D: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """d_l [T, D] = sum over routed experts of weight x default vector, plus the shared experts' mean.

    The equation of section 3.1 in fp32: `expert_ED` and `shared_D` are the layer's default vectors, `ids_TK` the experts
    that its tokens are routed to, `weights_TK` the model's own combine weights.
    """
    mixed_TD = torch.einsum("tk,tkd->td", weights_TK.float(), expert_ED.float()[ids_TK])
    return mixed_TD + shared_D.float()
