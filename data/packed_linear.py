"""Linear layers and embeddings in ggml's block types, beside packed experts.

The blocks are those of :mod:`expertcast.data.packed_experts`, for one matrix instead of E. N outputs, I inputs, P rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertcast.data import ggml
from expertcast.data.machine import mapped, run_alone, usable_processors
from expertcast.data.packed_experts import BlockForm, PackedMatrix, Piece, expanded
from expertcast.data.packed_layer import fuse_layers
from expertcast.data.weights.files import ComputedTensor, TensorFile
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoEView

_OPERATIONS = torch.library.Library("expertcast", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPERATIONS.define(  # type: ignore[no-untyped-call]
    "packed_product(Tensor rows, Tensor blocks, str kind, bool interleave) -> Tensor"
)


class PackedModule(nn.Module):
    """A layer with the blocks of one packed matrix as a parameter.

    Args:
        form: form of the matrix, of one piece.
        dtype: dtype of the model.
    """

    def __init__(self, form: BlockForm, dtype: torch.dtype) -> None:
        super().__init__()
        self.form = form
        blocks = torch.empty(1, form.nbytes, dtype=torch.uint8)
        self.register_parameter(f"weight{form.suffix}", nn.Parameter(blocks, requires_grad=False))
        self.__dict__["matrix"] = PackedMatrix(self._parameters, "weight", form, transposed=False, dtype=dtype)

    @property
    def weight(self) -> Tensor:
        """The weights [N, I] in the model's dtype, expanded anew by each read."""
        matrix: PackedMatrix = self.__dict__["matrix"]
        return self.form.expand(matrix.blocks[0]).to(matrix.dtype)

    def extra_repr(self) -> str:
        """Describe the layer's sizes and form."""
        return f"{self.form.inputs} x {self.form.outputs}, form={self.form}"


class PackedEmbedding(PackedModule):
    """An embedding whose rows are expanded when they are looked up."""

    def __init__(self, form: BlockForm, dtype: torch.dtype) -> None:
        super().__init__(form, dtype)
        self.num_embeddings, self.embedding_dim = form.outputs, form.inputs

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, [..., I] in the model's dtype."""
        matrix: PackedMatrix = self.__dict__["matrix"]
        ((piece, rows),) = self.form.split(matrix.blocks[0])
        return expanded(piece.kind, rows[ids.reshape(-1)]).view(*ids.shape, self.embedding_dim).to(matrix.dtype)


class PackedLinear(PackedModule):
    """A linear layer.

    Args:
        form, dtype: as for the base.
        bias: parameter [N], or None.
    """

    bias: nn.Parameter | None

    def __init__(self, form: BlockForm, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__(form, dtype)
        self.in_features, self.out_features = form.inputs, form.outputs
        self.register_parameter("bias", bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Multiply [..., I] by the weights; return [..., N] in the dtype of the input."""
        rows_P1I, matrix = hidden.reshape(-1, 1, self.in_features), self.__dict__["matrix"]
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            ((kind, _),) = self.form.pieces
            given = rows_P1I, matrix.blocks, kind, self.form.interleave
            output: Tensor = torch.ops.expertcast.packed_product(*given)
        else:
            output = matrix.product(rows_P1I)
        if self.bias is not None:
            output = output.add_(self.bias)
        return output.view(*hidden.shape[:-1], self.out_features)


def _product(rows_P1I: Tensor, blocks: Tensor, kind: str, interleave: bool) -> Tensor:
    inputs = rows_P1I.shape[2]
    form = BlockForm((Piece(kind, blocks.shape[1] // ggml.row_bytes(kind, inputs)),), inputs, interleave)
    return PackedMatrix({f"weight{form.suffix}": blocks}, "weight", form, False, rows_P1I.dtype).product(rows_P1I)


_OPERATIONS.impl("packed_product", _product, "CPU")  # type: ignore[no-untyped-call]
"""One operation of a traced program, since a trace cannot record products of ggml."""


def linear_forms(model: PreTrainedModel, view: MoEView, weights: Mapping[str, TensorFile]) -> dict[str, BlockForm]:
    """Return the forms of the linear layers and embeddings that can stay packed, by the module's name.

    Routers, experts, tied weights, and layers that no type of ggml holds are left out.

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
        if type(module) not in (nn.Linear, nn.Embedding) or module in apart or f"{name}.weight" in shared:
            continue
        if isinstance(file, ComputedTensor) and file.get_shape() == list(module.weight.shape):
            pieces = file.pieces()
            if pieces is not None and len(pieces) == 1 and pieces[0].kind not in ggml.FLOATS:
                with suppress(ExpertcastError):  # blocks do not divide the rows
                    forms[name] = BlockForm(pieces, file.get_shape()[1], interleave=type(module) is nn.Linear)
    return forms


@torch.no_grad()
def pack_linears(
    model: PreTrainedModel, forms: Mapping[str, BlockForm], weights: Mapping[str, TensorFile],
    routers: Iterable[str] = (),
) -> None:  # fmt: skip
    """Replace linear layers and embeddings by packed ones, side by side in :func:`machine.mapped` memory.

    Args:
        model: the model, whose layers' own weights are not read.
        forms: result of :func:`linear_forms`.
        weights: its argument.
        routers: names of the routers.
    """
    places = mapped(*(form.nbytes for form in forms.values())) if forms else []
    for (name, form), place in zip(forms.items(), places, strict=True):
        module = model.get_submodule(name)
        packed: PackedModule
        if isinstance(module, nn.Linear):
            packed = PackedLinear(form, module.bias, module.weight.dtype)
        else:
            packed = PackedEmbedding(form, module.weight.dtype)  # type: ignore[arg-type, union-attr]
        packed.train(module.training)
        packed.__dict__["matrix"].blocks.data = place.unsqueeze(0)
        model.set_submodule(name, packed)

    def fill(name: str, form: BlockForm, place: Tensor) -> None:
        file = weights[f"{name}.weight"]
        assert isinstance(file, ComputedTensor)
        assert file.blocks is not None
        form.put(file.blocks(...), place)

    with ThreadPoolExecutor(usable_processors(), initializer=run_alone) as threads:
        list(threads.map(fill, forms, forms.values(), places))
    fuse_layers(model, routers)


def other_bytes(model: nn.Module, view: MoEView) -> int:
    """Return the bytes of the weights beside the routed experts, packed or not."""
    experts = {id(parameter) for layer in view for parameter in layer.experts.parameters()}
    return sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in experts)
