"""Self-drafts with all routed experts in 8 or 4 bits on the computing device, or by lossy policies.

The draft shares everything else, and the experts' biases, with the model.

T tokens, D hidden size, E routed experts per layer, K experts per token, N outputs, I inputs of a projection, G inputs
in a group, J = I // G groups, P = T x K token-expert pairs, R rows of one expert, C experts at once, S windows of W
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertcast.data.batch import RouterCall
from expertcast.data.packed_experts import Groups, activated, at_once, run_groups
from expertcast.predictors.messages import ExpertcastError, Progress
from expertcast.predictors.view import MoELayer, MoEView
from expertcast.runtime.drafts.prefetch import Schedule
from expertcast.runtime.engine.engine import Engine
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.links.base import Link
from expertcast.runtime.policies import CacheShape, Policies
from expertcast.runtime.storage.layout import expert_parameters

# Codes of 4 bits

_MIDDLE = 8
"""Code of weight 0."""


class Coded(NamedTuple):
    """Matrices [..., N, I] as codes of 4 bits and a scale for each group of inputs: weight = scale * (code - 8)."""

    codes: Tensor
    """uint8 [..., N, I]"""
    scales: Tensor
    """float32 [..., N, J]"""

    def expanded(self) -> Tensor:
        """Return the weights, float32 [..., N, I]."""
        codes = torch.unflatten(self.codes.to(torch.int16) - _MIDDLE, -1, (self.scales.shape[-1], -1))
        return (codes * self.scales.unsqueeze(-1)).flatten(-2)


def rounded(weights: Tensor, group: int) -> Coded:
    """Round weights [..., N, I] of any float dtype to the nearest code.

    A group's weight of largest magnitude becomes code 0, whatever its sign, so that every code is used. Scales are
    rounded to bf16 first.
    """
    groups = torch.unflatten(weights.float(), -1, (-1, group))
    extreme = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
    scales = (extreme / -8).bfloat16().float()
    codes = (groups / torch.where(scales == 0, torch.ones_like(scales), scales)).round_().add_(_MIDDLE).clamp_(0, 15)
    return Coded(codes.to(torch.uint8).flatten(-2), scales.squeeze(-1))


# Rounding with error compensation, one input after another: GPTQ (Frantar et al. 2022)
#
# For one output's weights w and inputs X the squared error of X w is (w - q)' H (w - q), H = X' X. Once weight i is
# rounded to q_i, the error is least if the weights behind it move by -(w_i - q_i) / [F^-1]_ii * [F^-1]_:i, where F is H
# over the inputs that are not rounded yet. Up to a factor, these columns of inverses are rows of one Cholesky factor of
# H^-1. Inputs are rounded in their order; a group's scale is set at its first input.

DAMPING = 0.01
"""Share of the mean of H's diagonal that is added to H, so that few or similar inputs do not make weights diverge."""


def compensated(weights_CNI: Tensor, hessians_CII: Tensor, group: int) -> Coded:
    """Return 4-bit codes of C experts; no output's error is larger than with rounding to nearest.

    Args:
        weights_CNI: weights in any float dtype.
        hessians_CII: X' X of each expert's inputs, float32.
        group: inputs that share a scale.
    """
    weights_CNI = weights_CNI.float()
    found, plain = _one_after_another(weights_CNI, inverse_factor(hessians_CII), group), rounded(weights_CNI, group)
    errors = [squared_error(weights_CNI, each.expanded(), hessians_CII) for each in (found, plain)]
    better_CN1 = (errors[0] < errors[1]).unsqueeze(-1)
    codes = torch.where(better_CN1, found.codes, plain.codes)
    return Coded(codes, torch.where(better_CN1, found.scales, plain.scales))


def squared_error(weights_CNI: Tensor, found_CNI: Tensor, hessians_CII: Tensor) -> Tensor:
    """Return each output's squared error [C, N], summed over the inputs of H."""
    error_CNI = weights_CNI - found_CNI
    return ((error_CNI @ hessians_CII) * error_CNI).sum(dim=-1)


