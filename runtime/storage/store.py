"""The experts of a model in host memory: one contiguous, aligned block per expert.

L MoE layers, E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from expertcast.data.machine import with_index
from expertcast.predictors.messages import ExpertcastError, Progress
from expertcast.predictors.view import MoELayer, MoEView
from expertcast.runtime.storage.layout import FULL, BlockLayout, ExpertsForm, device_of, expert_parameters
from expertcast.runtime.storage.memory import HostMemory, PageLock, give_back_freed
from expertcast.runtime.storage.packed import PackedExperts, PackedLayout

Write = Callable[[dict[str, Tensor]], None]
"""Fills one layer's parameters [E, ...], by name."""


@dataclass(slots=True)
class _Origin:
    """Where one layer's parameter came from, so that it can be put back exactly."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]


class ExpertStore:
    """Host copies of all experts; page-locked when the model computes on CUDA.

    Three methods fill it layer by layer: `pack` moves the weights out of a model, `fill` calls a checkpoint's reader,
    and `open` gives a layer's blocks to the caller. `pack` never holds a second copy of the whole model. `unpack` puts
    the weights back into the same `nn.Parameter` objects, bit for bit. The blocks of one layer lie one after another.

    Args:
        view: the model's MoE layers, or the form of its experts.
        device: where the model computes. None: where the experts of a view lie.
        pinned: page-lock the memory, as far as there is a budget for it.
        lock: page-locks it, in place of the default one.

    Raises:
        ExpertcastError: no device is given and the experts lie on several, or have no weights.
    """

    name = "memory"
    addressable = True
    """Whether blocks lie in memory, and stay where they are."""

    def __init__(
        self,
        view: MoEView | ExpertsForm,
        *,
        device: torch.device | None = None,
        pinned: bool = False,
        lock: PageLock | None = None,
    ) -> None:
        form = view if isinstance(view, ExpertsForm) else ExpertsForm.of(view)
        self.shape = form.shape
        self.layers, self.experts, self.top_k = form.shape.layers, form.shape.experts, form.shape.top_k
        self.layout = form.layout
        if device is None:
            assert isinstance(view, MoEView), "a form lies on no device: say where the model computes"
            device = device_of(view)
        self.device = with_index(device)
        self._lock = PageLock() if lock is None and pinned else lock
        self._memory: list[HostMemory | None] = [None] * self.layers
        self._layer_bytes: list[Tensor | None] = [None] * self.layers
        self._blocks: list[Tensor | None] = [None] * (self.layers * self.experts)
        self._origins: list[list[_Origin]] = []
        self.packed: dict[str, PackedExperts] = {}
        """Copies in lower precisions, beside the full ones."""
        self.source: Callable[[int, dict[str, Tensor]], None] | None = None
        """Fills a layer's parameters [E, ...] when a model without experts' weights is packed."""

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.layers * self.layer_nbytes

    @property
    def stored_nbytes(self) -> int:
        """Bytes that they take where they lie."""
        return self.nbytes

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer's blocks."""
        return self.experts * self.layout.block_bytes

    @property
    def pinned_layers(self) -> list[bool]:
        """Per layer, whether its blocks are page-locked."""
        return [memory is not None and memory.pinned for memory in self._memory]

    def block(self, key: int) -> Tensor:
        """uint8 of one expert, as many bytes as its layer uses."""
        block = self._blocks[key]
        assert block is not None, f"the store holds no expert {key}"
        return block

    def holds(self, layer: int) -> bool:
        """Whether the layer is filled."""
        return self._layer_bytes[layer] is not None

    def views(self, layer: int) -> dict[str, Tensor]:
        """One layer's parameters in host memory, [E, ...] by name."""
        blocks = self._layer_bytes[layer]
        assert blocks is not None, f"the store holds no layer {layer}"
        return self.layout.views(blocks, layer)

    def read_ahead(self, keys: Iterable[int]) -> None:
        """Prepare for copies of these experts; does nothing for a store in memory."""

    def open(self, layer: int) -> dict[str, Tensor]:
        """Make one layer's blocks, and give its parameters [E, ...] by name to be written, expert by expert and at any
        time before the layer is used; layers in any order."""
        memory = HostMemory(self.layer_nbytes, self._lock)
        self._memory[layer] = memory
        self._hold(layer, memory.bytes)
        return self.views(layer)

    def fill(self, layer: int, write: Write) -> None:
        """Make one layer's blocks and let `write` fill them. Layers come first to last."""
        write(self.open(layer))

    def finish(self) -> None:
        """Called once, when all layers are filled."""

    def pack(self, view: MoEView) -> None:
        """Take every expert out of the model and release the model's own memory for it.

        Experts without weights (on the meta device) are read from `source`, unless the store holds them already.

        Raises:
            ExpertcastError: the model's experts differ in shape or dtype from the store's, or have no weights.
        """
        if BlockLayout.of(view) != self.layout or (len(view), view.shape.experts) != (self.layers, self.experts):
            raise ExpertcastError("the store was made for experts of another shape, dtype or number: make a new one")
        layers = Progress("packing experts", unit="layer", steps=view, shown=self.source is None)
        written = [self._pack_layer(layer) for layer in layers]
        if any(written):
            self.finish()

    def _pack_layer(self, layer: MoELayer) -> bool:
        """Whether anything had to be written."""
        parameters = expert_parameters(layer.experts, layer.num_experts)
        self._origins.append([_Origin(layer.experts, name, p, p.shape, p.stride()) for name, p in parameters.items()])
        if any(parameter.is_meta for parameter in parameters.values()):
            if self.holds(layer.index):
                return False
            if self.source is None:
                raise ExpertcastError("the model has no weights (meta device): load it before offloading")
            self.fill(layer.index, partial(self.source, layer.index))
            return True
        self.fill(layer.index, partial(_copy_parameters, parameters))
        for parameter in parameters.values():
            parameter.data = parameter.data.new_empty(0)
        give_back_freed()
        return True

    def add_copies(self, precisions: Iterable[str]) -> None:
        """Make copies of all experts in lower precisions; called when the store is filled.

        They are held in memory, whatever the store itself is, and freed by `unpack` and `close`.

        Raises:
            ExpertcastError: unknown precision, or one that would not make these experts smaller.
        """
        layouts = {name: PackedLayout.of(self.layout, name) for name in precisions if name not in self.packed}
        for name, layout in layouts.items():
            copies = PackedExperts(layout, self.layers, self.experts, self._lock)
            for layer in Progress(f"packing experts as {name}", unit="layer", steps=range(self.layers)):
                copies.fill(layer, self.views(layer))
            self.packed[name] = copies

    def copies(self, precision: str) -> PackedExperts:
        """The copies in a lower precision.

        Raises:
            ExpertcastError: there are none.
        """
        found = self.packed.get(precision)
        if found is None:
            there = ", ".join((FULL, *self.packed))
            raise ExpertcastError(
                f"the store holds no {precision!r} copies of the experts: choose from {there}, or make them with "
                "store.add_copies"
            )
        return found

    def unpack(self) -> None:
        """Give every parameter its weights back, on the device it came from, and free the blocks as it goes.

        Parameters that had no weights get none.
        """
        self._free_copies()
        for origin in (origin for origins in self._origins for origin in origins):
            origin.module._parameters[origin.name] = origin.parameter  # the slots' memory may go before ours is taken
        for layer, origins in enumerate(self._origins):
            taken = [each for each in origins if not each.parameter.is_meta and each.parameter.numel() == 0]
            views = self.views(layer) if taken else {}
            for origin in taken:
                dtype, device = origin.parameter.dtype, self.device
                data = torch.empty_strided(origin.size, origin.stride, dtype=dtype, device=device)
                origin.parameter.data = data.copy_(views[origin.name])
            self._free(layer)
        self._origins = []

    def close(self) -> None:
        """Free everything; called by whoever made the store, after `unpack` if a model was packed."""
        self._free_copies()
        for layer in range(self.layers):
            self._free(layer)

    def _hold(self, layer: int, blocks: Tensor) -> None:
        """These bytes [E * block_bytes] are the layer's blocks."""
        self._layer_bytes[layer] = blocks
        first = layer * self.experts
        used = blocks.view(self.experts, -1)[:, : self.layout.nbytes_of(layer)]
        self._blocks[first : first + self.experts] = used.unbind(0)

    def _free_copies(self) -> None:
        while self.packed:
            self.packed.popitem()[1].release()

    def _free(self, layer: int) -> None:
        first = layer * self.experts
        self._blocks[first : first + self.experts] = [None] * self.experts
        self._layer_bytes[layer] = None
        memory, self._memory[layer] = self._memory[layer], None
        if memory is not None:
            memory.release()


def _copy_parameters(parameters: dict[str, nn.Parameter], views: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            views[name].copy_(parameter)
