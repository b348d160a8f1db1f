"""The experts of a model in host memory: one contiguous, aligned block per expert.

L MoE layers, E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from expertcast.data.machine import with_index
from expertcast.predictors.messages import ExpertcastError, Progress
from expertcast.predictors.view import MoELayer, MoEView
from expertcast.runtime.storage.layout import FULL, BlockLayout, ExpertsForm, Region, device_of, expert_parameters
from expertcast.runtime.storage.memory import Driver, HostMemory, PageLock, trim_heap
from expertcast.runtime.storage.packed import PackedExperts, PackedLayout

if TYPE_CHECKING:
    from expertcast.runtime.storage.codecs import Codec

Write = Callable[[dict[str, Tensor]], None]
"""Fills one layer's parameters [E, ...], by name."""


@dataclass(slots=True)
class _Origin:
    """A parameter's module, name, size and strides, for restoring it exactly."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]


class ExpertStore:
    """Host copies of all experts, optionally page-locked.

    Three methods fill it layer by layer: `pack` moves the weights out of a model, `fill` calls a checkpoint's reader,
    and `open` returns a layer's blocks to the caller. `pack` never holds a second copy of the whole model. `unpack`
    moves the weights back into the same `nn.Parameter` objects, bit for bit. The blocks of one layer are contiguous.

    Args:
        view: the model's MoE layers, or the form of its experts.
        device: where the model computes. None: the device of the experts of a view.
        pinned: page-lock the memory, within the default budget.
        lock: page-locks the memory, in place of the default one.

    Raises:
        ExpertcastError: `device` is None and the experts are on several devices or have no weights.
    """

    name = "memory"
    addressable = True
    """Whether blocks have a fixed address in memory."""
    codec: Codec | None = None
    """Codec of the store's file; None: the blocks are in memory."""

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
            assert isinstance(view, MoEView), "a form has no device: pass the device where the model computes"
            device = device_of(view)
        self.device = with_index(device)
        self._lock = PageLock(driver=Driver(self.device)) if lock is None and pinned else lock
        self._memory: list[HostMemory | None] = [None] * self.layers
        self._layer_bytes: list[Tensor | None] = [None] * self.layers
        self._blocks: list[Tensor | None] = [None] * (self.layers * self.experts)
        self._origins: list[list[_Origin]] = []
        self.packed: dict[str, PackedExperts] = {}
        """Packed copies of the experts, by precision."""
        self.source: Callable[[int, dict[str, Tensor]], None] | None = None
        """Fills a layer's parameters [E, ...] when `pack` gets a model whose experts have no weights."""

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.layers * self.layer_nbytes

    @property
    def stored_nbytes(self) -> int:
        """Bytes that the blocks take in the store, coded if its codec compresses."""
        return self.nbytes

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer's blocks."""
        return self.experts * self.layout.block_bytes

    def regions(self, slots: int) -> tuple[Region, ...]:
        """Divide slots among layers by the size of their experts, largest first, each layer's share being the same.

        Layers whose region would have fewer slots than four tokens need share the next larger ones.
        """
        sizes, least = list(map(self.layout.nbytes_of, range(self.layers))), 4 * self.top_k * self.layers
        groups = list[list[int]]()
        for layer in sorted(range(self.layers), key=lambda layer: -sizes[layer]):
            if groups and (sizes[groups[-1][0]] == sizes[layer] or slots * len(groups[-1]) < least):
                groups[-1].append(layer)
            else:
                groups.append([layer])
        if len(groups) > 1 and slots * len(groups[-1]) < least:
            groups = [*groups[:-2], groups[-2] + groups[-1]]
        ends = [slots * end // self.layers for end in itertools.accumulate(map(len, groups), initial=0)]
        return tuple(
            Region(tuple(layers), end - start, sizes[layers[0]])
            for layers, (start, end) in zip(groups, itertools.pairwise(ends), strict=True)
        )

    def slots_nbytes(self, slots: int) -> int:
        """Return the bytes of some slots."""
        return sum(region.slots * region.block_bytes for region in self.regions(slots))

    def slots_in(self, nbytes: int) -> int:
        """Return the largest number of slots in some bytes, at most one per expert."""
        smallest = min(map(self.layout.nbytes_of, range(self.layers)))
        most = min(nbytes // smallest, self.layers * self.experts)
        return next((slots for slots in range(most, 0, -1) if self.slots_nbytes(slots) <= nbytes), 0)

    def block(self, key: int) -> Tensor:
        """Return the bytes of one expert that its layer uses, uint8."""
        block = self._blocks[key]
        assert block is not None, f"the store holds no expert {key}"
        return block

    def holds(self, layer: int) -> bool:
        """Whether the layer is filled."""
        return self._layer_bytes[layer] is not None

    def views(self, layer: int) -> dict[str, Tensor]:
        """Return one layer's parameters in host memory, [E, ...] by name."""
        blocks = self._layer_bytes[layer]
        assert blocks is not None, f"the store holds no layer {layer}"
        return self.layout.views(blocks, layer)

    def open(self, layer: int) -> dict[str, Tensor]:
        """Allocate one layer's blocks and return its parameters, [E, ...] by name, for the caller to write.

        Experts may be written at any time before the layer is used, and layers opened in any order.
        """
        memory = HostMemory(self.layer_nbytes, self._lock)
        self._memory[layer] = memory
        self._hold(layer, memory.bytes)
        return self.views(layer)

    def fill(self, layer: int, write: Write) -> None:
        """Allocate one layer's blocks and let `write` fill them. Layers are filled in order."""
        write(self.open(layer))

    def finish(self) -> None:
        """Complete the store; called once, when all layers are filled."""

    def pack(self, view: MoEView) -> None:
        """Copy all experts into the store, layer by layer, and release the model's memory for them.

        Experts without weights (on the meta device) are read from `source`, unless the store already holds them.

        Raises:
            ExpertcastError: the model's experts differ in shape or dtype from the store's, or have no weights.
        """
        if BlockLayout.of(view) != self.layout or (len(view), view.shape.experts) != (self.layers, self.experts):
            raise ExpertcastError("the store is for experts of another shape, dtype or number: create a new one")
        layers = Progress("packing experts", unit="layer", steps=view, shown=self.source is None)
        written = [self._pack_layer(layer) for layer in layers]
        if any(written):
            self.finish()

    def _pack_layer(self, layer: MoELayer) -> bool:
        """Pack one layer. Returns False if the store already held it."""
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
        trim_heap()
        return True

    def add_copies(self, precisions: Iterable[str]) -> None:
        """Pack copies of all experts in lower precisions; called when the store is filled.

        The copies are in memory, even for a store on disk. `unpack` and `close` free them.

        Raises:
            ExpertcastError: a precision is unknown, or would not make these experts smaller.
        """
        layouts = {name: PackedLayout.of(self.layout, name) for name in precisions if name not in self.packed}
        for name, layout in layouts.items():
            copies = PackedExperts(layout, self.layers, self.experts, self._lock)
            for layer in Progress(f"packing experts as {name}", unit="layer", steps=range(self.layers)):
                copies.fill(layer, self.views(layer))
            self.packed[name] = copies

    def copies(self, precision: str) -> PackedExperts:
        """Return the packed copies of one precision.

        Raises:
            ExpertcastError: the store has no copies of this precision.
        """
        found = self.packed.get(precision)
        if found is None:
            there = ", ".join((FULL, *self.packed))
            raise ExpertcastError(
                f"the store holds no {precision!r} copies of the experts: choose from {there}, or call "
                "store.add_copies first"
            )
        return found

    def unpack(self) -> None:
        """Move the weights back into the model's parameters, on the original device, and free the blocks.

        Parameters that had no weights stay without. Blocks are freed layer by layer.
        """
        self._free_copies()
        for origin in (origin for origins in self._origins for origin in origins):
            origin.module._parameters[origin.name] = origin.parameter  # first, so that the slots' memory may be freed
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
        """Free everything. The store's owner calls it, after `unpack` if a model was packed."""
        self._free_copies()
        for layer in range(self.layers):
            self._free(layer)

    def _hold(self, layer: int, blocks: Tensor) -> None:
        """Register `blocks`, uint8 [E * block_bytes], as the layer's blocks."""
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
