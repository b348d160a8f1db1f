"""All routed experts of a model in 8 or 4 bits on the computing device: what a self-draft computes with (rows C1, C12).

Everything that is no expert, and the experts' biases, stays as it is: the draft shares it with the model (row C11).

T tokens, D hidden size, E routed experts per layer, K experts per token, N outputs, I inputs of a projection,
P = T x K token-expert pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.progress import Progress
from expertcast.predictors.view import MoELayer, MoEView
from expertcast.runtime.drafts.calibration import Calibration, calibrated
from expertcast.runtime.drafts.matrices import Coded, Groups, Matrices, WholeMatrices, coded_matrices
from expertcast.runtime.drafts.rounding import group_of, rounded
from expertcast.runtime.engine.rows import combine
from expertcast.runtime.storage.layout import expert_parameters

CALIBRATED = "int4:calibrated"
"""4 bits, the error of each weight made good by those behind it."""
BITS = {"int8": 8, "int4": 4, CALIBRATED: 4}
"""Bits of a code by the name of a precision."""


class Weights(Protocol):
    """Where experts are read from; every :class:`expertcast.runtime.storage.store.ExpertStore` is one."""

    def views(self, layer: int) -> Mapping[str, Tensor]:
        """One layer's parameters, [E, ...] by name."""


class ModelWeights:
    """The experts of a model that holds them itself."""

    def __init__(self, view: MoEView) -> None:
        self._view = view

    def views(self, layer: int) -> Mapping[str, Tensor]:
        """One layer's parameters, [E, ...] by name."""
        of = self._view[layer]
        return {name: value.detach() for name, value in expert_parameters(of.experts, of.num_experts).items()}


@dataclass(frozen=True, slots=True)
class _Projection:
    matrices: Matrices
    bias_EN: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.matrices.nbytes + (0 if self.bias_EN is None else self.bias_EN.nbytes)

    def __call__(self, rows_PI: Tensor, groups: Groups, experts_P: Tensor) -> Tensor:
        output_PN = self.matrices.products(rows_PI, groups)
        return output_PN if self.bias_EN is None else output_PN.add_(self.bias_EN[experts_P])