def inverse_factor(hessians_CII: Tensor) -> Tensor:
    """Return upper U [C, I, I], float32, U' U the inverse of the damped H; H of no input counts as the identity."""
    damped = hessians_CII.double()
    mean_C11 = damped.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[:, None, None]
    added_C11 = torch.where(mean_C11 == 0, torch.ones_like(mean_C11), DAMPING * mean_C11)
    damped = damped + added_C11 * torch.eye(damped.shape[-1], dtype=damped.dtype, device=damped.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True).float()
    return factor


def _one_after_another(weights_CNI: Tensor, factor_CII: Tensor, group: int) -> Coded:
    left_CNI = weights_CNI.clone()
    codes_CNI = torch.empty_like(left_CNI, dtype=torch.uint8)
    scales = []
    for start in range(0, left_CNI.shape[-1], group):
        end = start + group
        block_CNG, own_CGG = left_CNI[..., start:end], factor_CII[:, start:end, start:end]
        scale_CN = rounded(block_CNG, group).scales.squeeze(-1)
        divisor_CN = torch.where(scale_CN == 0, torch.ones_like(scale_CN), scale_CN)
        errors_CNG = torch.empty_like(block_CNG)
        for place in range(group):
            weight_CN = block_CNG[..., place]
            code_CN = (weight_CN / divisor_CN).round_().clamp_(-8, 7)
            error_CN = (weight_CN - scale_CN * code_CN) / own_CGG[:, None, place, place]
            block_CNG[..., place + 1 :] -= error_CN.unsqueeze(-1) * own_CGG[:, None, place, place + 1 :]
            errors_CNG[..., place] = error_CN
            codes_CNI[..., start + place] = code_CN + _MIDDLE
        left_CNI[..., end:] -= errors_CNG @ factor_CII[:, start:end, end:]
        scales.append(scale_CN)
    return Coded(codes_CNI, torch.stack(scales, dim=-1))


# Products of rows with the quantised experts of a layer
#
# Rows are sorted by expert, and each expert is read once for all its rows. 4 bits have a zero beside each scale, as
# torch's kernels read them. 8 bits have a scale for each output: torch's kernel
# for these takes a fifth of the time of two 4-bit products on one row of a small expert, and no longer on large ones.

Multiply: TypeAlias = Callable[..., Tensor]
"""Multiplies rows [R, I] by an expert's parts; returns [R, N] in the rows' dtype."""


def group_of(outputs: int, inputs: int, bits: int) -> int | None:
    """Return the inputs that share a scale: all in 8 bits; 128, 64 or 32 in 4 bits.

    None: the kernel does not take such a matrix, which stays in the model's dtype.
    """
    if bits == 8:  # with other sizes the kernel reads beyond its memory
        return inputs if outputs % 4 == 0 and inputs % 32 == 0 else None
    return None if outputs % 16 else next((group for group in (128, 64, 32) if inputs % group == 0), None)


class Matrices:
    """E matrices [N, I].

    Args:
        multiply: the product with one matrix.
        parts: parts of all matrices, each [E, ...]; a single part is the weights.
    """

    def __init__(self, multiply: Multiply, *parts: Tensor) -> None:
        self._multiply, self._experts = multiply, list(zip(*(part.unbind() for part in parts), strict=True))
        self._dtype = None if len(parts) == 1 else torch.bfloat16
        self.nbytes = sum(part.nbytes for part in parts)
        """Bytes on the device."""

    def products(self, rows_PI: Tensor, groups: Groups) -> Tensor:
        """Return the products [P, N] in the rows' dtype."""
        given = rows_PI if self._dtype is None else rows_PI.to(self._dtype)
        parts = torch.split(given, [count for _, count in groups])
        pairs = zip(parts, groups, strict=True)
        outputs = [self._multiply(part, *self._experts[expert]) for part, (expert, _) in pairs]
        return torch.cat(outputs).to(rows_PI.dtype)


