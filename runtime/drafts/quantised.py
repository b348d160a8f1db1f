"""Self-drafts with all routed experts in 8 or 4 bits on the computing device, or by lossy policies (rows C1, C12).

Everything that is no expert, and the experts' biases, stays as it is: the draft shares it with the model (row C11).

T tokens, D hidden size, E routed experts per layer, K experts per token, N outputs, I inputs of a projection, G inputs
in a group, J = I // G groups, P = T x K token-expert pairs, R rows of one expert, C experts at once, S windows of W
tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertcast.data.batch import RouterCall
from expertcast.predictors.messages import ExpertcastError, Progress
from expertcast.predictors.view import MoELayer, MoEView
from expertcast.runtime.drafts.prefetch import Schedule
from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.engine.engine import EngineParts, HostEngine, combine
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.links.base import Link
from expertcast.runtime.policies import CacheShape, Policies
from expertcast.runtime.storage.layout import expert_parameters

# Symmetric rounding in groups along the input dimension
#
# weight = scale * code. A group's weight of largest magnitude becomes the lowest code, -8 of 4 bits and -128 of 8,
# whatever its sign: scales may be negative, and no code is left unused. Scales are bf16 values, which is what torch's
# kernels take; codes are chosen for the scale as it is after rounding.

_GROUPS = (128, 64, 32)


def group_of(inputs: int, bits: int) -> int | None:
    """Inputs that share a scale: of 4 bits 128, or 64 or 32 where that does not divide; None where none does.

    Of 8 bits all inputs of an output share one, as torch's kernel wants it.
    """
    if bits == 8:
        return inputs
    return next((group for group in _GROUPS if inputs % group == 0), None)


def scales_of(weights: Tensor, bits: int) -> Tensor:
    """Scales [...] of groups [..., G], float32 with values of bf16; 1 for a group of zeros."""
    extreme = weights.gather(-1, weights.abs().argmax(dim=-1, keepdim=True)).squeeze(-1).float()
    scales = (extreme / -(1 << (bits - 1))).bfloat16().float()
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def codes_of(weights: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The nearest codes, float32; `scales` must broadcast to the weights."""
    top = 1 << (bits - 1)
    return (weights.float() / scales).round_().clamp_(-top, top - 1)