class QuantisedExperts:
    """Every layer's experts in one precision; what :meth:`of` makes.

    Symmetric. 4 bits: groups of 128 inputs, of 64 or 32 where that does not divide, and weights stay as they are where
    none does. 8 bits: one scale for each output. Products are made by torch's own kernels in bf16 where those are fast,
    whatever the model's dtype; else experts are expanded one by one.

    Args:
        precision: its name.
        layers: of each layer the projection to the inner width, and the one back.
    """

    def __init__(self, precision: str, layers: Sequence[tuple[_Projection, _Projection]]) -> None:
        self.precision = precision
        """A name of `BITS`."""
        self._layers = layers

    @classmethod
    def of(
        cls,
        view: MoEView,
        weights: Weights,
        precision: str = "int4",
        *,
        calibration: Calibration | None = None,
        device: torch.device | None = None,
    ) -> QuantisedExperts:
        """Quantise layer by layer.

        Args:
            view: the model's MoE layers, resident or offloaded.
            weights: a store, wherever it holds the experts, or :class:`ModelWeights`.
            precision: a name of `BITS`.
            calibration: what the experts were given on some text; for `CALIBRATED`.
            device: where the model computes; None: where its routers are.

        Raises:
            ExpertcastError: unknown precision, or one without the calibration that it needs.
        """
        if precision not in BITS:
            raise ExpertcastError(f"unknown precision {precision!r} of a draft: choose from {', '.join(BITS)}")
        if precision == CALIBRATED and calibration is None:
            raise ExpertcastError(f"precision {precision!r} needs a text: give calibration=Calibration.of(model, ...)")
        chosen = calibration if precision == CALIBRATED else None
        layers = []
        for layer in Progress(f"quantising experts to {precision}", unit="layer", steps=view):
            there = device or next(layer.router.parameters()).device
            maker = _Maker(layer, weights.views(layer.index), BITS[precision], chosen, there)
            layers.append((maker.up(), maker.down()))
        return cls(precision, layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is held, scales and biases included."""
        return sum(projection.nbytes for layer in self._layers for projection in layer)

    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The layer's experts' output [T, D] with quantised weights, as transformers' kernels combine it.

        Args:
            layer: of the view that this was made of.
            hidden_TD, ids_TK, weights_TK: what transformers gives an experts function.
        """
        tokens, top_k = ids_TK.shape
        if tokens == 1:
            groups = [(expert, 1) for expert in ids_TK[0].tolist()]
            output_PD = self._outputs(layer, hidden_TD.expand(top_k, -1), groups, ids_TK[0])
            return combine(output_PD, weights_TK, hidden_TD.dtype)
        experts_P, order_P = torch.sort(ids_TK.reshape(-1))
        groups = [(expert, len(list(rows))) for expert, rows in groupby(experts_P.tolist())]
        sorted_PD = self._outputs(layer, hidden_TD[order_P // top_k], groups, experts_P)
        output_PD = torch.empty_like(sorted_PD)
        output_PD[order_P] = sorted_PD
        return combine(output_PD, weights_TK, hidden_TD.dtype)

    def _outputs(self, layer: MoELayer, rows_PD: Tensor, groups: Groups, experts_P: Tensor) -> Tensor:
        experts: Any = layer.experts
        up, down = self._layers[layer.index]
        output_PD = down(_activated(experts, up(rows_PD, groups, experts_P)), groups, experts_P)
        if experts.has_post_expert_norm:
            output_PD = experts.post_expert_norm(output_PD)
        return output_PD


class _Maker:
    """One layer's projections from its weights.

    Args:
        layer: whose module says how they lie.
        views: its parameters [E, ...] by name, in host memory.
        bits: of a code.
        calibration: None: to nearest.
        device: where they go.
    """

    def __init__(
        self, layer: MoELayer, views: Mapping[str, Tensor], bits: int, calibration: Calibration | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._layer, self._views, self._bits, self._calibration = layer, views, bits, calibration
        self._device = device
        self._up = "gate_up_proj" if layer.experts.has_gate else "up_proj"

    def up(self) -> _Projection:
        return self._projection(self._up, self._inputs)

    def down(self) -> _Projection:
        return self._projection("down_proj", self._activations)

    def _projection(self, name: str, inputs: Callable[[int], Tensor]) -> _Projection:
        experts, outputs, width = self._matrices(name).shape
        group = group_of(width, self._bits)
        bias_EN = self._views[f"{name}_bias"].to(self._device, copy=True) if self._layer.experts.has_bias else None
        if group is None:
            return _Projection(WholeMatrices(self._matrices(name).to(self._device, copy=True)), bias_EN)

        def weights(expert: int) -> Tensor:
            return self._matrices(name)[expert].to(self._device).contiguous()

        coded: Iterable[Coded]
        if self._calibration is None:
            coded = (rounded(weights(expert), self._bits, group) for expert in range(experts))
        else:
            coded = calibrated(weights, inputs, experts, self._bits, group)
        return _Projection(coded_matrices(coded, self._bits, outputs, width, self._device), bias_EN)

    def _matrices(self, name: str) -> Tensor:
        """[E, N, I]"""
        return self._views[name].mT if self._layer.experts.is_transposed else self._views[name]

    def _inputs(self, expert: int) -> Tensor:
        assert self._calibration is not None
        return self._calibration.inputs(self._layer.index, expert).to(self._device)

    def _activations(self, expert: int) -> Tensor:
        """What the down projection is given of these inputs, with full weights."""
        rows_RN = self._inputs(expert) @ self._matrices(self._up)[expert].T.to(self._device)
        if self._layer.experts.has_bias:
            rows_RN += self._views[f"{self._up}_bias"][expert].to(self._device)
        return _activated(self._layer.experts, rows_RN)


def _activated(experts: Any, rows_PN: Tensor) -> Tensor:
    """What stands between the two projections, by the experts' own code."""
    activated: Tensor = experts._apply_gate(rows_PN) if experts.has_gate else experts.act_fn(rows_PN)
    return activated


def expected_bytes(view: MoEView, precision: str) -> int:
    """Bytes that :attr:`QuantisedExperts.nbytes` will be, before any weight is there: codes, scales and biases.

    Args:
        view: the model's MoE layers, on whatever device.
        precision: a name of `BITS`.
    """
    bits = BITS[precision]
    total = 0
    for layer in view:
        parameters = expert_parameters(layer.experts, layer.num_experts)
        for value in parameters.values():
            if value.dim() < 3:
                total += value.nbytes
                continue
            width = value.shape[1 if layer.experts.is_transposed else 2]
            group = group_of(width, bits)
            if group is None:
                total += value.nbytes
            else:
                total += value.numel() * bits // 8 + value.numel() // group * (4 if bits == 4 else 2)
    return total