def whole_matrices(weights_ENI: Tensor) -> Matrices:
    """Return matrices of plain weights with any strides."""
    return Matrices(torch.mm, weights_ENI.mT)


def four_bits(chunks: Iterable[Coded], group: int, device: torch.device) -> Matrices:
    """Return matrices in 4 bits.

    Args:
        chunks: codes of some experts at a time, in order.
        group: inputs that share a scale.
        device: the device that computes.
    """
    words, pairs = [], []
    for codes_CNI, scales_CNJ in chunks:
        words += [_packed(codes_NI) for codes_NI in codes_CNI]
        scales_CJN = scales_CNJ.mT.to(torch.bfloat16)
        pairs.append(torch.stack((scales_CJN, torch.zeros_like(scales_CJN)), dim=-1))
    kernel = torch._weight_int4pack_mm if device.type == "cuda" else torch._weight_int4pack_mm_for_cpu

    def multiply(rows_RI: Tensor, words: Tensor, pairs_JN2: Tensor) -> Tensor:
        return kernel(rows_RI.contiguous(), words, group, pairs_JN2)

    return Matrices(multiply, torch.stack(words), torch.cat(pairs))


def _packed(codes_NI: Tensor) -> Tensor:
    """Return codes of 4 bits in the order of torch's kernel on their device."""
    if not codes_NI.is_cuda:
        return torch._convert_weight_to_int4pack_for_cpu(codes_NI.int(), 1)
    tiles = next(tiles for tiles in (8, 4, 2) if codes_NI.shape[1] % (16 * tiles) == 0)
    pairs = codes_NI[:, ::2] << 4 | codes_NI[:, 1::2]  # the first code in the high bits
    return torch._convert_weight_to_int4pack(pairs.contiguous(), tiles)


def eight_bits(weights: Callable[[slice], Tensor], shape_ENI: Sequence[int], device: torch.device) -> Matrices:
    """Return matrices in 8 bits; an output's weight of largest magnitude becomes 127 or -127.

    Args:
        weights: returns the weights [..., N, I] of some experts.
        shape_ENI: shape of all matrices.
        device: the device that computes.
    """
    codes = torch.empty(*shape_ENI, dtype=torch.int8, device=device)
    scales = torch.empty(shape_ENI[:2], dtype=torch.bfloat16, device=device)
    for expert in range(len(codes)):
        own_1NI = weights(slice(expert, expert + 1)).float()
        scale_1N = (own_1NI.abs().amax(dim=-1) / 127).bfloat16()
        divisor_1N = torch.where(scale_1N == 0, torch.ones_like(scale_1N), scale_1N).float()
        codes[expert] = (own_1NI / divisor_1N.unsqueeze(-1)).round_().clamp_(-128, 127)[0]
        scales[expert] = scale_1N[0]
    return Matrices(_by_rows, codes, scales)


def _by_rows(rows_RI: Tensor, codes_NI: Tensor, scales_N: Tensor) -> Tensor:
    if rows_RI.is_cuda:
        return (rows_RI @ codes_NI.to(rows_RI.dtype).T) * scales_N
    return torch._weight_int8pack_mm(rows_RI, codes_NI, scales_N)


# Calibration on text

ENOUGH = 64
"""Tokens of its own from which an expert is calibrated; with fewer, all tokens of the layer are used."""
_CHUNK = 1 << 24
"""Entries of H of all experts that are rounded at once."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Inputs and chosen experts of each layer on some text, in host memory: L x T x D values."""

    hidden_TD: Sequence[Tensor]
    ids_TK: Sequence[Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, model: PreTrainedModel, view: MoEView, ids_SW: Tensor, batch: int = 8) -> Calibration:
        """Run the model, resident or offloaded, over windows of token ids, `batch` at a time."""
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
        """Return the expert's inputs [R, D], or its layer's [T, D] if the expert has fewer than `ENOUGH`."""
        own_T = (self.ids_TK[layer] == expert).any(dim=-1)
        return self.hidden_TD[layer][own_T] if int(own_T.sum()) >= ENOUGH else self.hidden_TD[layer]


