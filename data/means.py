"""Streaming means of what experts put out: the sums from which default vectors are made.

Where a layer's experts' output is a term of the residual stream, an expert's default vector is its mean output, with
the factor that it has there. The shared one is the mean of what else comes to the stream: of the block's shared
experts, or, where the layer adds more beside its block or multiplies, of the whole step to the next MoE layer's
residual less the routed part. Where the output is no term (it is normalised, gated or projected first), the mean step
is all there is.

L MoE layers, E routed experts per layer, D hidden size, I inner width of an expert, S rows (token-expert pairs),
G groups of rows.
The down projection is linear, so the mean output of expert e is W_down,e applied to the mean of its inner activations
(plus its bias): only I numbers per expert are summed, and no expert runs twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from expertcast.data.packed_experts import down_projection
from expertcast.predictors.baselines import DefaultVectors
from expertcast.predictors.view import Adds, MoELayer, MoEView

if TYPE_CHECKING:
    from expertcast.data.experts import Experts


class MeanOutputs:
    """Sums over tokens, per layer; a batch is summed in fp32, batches in fp64."""

    def __init__(self, view: MoEView) -> None:
        self.inner_EI: list[Tensor] = []
        self.count_E: list[Tensor] = []
        self.shared_D: list[Tensor] = []
        for layer in view:
            device = down_projection(layer.experts).device
            self.inner_EI.append(torch.zeros(layer.num_experts, inner_width(layer), dtype=torch.float64, device=device))
            self.count_E.append(torch.zeros(layer.num_experts, dtype=torch.int64, device=device))
            self.shared_D.append(torch.zeros(layer.hidden_size, dtype=torch.float64, device=device))
        self.token_count = 0

    def add_experts(self, layer: int, inner_SI: Tensor, expert_G: Tensor, count_G: Tensor) -> None:
        """Add inner activations of one batch, or of some experts in it.

        Args:
            layer: whose experts.
            inner_SI: rows of one expert lie together.
            expert_G: whose rows they are, group by group; each expert once.
            count_G: how many rows each of them has.
        """
        self.add_sums(layer, sums_of(inner_SI, count_G), expert_G, count_G)

    def add_sums(self, layer: int, sums_GI: Tensor, expert_G: Tensor, count_G: Tensor) -> None:
        """The same where the rows have been summed, as :func:`sums_of` does."""
        self.inner_EI[layer].index_add_(0, expert_G, sums_GI.double())
        self.count_E[layer].index_add_(0, expert_G, count_G)

    def add_shared(self, layer: int, shared_TD: Tensor) -> None:
        """Add what one batch's tokens get beside their experts' output."""
        self.shared_D[layer] += shared_TD.sum(0, dtype=torch.float32)

    def merge(self, other: MeanOutputs) -> None:
        """Add the sums of another part of the text."""
        for own, added in zip(self.tensors(), other.tensors(), strict=True):
            own += added
        self.token_count += other.token_count

    @torch.no_grad()
    def default_vectors(self, experts: Experts) -> DefaultVectors:
        """The means so far, on the CPU; zero for experts that no token was routed to."""
        means = [_mean_outputs(experts, *sums) for sums in zip(experts.view, self.inner_EI, self.count_E, strict=True)]
        return DefaultVectors(
            expert_LED=torch.stack(means),
            shared_LD=torch.stack([(sums_D / max(self.token_count, 1)).float().cpu() for sums_D in self.shared_D]),
            count_LE=torch.stack([count_E.cpu() for count_E in self.count_E]),
            token_count=self.token_count,
        )

    def tensors(self) -> list[Tensor]:
        """Every sum, to be added up over ranks in place; `token_count` is beside them."""
        return [tensor for _, tensor in self._named()]

    def as_tensors(self) -> dict[str, Tensor]:
        """Everything, on the CPU, to be saved; :meth:`load_tensors` is its inverse, bit for bit."""
        return {name: tensor.cpu() for name, tensor in self._named()} | {"token_count": torch.tensor(self.token_count)}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what :meth:`as_tensors` gave, with the same names and shapes."""
        self.token_count = int(tensors["token_count"])
        for name, tensor in self._named():
            tensor.copy_(tensors[name])

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for name in ("inner_EI", "count_E", "shared_D"):
            for layer, tensor in enumerate(getattr(self, name)):
                yield f"{name}.{layer}", tensor


def sums_of(inner_SI: Tensor, count_G: Tensor) -> Tensor:
    """[G, I] fp32: sums over groups of neighbouring rows, `count_G` of them in each."""
    return torch.segment_reduce(inner_SI.float(), "sum", lengths=count_G, axis=0, unsafe=True)


def inner_width(layer: MoELayer) -> int:
    """I"""
    shape = down_projection(layer.experts).shape  # [E, D, I], or [E, I, D] when transposed
    return shape[1 if layer.experts.is_transposed else 2]


def adds_experts(layer: MoELayer) -> bool:
    """Whether an expert's mean output follows from its mean inner activations, and is a term of the residual stream."""
    return layer.adds is not None and not getattr(layer.experts, "has_post_expert_norm", False)


def adds_block(layer: MoELayer) -> bool:
    """Whether the layer adds its block's output to the residual stream, as it is and nothing else."""
    return adds_experts(layer) and layer.adds == Adds()


def _mean_outputs(experts: Experts, layer: MoELayer, inner_EI: Tensor, count_E: Tensor) -> Tensor:
    """[E, D] fp32 on the CPU: the down projection of each expert's mean inner activation."""
    if not adds_experts(layer) or layer.adds is None:
        return torch.zeros(layer.num_experts, layer.hidden_size)
    mean_EI = (inner_EI / count_E.clamp(min=1)[:, None]).float()
    rows_ED = mean_EI.new_zeros(layer.num_experts, layer.hidden_size)
    for row_D, mean_I, (weight_ID, bias_D) in zip(rows_ED, mean_EI, down_projections(experts, layer), strict=True):
        row_D.copy_(mean_I @ weight_ID)
        if bias_D is not None:
            row_D += bias_D
    return (rows_ED * (count_E > 0)[:, None] * layer.adds.factor).cpu()


def down_projections(experts: Experts, layer: MoELayer) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Each expert's down projection [I, D] and its bias [D], if it has one: fp32 on the layer's device, in memory that
    the next one takes."""
    device = down_projection(layer.experts).device
    held: Tensor | None = None
    # one expert at a time, in the same memory: an fp32 copy of all weights may not fit, nor may the weights themselves
    for weights in experts.weights(layer):
        if held is None:
            held = torch.empty_like(weights["down_proj"], dtype=torch.float32, device=device)
        held.copy_(weights["down_proj"])
        bias = weights["down_proj_bias"].to(device).float() if layer.experts.has_bias else None
        yield (held if layer.experts.is_transposed else held.T), bias
