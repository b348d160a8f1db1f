"""Streaming means of experts' outputs, from which default vectors are made.

If a layer adds its experts' output to the residual stream, an expert's default vector is its mean output times the
factor of that sum. The shared vector is the mean of everything else that is added: the output of the shared experts,
or, if the layer adds more than its block or multiplies the block's output, the step to the next MoE layer's residual
minus the routed part. If the output is normalised, gated or projected first, the shared vector is the mean of the
whole step and the experts' vectors are zero.

L MoE layers, E routed experts per layer, D hidden size, I inner width of an expert, S rows (token-expert pairs),
G groups of rows.

The down projection is linear: the mean output of expert e is W_down,e applied to the mean of its inner activations,
plus its bias. So only I numbers per expert are summed, and each expert runs once.
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
    """Sums over tokens per layer, in fp32 within a batch and in fp64 over batches."""

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
        """Add inner activations of one batch, for all experts or some.

        Args:
            layer: MoE layer.
            inner_SI: inner activations, grouped by expert.
            expert_G: expert of each group; each expert at most once.
            count_G: number of rows of each group.
        """
        self.add_sums(layer, sums_of(inner_SI, count_G), expert_G, count_G)

    def add_sums(self, layer: int, sums_GI: Tensor, expert_G: Tensor, count_G: Tensor) -> None:
        """Add sums over groups of rows from :func:`sums_of`; other arguments as in :meth:`add_experts`."""
        self.inner_EI[layer].index_add_(0, expert_G, sums_GI.double())
        self.count_E[layer].index_add_(0, expert_G, count_G)

    def add_shared(self, layer: int, shared_TD: Tensor) -> None:
        """Add what the layer adds to one batch's residuals beside the routed experts' output."""
        self.shared_D[layer] += shared_TD.sum(0, dtype=torch.float32)

    def merge(self, other: MeanOutputs) -> None:
        """Add the sums of other tokens."""
        for own, added in zip(self.tensors(), other.tensors(), strict=True):
            own += added
        self.token_count += other.token_count

    @torch.no_grad()
    def default_vectors(self, experts: Experts) -> DefaultVectors:
        """Return the means so far on the CPU, zero for experts without tokens."""
        means = [_mean_outputs(experts, *sums) for sums in zip(experts.view, self.inner_EI, self.count_E, strict=True)]
        return DefaultVectors(
            expert_LED=torch.stack(means),
            shared_LD=torch.stack([(sums_D / max(self.token_count, 1)).float().cpu() for sums_D in self.shared_D]),
            count_LE=torch.stack([count_E.cpu() for count_E in self.count_E]),
            token_count=self.token_count,
        )

    def tensors(self) -> list[Tensor]:
        """Return every sum without `token_count`, for adding up over ranks in place."""
        return [tensor for _, tensor in self._named()]

    def as_tensors(self) -> dict[str, Tensor]:
        """Return the whole state on the CPU, for saving."""
        return {name: tensor.cpu() for name, tensor in self._named()} | {"token_count": torch.tensor(self.token_count)}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state from :meth:`as_tensors`, bit for bit."""
        self.token_count = int(tensors["token_count"])
        for name, tensor in self._named():
            tensor.copy_(tensors[name])

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for name in ("inner_EI", "count_E", "shared_D"):
            for layer, tensor in enumerate(getattr(self, name)):
                yield f"{name}.{layer}", tensor


def sums_of(inner_SI: Tensor, count_G: Tensor) -> Tensor:
    """Return [G, I] in fp32: sums over groups of `count_G` neighbouring rows."""
    return torch.segment_reduce(inner_SI.float(), "sum", lengths=count_G, axis=0, unsafe=True)


def inner_width(layer: MoELayer) -> int:
    """Return I, the inner width of the layer's experts."""
    shape = down_projection(layer.experts).shape  # [E, D, I], or [E, I, D] when transposed
    return shape[1 if layer.experts.is_transposed else 2]


def adds_experts(layer: MoELayer) -> bool:
    """Return whether the experts' output is linear in inner activations and added to the residual stream."""
    return layer.adds is not None and not getattr(layer.experts, "has_post_expert_norm", False)


def adds_block(layer: MoELayer) -> bool:
    """Return whether the layer adds exactly its block's output to the residual stream."""
    return adds_experts(layer) and layer.adds == Adds()


def _mean_outputs(experts: Experts, layer: MoELayer, inner_EI: Tensor, count_E: Tensor) -> Tensor:
    """Return [E, D] in fp32 on the CPU: the down projection of each expert's mean inner activation."""
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
    """Yield each expert's down projection [I, D] and its bias [D] or None, in fp32 on the layer's device.

    The next projection overwrites the memory of the one before.
    """
    device = down_projection(layer.experts).device
    held: Tensor | None = None
    # one expert at a time: neither an fp32 copy of all weights nor the weights themselves need to fit the memory
    for weights in experts.weights(layer, "down_proj"):
        if held is None:
            held = torch.empty_like(weights["down_proj"], dtype=torch.float32, device=device)
        held.copy_(weights["down_proj"])
        bias = weights["down_proj_bias"].to(device).float() if layer.experts.has_bias else None
        yield (held if layer.experts.is_transposed else held.T), bias
