"""Linear layers whose weights stay packed in 4 or 8 bits, beside packed experts.

Forms, codes and scales are those of :mod:`expertcast.data.packed_experts`, for one matrix instead of E.

N outputs, I inputs, P rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertcast.data.packed_experts import CODES, SCALES, Coded, Coding, PackedForm
from expertcast.data.weights.files import ComputedTensor, Part, TensorFile
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoEView

_AT_ONCE = 2**24
"""Weights that are packed in one call; a multiple of every number of outputs in a block of the kernel."""
_BLOCK = 64
"""Most outputs in a block of the kernel."""

_OPERATIONS = torch.library.Library("expertcast", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPERATIONS.define(  # type: ignore[no-untyped-call]
    "packed_product(Tensor rows, Tensor codes, Tensor scales, int bits, int group, bool symmetric) -> Tensor"
)


def _product(rows_PI: Tensor, codes: Tensor, scales: Tensor, bits: int, group: int, symmetric: bool) -> Tensor:
    form = PackedForm(Coding(bits, group, symmetric), codes.shape[-2], rows_PI.shape[1])
    return form.multiply(rows_PI, codes, scales)


_OPERATIONS.impl("packed_product", _product, "CPU")  # type: ignore[no-untyped-call]
"""One operation of a traced program, since a trace cannot record all operations of a product."""


class PackedLinear(nn.Module):
    """A linear layer with the codes and scales of one packed matrix as parameters.

    Args:
        form: form of the matrix.
        bias: parameter [N], or None.
        dtype: dtype of the model.
    """

    bias: nn.Parameter | None

    def __init__(self, form: PackedForm, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.form, self.dtype = form, dtype
        self.in_features, self.out_features = form.inputs, form.outputs
        for end, (shape, kind) in form.parts().items():
            self.register_parameter(f"weight{end}", nn.Parameter(torch.empty(shape, dtype=kind), requires_grad=False))
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Tensor:
        """The weights [N, I] in the model's dtype, expanded anew by each read."""
        return self.form.expand(*self._parts()).to(self.dtype)

    def _parts(self) -> tuple[Tensor, Tensor]:
        codes, scales = self._parameters[f"weight{CODES}"], self._parameters[f"weight{SCALES}"]
        assert codes is not None
        assert scales is not None
        return codes, scales

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the layer, or convert its bias: the kernel needs scales in their own dtype."""
        scales = self._parts()[1].data
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        codes = self._parts()[0]
        self._parameters[f"weight{SCALES}"] = nn.Parameter(scales.to(codes.device), requires_grad=False)
        return self

    def forward(self, hidden: Tensor) -> Tensor:
        """Multiply [..., I] by the weights in bf16; return [..., N] in the dtype of the input."""
        rows_PI = hidden.reshape(-1, self.in_features)
        made: Tensor
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            made = torch.ops.expertcast.packed_product(rows_PI, *self._parts(), *self.form.coding)
        else:
            made = self.form.multiply(rows_PI, *self._parts())
        output = made.to(hidden.dtype)
        if self.bias is not None:
            output = output + self.bias
        return output.view(*hidden.shape[:-1], self.out_features)

    @torch.no_grad()
    def fill(self, coded: Callable[[Part], Coded]) -> None:
        """Pack the codes that `coded` returns for some outputs, a part of the matrix after the other."""
        codes, scales = (part.unsqueeze(0) for part in self._parts())
        step = max(_BLOCK, _AT_ONCE // self.in_features // _BLOCK * _BLOCK)
        for first in range(0, self.out_features, step):
            outputs = slice(first, min(first + step, self.out_features))
            self.form.encode(coded(outputs)[None], codes[..., outputs, :], scales[:, :, outputs])

    def extra_repr(self) -> str:
        """Describe the layer as `nn.Linear` does, and its form."""
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, form={self.form}"


def linear_forms(model: PreTrainedModel, view: MoEView, weights: Mapping[str, TensorFile]) -> dict[str, PackedForm]:
    """Return the forms of the linear layers that can stay packed, by the module's name.

    Routers, experts, tied weights, and layers whose shape or form has no kernel are left out.

    Args:
        model: the model without weights.
        view: its MoE layers.
        weights: tensors of a checkpoint by the full names of the parameters.
    """
    apart = {each for layer in view for part in (layer.router, layer.experts) for each in part.modules()}
    tied = getattr(model, "all_tied_weights_keys", {})
    shared = {*tied, *tied.values()}
    forms = {}
    for name, module in model.named_modules():
        file = weights.get(f"{name}.weight")
        if type(module) is not nn.Linear or module in apart or f"{name}.weight" in shared:
            continue
        if isinstance(file, ComputedTensor) and file.get_shape() == list(module.weight.shape):
            coding, (outputs, inputs) = file.coding(), file.get_shape()
            with suppress(ExpertcastError):  # the kernel does not take the shape
                if coding is not None:  # zeros, also where all are 0: the kernel then reads the scales without a copy
                    forms[name] = PackedForm(coding._replace(symmetric=False), outputs, inputs)
    return forms


def pack_linears(model: PreTrainedModel, forms: Mapping[str, PackedForm], weights: Mapping[str, TensorFile]) -> None:
    """Replace linear layers by packed ones, one after the other.

    Args:
        model: the model, whose layers' own weights are not read.
        forms: result of :func:`linear_forms`.
        weights: its argument.
    """
    for name, form in forms.items():
        module, file = model.get_submodule(name), weights[f"{name}.weight"]
        assert isinstance(module, nn.Linear)
        assert isinstance(file, ComputedTensor)
        assert file.coded is not None
        packed = PackedLinear(form, module.bias, module.weight.dtype).train(module.training)
        packed.fill(file.coded)
        model.set_submodule(name, packed)


def other_bytes(model: nn.Module, view: MoEView) -> int:
    """Return the bytes of the weights beside the routed experts, packed or not."""
    experts = {id(parameter) for layer in view for parameter in layer.experts.parameters()}
    return sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in experts)