def calibrated(
    weights: Callable[[slice], Tensor], inputs: Callable[[int], Tensor], shape_ENI: Sequence[int], group: int
) -> Iterator[Coded]:
    """Iterate over 4-bit codes of some experts at a time, in order.

    Args:
        weights: returns the weights [..., N, I] of some experts.
        inputs: returns an expert's inputs [R, I], on the weights' device.
        shape_ENI: shape of all matrices.
        group: inputs that share a scale.
    """
    experts, _, width = shape_ENI
    size = max(1, _CHUNK // width**2)
    for start in range(0, experts, size):
        end = min(start + size, experts)
        hessians = [(rows := inputs(expert).float()).T @ rows for expert in range(start, end)]
        yield compensated(weights(slice(start, end)), torch.stack(hessians), group)


CALIBRATED = "int4:calibrated"
"""4 bits; each weight's rounding error is compensated by the weights behind it."""
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
    """Every layer's experts in one precision, made by :meth:`of`.

    Codes are symmetric. 4 bits have groups of 128 inputs, of 64 or 32 where 128 does not divide; 8 bits have one scale
    for each output. Matrices that torch's kernels do not take keep the model's dtype. The kernels compute in bf16.

    Args:
        precision: a name of `BITS`.
        layers: each layer's projections to the inner width and back.
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
            views: returns a layer's parameters, in host memory.
            precision: a name of `BITS`.
            calibration: the experts' inputs on some text, for `CALIBRATED`.
            device: the device that computes; None: the routers' device.

        Raises:
            ExpertcastError: unknown precision, one without the calibration that it needs, or an older GPU.
        """
        if precision not in BITS:
            raise ExpertcastError(f"unknown precision {precision!r} of a draft: choose from {', '.join(BITS)}")
        if precision == CALIBRATED and calibration is None:
            raise ExpertcastError(f"precision {precision!r} needs a text: give calibration=Calibration.of(model, ...)")
        chosen = calibration if precision == CALIBRATED else None
        layers = []
        for layer in Progress(f"quantising experts to {precision}", unit="layer", steps=view):
            there = device or next(layer.router.parameters()).device
            if there.type == "cuda" and BITS[precision] == 4 and torch.cuda.get_device_capability(there) < (8, 0):
                raise ExpertcastError(
                    f"draft {precision!r} needs a GPU of compute capability 8.0 or higher: give 'int8'"
                )
            layers.append(_made(layer, views(layer.index), BITS[precision], chosen, there))
        return cls(precision, layers)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and biases."""
        return sum(projection.nbytes for layer in self._layers for projection in layer)

    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the output [T, D] of a layer's quantised experts, combined as transformers' kernels do.

        Args:
            layer: a layer of the view.
            hidden_TD, ids_TK, weights_TK: arguments of transformers' experts functions.
        """
        return run_groups(partial(self._outputs, layer), hidden_TD, ids_TK, weights_TK)

    def _outputs(self, layer: MoELayer, rows_PD: Tensor, groups: Groups, experts_P: Tensor) -> Tensor:
        experts: Any = layer.experts
        up, down = self._layers[layer.index]
        output_PD = down(activated(experts, up(rows_PD, groups, experts_P)), groups, experts_P)
        if experts.has_post_expert_norm:
            output_PD = experts.post_expert_norm(output_PD)
        return output_PD


def _made(
    layer: MoELayer, views: Mapping[str, Tensor], bits: int, calibration: Calibration | None, device: torch.device
) -> tuple[_Projection, _Projection]:
    """Quantise one layer's projections to the inner width and back.

    Args:
        layer: the layer.
        views: its parameters [E, ...] by name, in host memory.
        bits: bits of a code.
        calibration: the experts' inputs; None: rounding to nearest.
        device: the device that computes.
    """
    up_name = "gate_up_proj" if layer.experts.has_gate else "up_proj"

    def matrices(name: str) -> Tensor:
        """[E, N, I]"""
        return views[name].mT if layer.experts.is_transposed else views[name]

    def inputs(expert: int) -> Tensor:
        assert calibration is not None
        return calibration.inputs(layer.index, expert).to(device)

    def inner(expert: int) -> Tensor:
        """Return the down projection's inputs for an expert's inputs, with full weights."""
        rows_RN = inputs(expert) @ matrices(up_name)[expert].T.to(device)
        if layer.experts.has_bias:
            rows_RN += views[f"{up_name}_bias"][expert].to(device)
        return activated(layer.experts, rows_RN)

    def projection(name: str, given: Callable[[int], Tensor]) -> _Projection:
        weights_ENI = matrices(name)
        shape = weights_ENI.shape
        group = group_of(shape[1], shape[2], bits)

        def weights(experts: slice) -> Tensor:
            return weights_ENI[experts].to(device)

        if group is None:
            made = whole_matrices(weights_ENI.to(device, copy=True))
        elif bits == 8:
            made = eight_bits(weights, shape, device)
        elif calibration is None:
            step = at_once(weights_ENI)
            chunks = (rounded(weights(slice(start, start + step)), group) for start in range(0, shape[0], step))
            made = four_bits(chunks, group, device)
        else:
            made = four_bits(calibrated(weights, given, shape, group), group, device)
        return _Projection(made, views[f"{name}_bias"].to(device, copy=True) if layer.experts.has_bias else None)

    return projection(up_name, inputs), projection("down_proj", inner)


def expected_bytes(view: MoEView, precision: str) -> int:
    """Return :attr:`QuantisedExperts.nbytes` before weights are loaded: codes, scales and biases.

    Args:
        view: the model's MoE layers, on any device.
        precision: a name of `BITS`.
    """
    bits, total = BITS[precision], 0
    for layer in view:
        for value in expert_parameters(layer.experts, layer.num_experts).values():
            sizes = value.shape[:0:-1] if layer.experts.is_transposed else value.shape[1:]
            group = group_of(sizes[0], sizes[1], bits) if len(sizes) == 2 else None
            if group is None:
                total += value.nbytes
            else:
                total += value.numel() * bits // 8 + value.numel() // group * (4 if bits == 4 else 2)
    return total


# Stages: how a draft's forwards run the model's MoE layers


class QuantisedStage:
    """Draft with all experts resident in less precision, which waits for no transfer."""

    def __init__(self, experts: QuantisedExperts, schedule: Schedule, link: Link) -> None:
        self._experts, self._schedule, self._link = experts, schedule, link

    def on_start(self, fresh: bool) -> None:
        del fresh
        self._link.follow()

    def on_router(self, call: RouterCall) -> None:
        self._schedule.routed(call)

    def run(self, layer: MoELayer, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        output_TD = self._experts.run(layer, hidden_TD, ids_TK, weights_TK)
        self._schedule.load()
        return output_TD


class PolicyStage:
    """Draft by lossy policies over the same slots, with the experts on the device."""

    def __init__(self, engine: Engine, policies: Policies, schedule: Schedule) -> None:
        shape, residency = engine.view.shape, engine.residency
        made = policies.make(
            CacheShape(layers=shape.layers, experts=shape.experts, top_k=shape.top_k, slots=engine.pool.count)
        )
        made.eviction = residency.eviction
        self.precisions = made.miss.precisions
        """Precisions of copies that the store holds beside the full experts."""
        self._residency, self._schedule = residency, schedule
        self._engine = Engine(
            link=residency.link, pool=engine.pool, speculator=Speculator(engine.view, None), policies=made,
            kernel=engine.kernel, residency=residency,
        )  # fmt: skip

    def on_start(self, fresh: bool) -> None:
        self._engine.go_on()
        self._engine.on_start(fresh)

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