def rounded(weights: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """To nearest: codes, int8 [..., N, I], and scales, float32 [..., N, J], of weights [..., N, I]."""
    groups = weights.reshape(*weights.shape[:-1], -1, group)
    scales = scales_of(groups, bits)
    return codes_of(groups, scales.unsqueeze(-1), bits).flatten(-2).to(torch.int8), scales


def expanded(codes: Tensor, scales: Tensor) -> Tensor:
    """The weights, float32 [..., N, I], that codes [..., N, I] and scales [..., N, J] stand for."""
    group = codes.shape[-1] // scales.shape[-1]
    return codes.float() * scales.float().repeat_interleave(group, dim=-1)


# Rounding with error compensation, one input after another: GPTQ (row C1)
#
# For one output's weights w and inputs X the squared error of X w is (w - q)' H (w - q), H = X' X. Once weight i is
# rounded to q_i, the best that those behind it can do is to move by -(w_i - q_i) / [F^-1]_ii * [F^-1]_:i, F being H
# over the inputs that are not rounded yet. Up to a factor, all those columns of inverses are rows of one Cholesky
# factor of H^-1. Inputs are taken in their order; a group's scale is set when its first input comes.

DAMPING = 0.01
"""Share of the mean of H's diagonal that is added to it: few inputs, or alike, do not make weights run away."""


def compensated(weights_CNI: Tensor, hessians_CII: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Codes, int8 [C, N, I], and scales, float32 [C, N, J]; no output's error is larger than with nearest rounding.

    Args:
        weights_CNI: of any float dtype.
        hessians_CII: X' X of each expert's inputs, float32.
        bits, group: as for :func:`expertcast.runtime.drafts.quantised.rounded`.
    """
    weights_CNI = weights_CNI.float()
    codes, scales = _one_after_another(weights_CNI, inverse_factor(hessians_CII), bits, group)
    plain_codes, plain_scales = rounded(weights_CNI, bits, group)
    better_CN1 = (
        squared_error(weights_CNI, expanded(codes, scales), hessians_CII)
        < squared_error(weights_CNI, expanded(plain_codes, plain_scales), hessians_CII)
    ).unsqueeze(-1)
    return torch.where(better_CN1, codes, plain_codes), torch.where(better_CN1, scales, plain_scales)


def squared_error(weights_CNI: Tensor, found_CNI: Tensor, hessians_CII: Tensor) -> Tensor:
    """[C, N]: of each output, summed over the inputs that H was made of."""
    error_CNI = weights_CNI - found_CNI
    return ((error_CNI @ hessians_CII) * error_CNI).sum(dim=-1)


def inverse_factor(hessians_CII: Tensor) -> Tensor:
    """Upper U [C, I, I], float32, with U' U the inverse of the damped H; H without any input counts as the identity."""
    damped = hessians_CII.double()
    mean_C11 = damped.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[:, None, None]
    added_C11 = torch.where(mean_C11 == 0, torch.ones_like(mean_C11), DAMPING * mean_C11)
    damped = damped + added_C11 * torch.eye(damped.shape[-1], dtype=damped.dtype, device=damped.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True).float()
    return factor


def _one_after_another(weights_CNI: Tensor, factor_CII: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    left_CNI = weights_CNI.clone()
    codes_CNI = torch.empty_like(left_CNI, dtype=torch.int8)
    scales = []
    for start in range(0, left_CNI.shape[-1], group):
        end = start + group
        block_CNG, own_CGG = left_CNI[..., start:end], factor_CII[:, start:end, start:end]
        scale_CN = scales_of(block_CNG, bits)
        errors_CNG = torch.empty_like(block_CNG)
        for place in range(group):
            weight_CN = block_CNG[..., place]
            code_CN = codes_of(weight_CN, scale_CN, bits)
            error_CN = (weight_CN - scale_CN * code_CN) / own_CGG[:, None, place, place]
            block_CNG[..., place + 1 :] -= error_CN.unsqueeze(-1) * own_CGG[:, None, place, place + 1 :]
            errors_CNG[..., place] = error_CN
            codes_CNI[..., start + place] = code_CN
        left_CNI[..., end:] -= errors_CNG @ factor_CII[:, start:end, end:]
        scales.append(scale_CN)
    return codes_CNI, torch.stack(scales, dim=-1)


# Products of rows with the quantised experts of a layer
#
# Rows come sorted by expert, and each expert is read once for all its rows. An expert is a product of its own: torch
# has grouped products of 16-bit weights, none of 4-bit ones, and to expand the experts for it takes 8 to 54 times as
# long.

Groups: TypeAlias = Sequence[tuple[int, int]]
"""(expert, its rows), in the order of the rows."""
Coded: TypeAlias = tuple[Tensor, Tensor]
"""One expert's codes, int8 [N, I], and scales, float32 [N, J]."""

_FAST_CPU = ("AVX2", "AVX512")
"""Where torch's kernels of 4 and 8 bits are more than a plain loop."""


class Matrices(ABC):
    """E matrices [N, I].

    Args:
        dtype: what rows are multiplied in; None is their own.
        held: all memory that the matrices take.
    """

    def __init__(self, dtype: torch.dtype | None, held: Iterable[Tensor]) -> None:
        self._dtype = dtype
        self.nbytes = sum(tensor.nbytes for tensor in held)
        """Bytes that they take on the device."""

    def products(self, rows_PI: Tensor, groups: Groups) -> Tensor:
        """[P, N] in the rows' dtype."""
        given = rows_PI if self._dtype is None else rows_PI.to(self._dtype)
        parts = torch.split(given, [count for _, count in groups])
        outputs = [self.product(part, expert) for part, (expert, _) in zip(parts, groups, strict=True)]
        return torch.cat(outputs).to(rows_PI.dtype)

    @abstractmethod
    def product(self, rows_RI: Tensor, expert: int) -> Tensor:
        """[R, N] of one expert, in the dtype of its rows."""


class WholeMatrices(Matrices):
    """Weights as they are: [E, N, I], strided in any way."""

    def __init__(self, weights_ENI: Tensor) -> None:
        super().__init__(None, [weights_ENI])
        self._experts = weights_ENI.mT.unbind(0)

    def product(self, rows_RI: Tensor, expert: int) -> Tensor:
        return rows_RI @ self._experts[expert]


class CodedMatrices(Matrices):
    """Codes of any size, on any device: an expert is expanded for its product, and dropped.

    Args:
        experts: each with its codes and scales.
        bits: of a code; of 4, two share a byte, the first in its low bits.
    """

    def __init__(self, experts: Iterable[Coded], bits: int) -> None:
        self._packed = bits == 4
        self._experts = [(_pairs(codes) if self._packed else codes, scales.bfloat16()) for codes, scales in experts]
        super().__init__(None, (tensor for expert in self._experts for tensor in expert))

    def product(self, rows_RI: Tensor, expert: int) -> Tensor:
        codes, scales = self._experts[expert]
        if self._packed:  # shifting right carries the sign
            codes = torch.stack((codes << 4 >> 4, codes >> 4), dim=-1).flatten(-2)
        return rows_RI @ expanded(codes, scales).to(rows_RI.dtype).T


class FourBitKernel(Matrices):
    """torch's own product with 4-bit weights, in bf16: it takes 1.5 to 5 times less than bf16 weights for few rows.

    Args:
        experts: each with its codes and scales, all on one device.
        device: that.
    """

    def __init__(self, experts: Iterable[Coded], device: torch.device) -> None:
        on_host = device.type == "cpu"
        pack = _packed_for_cpu if on_host else _packed_for_cuda
        self._multiply = torch._weight_int4pack_mm_for_cpu if on_host else torch._weight_int4pack_mm
        self._experts = [
            (pack(codes), codes.shape[-1] // scales.shape[-1], _with_zeros(scales)) for codes, scales in experts
        ]
        super().__init__(torch.bfloat16, (tensor for codes, _, scales in self._experts for tensor in (codes, scales)))

    @staticmethod
    def takes(outputs: int, inputs: int, device: torch.device) -> bool:
        """Whether the kernel takes such matrices there, and is fast."""
        if device.type == "cpu":
            return outputs % 16 == 0 and torch.backends.cpu.get_cpu_capability() in _FAST_CPU
        ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return ampere and torch.version.hip is None and outputs % 8 == 0 and inputs % 32 == 0

    def product(self, rows_RI: Tensor, expert: int) -> Tensor:
        codes, group, scales = self._experts[expert]
        return self._multiply(rows_RI, codes, group, scales)


class EightBitKernel(Matrices):
    """torch's own product with 8-bit weights on the CPU, in bf16; one scale for each output.

    Args:
        experts: each with its codes and scales.
    """

    def __init__(self, experts: Iterable[Coded]) -> None:
        self._experts = [(codes, scales.squeeze(-1).bfloat16()) for codes, scales in experts]
        super().__init__(torch.bfloat16, (tensor for expert in self._experts for tensor in expert))

    @staticmethod
    def takes(outputs: int, inputs: int, device: torch.device) -> bool:
        """Whether the kernel takes such matrices there, and is fast; with other inputs it reads what is not its own."""
        whole = outputs % 4 == 0 and inputs % 32 == 0
        return whole and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in _FAST_CPU

    def product(self, rows_RI: Tensor, expert: int) -> Tensor:
        return torch._weight_int8pack_mm(rows_RI, *self._experts[expert])


def coded_matrices(experts: Iterable[Coded], bits: int, outputs: int, inputs: int, device: torch.device) -> Matrices:
    """The fastest matrices that these codes make on the device where they lie.

    Args:
        experts: each with its codes and scales; held one at a time.
        bits: of a code; of 8, an output's inputs are one group.
        outputs, inputs: N and I.
        device: where the codes are.
    """
    if bits == 4 and FourBitKernel.takes(outputs, inputs, device):
        return FourBitKernel(experts, device)
    if bits == 8 and EightBitKernel.takes(outputs, inputs, device):
        return EightBitKernel(experts)
    return CodedMatrices(experts, bits)


def _pairs(codes_NI: Tensor) -> Tensor:
    return codes_NI[:, ::2] & 15 | codes_NI[:, 1::2] << 4


def _packed_for_cpu(codes_NI: Tensor) -> Tensor:
    return torch._convert_weight_to_int4pack_for_cpu(codes_NI.int() + 8, 1)


def _packed_for_cuda(codes_NI: Tensor) -> Tensor:
    """As torch's CUDA kernel wants it: the first code in the high bits, 2, 4 or 8 tiles of 16 inputs at a time."""
    codes = (codes_NI + 8).view(torch.uint8)
    tiles = next(tiles for tiles in (8, 4, 2) if codes.shape[-1] % (16 * tiles) == 0)
    return torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], tiles)


def _with_zeros(scales_NJ: Tensor) -> Tensor:
    """bf16 [J, N, 2]: the kernels take weight = scale * (code - 8) + zero."""
    scales_JN = scales_NJ.T.bfloat16()
    return torch.stack((scales_JN, torch.zeros_like(scales_JN)), dim=-1)


# Calibration on text (row C1)

ENOUGH = 64
"""Tokens of its own that an expert is calibrated on; one that saw fewer is calibrated on all tokens of its layer."""
_CHUNK = 1 << 24
"""Entries of the H of experts that are rounded at once."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Per layer the inputs of its experts on some text and who was chosen, in host memory: L x T x D values."""

    hidden_TD: Sequence[Tensor]
    ids_TK: Sequence[Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, model: PreTrainedModel, view: MoEView, ids_SW: Tensor, batch: int = 8) -> Calibration:
        """Run the model, resident or offloaded, over windows of token ids, some at a time; it stays as it is."""
        hidden: list[list[Tensor]] = [[] for _ in view]
        ids: list[list[Tensor]] = [[] for _ in view]
        with ExitStack() as stack:
            for layer in view:

                def keep(_experts: nn.Module, args: tuple[Tensor, ...], index: int = layer.index) -> None:
                    hidden[index].append(args[0].reshape(-1, args[0].shape[-1]).cpu())
                    ids[index].append(args[1].cpu())

                stack.callback(layer.experts.register_forward_pre_hook(keep).remove)
            for windows in torch.split(ids_SW, batch):
                model.base_model(input_ids=windows.to(model.device), use_cache=False)
        return cls([torch.cat(parts) for parts in hidden], [torch.cat(parts) for parts in ids])

    def inputs(self, layer: int, expert: int) -> Tensor:
        """[R, D]: what the expert was given; what all experts of its layer were given if that is less than `ENOUGH`."""
        own_T = (self.ids_TK[layer] == expert).any(dim=-1)
        return self.hidden_TD[layer][own_T] if int(own_T.sum()) >= ENOUGH else self.hidden_TD[layer]


def calibrated(
    weights: Callable[[int], Tensor], inputs: Callable[[int], Tensor], experts: int, bits: int, group: int
) -> Iterator[Coded]:
    """Each expert's codes and scales, in order.

    Args:
        weights: of an expert, [N, I].
        inputs: of an expert, [R, I], on the weights' device.
        experts: E.
        bits, group: as for :func:`expertcast.runtime.drafts.quantised.rounded`.
    """
    size = max(1, _CHUNK // weights(0).shape[-1] ** 2)
    for start in range(0, experts, size):
        chunk = range(start, min(start + size, experts))
        hessians = [(rows := inputs(expert).float()).T @ rows for expert in chunk]
        codes, scales = compensated(torch.stack([weights(each) for each in chunk]), torch.stack(hessians), bits, group)
        yield from zip(codes, scales, strict=True)


CALIBRATED = "int4:calibrated"
"""4 bits, the error of each weight made good by those behind it."""
BITS = {"int8": 8, "int4": 4, CALIBRATED: 4}
"""Bits of a code by the name of a precision."""


Views: TypeAlias = Callable[[int], Mapping[str, Tensor]]
"""Parameters [E, ...] of a layer by name, such as :meth:`expertcast.runtime.storage.store.ExpertStore.views`."""


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
        views: Views,
        precision: str = "int4",
        *,
        calibration: Calibration | None = None,
        device: torch.device | None = None,
    ) -> QuantisedExperts:
        """Quantise layer by layer.

        Args:
            view: the model's MoE layers, resident or offloaded.
            views: of its experts, in host memory.
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
            layers.append(_made(layer, views(layer.index), BITS[precision], chosen, there))
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
        if tokens == 1:  # sorting costs more than it is worth
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


def _made(
    layer: MoELayer, views: Mapping[str, Tensor], bits: int, calibration: Calibration | None, device: torch.device
) -> tuple[_Projection, _Projection]:
    """One layer's projections, to the inner width and back, from its weights.

    Args:
        layer: whose module says how they lie.
        views: its parameters [E, ...] by name, in host memory.
        bits: of a code.
        calibration: None: to nearest.
        device: where they go.
    """
    up_name = "gate_up_proj" if layer.experts.has_gate else "up_proj"

    def matrices(name: str) -> Tensor:
        """[E, N, I]"""
        return views[name].mT if layer.experts.is_transposed else views[name]

    def inputs(expert: int) -> Tensor:
        assert calibration is not None
        return calibration.inputs(layer.index, expert).to(device)

    def inner(expert: int) -> Tensor:
        """What the down projection is given of these inputs, with full weights."""
        rows_RN = inputs(expert) @ matrices(up_name)[expert].T.to(device)
        if layer.experts.has_bias:
            rows_RN += views[f"{up_name}_bias"][expert].to(device)
        return _activated(layer.experts, rows_RN)

    def projection(name: str, given: Callable[[int], Tensor]) -> _Projection:
        weights_ENI = matrices(name)
        experts, outputs, width = weights_ENI.shape
        group = group_of(width, bits)
        bias_EN = views[f"{name}_bias"].to(device, copy=True) if layer.experts.has_bias else None
        if group is None:
            return _Projection(WholeMatrices(weights_ENI.to(device, copy=True)), bias_EN)

        def weights(expert: int) -> Tensor:
            return weights_ENI[expert].to(device).contiguous()

        coded: Iterable[Coded]
        if calibration is None:
            coded = (rounded(weights(expert), bits, group) for expert in range(experts))
        else:
            coded = calibrated(weights, given, experts, bits, group)
        return _Projection(coded_matrices(coded, bits, outputs, width, device), bias_EN)

    return projection(up_name, inputs), projection("down_proj", inner)


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
    bits, total = BITS[precision], 0
    for layer in view:
        for value in expert_parameters(layer.experts, layer.num_experts).values():
            width = value.shape[1 if layer.experts.is_transposed else -1]
            group = group_of(width, bits) if value.dim() > 2 else None
            if group is None:
                total += value.nbytes
            else:
                total += value.numel() * bits // 8 + value.numel() // group * (4 if bits == 4 else 2)
    return total


# Stages: how a draft's forwards run the model's MoE layers


class QuantisedStage:
    """All experts are resident in less precision: nothing is waited for (rows C1 and C12)."""

    def __init__(self, experts: QuantisedExperts, schedule: Schedule, link: Link) -> None:
        self._experts, self._schedule, self._link = experts, schedule, link

    def on_start(self, fresh: bool, token_BS: Tensor | None = None) -> None:
        del fresh, token_BS
        self._link.follow()

    def on_router(self, call: RouterCall) -> None:
        self._schedule.routed(call)

    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        output_TD = self._experts.run(layer, hidden_TD, ids_TK, weights_TK)
        self._schedule.load()
        return output_TD


class PolicyStage:
    """Lossy policies decide over the same slots: a draft with what is on the device."""

    def __init__(self, parts: EngineParts, policies: Policies, residency: ExpertCache, schedule: Schedule) -> None:
        shape = parts.speculator.view.shape
        made = policies.make(
            CacheShape(layers=shape.layers, experts=shape.experts, top_k=shape.top_k, slots=parts.pool.count)
        )
        made.eviction = residency.eviction
        self.precisions = made.miss.precisions
        """Copies beside the full experts that the store must hold."""
        speculator = Speculator(parts.speculator.view, None)
        self._residency, self._schedule = residency, schedule
        self._engine = HostEngine(
            replace(parts, speculator=speculator, policies=made, tokens_ahead=None, drift=None), residency
        )

    def on_start(self, fresh: bool, token_BS: Tensor | None = None) -> None:
        self._engine.go_on()
        self._engine.on_start(fresh, token_BS)

    def on_router(self, call: RouterCall) -> tuple[Tensor, Tensor] | None:
        self._residency.only_arrived = True
        try:
            executed = self._engine.on_router(call)
        finally:
            self._residency.only_arrived = False
        self._schedule.routed(call)
        return executed

    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self._engine.run(layer, hidden_TD, ids_TK, weights_TK)
