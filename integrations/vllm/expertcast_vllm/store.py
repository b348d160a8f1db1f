"""Where a worker's experts lie once vLLM has loaded them."""

from __future__ import annotations

import torch

from expertcast.runtime.storage.host_memory import HostMemory
from expertcast.runtime.storage.layout import ExpertsForm
from expertcast.runtime.storage.store import ExpertStore


class LoadedStore(ExpertStore):
    """Experts in the very memory that vLLM's loader wrote them to."""

    def __init__(self, form: ExpertsForm, device: torch.device) -> None:
        super().__init__(form, device=device)

    def adopt(self, layer: int, memory: HostMemory) -> None:
        """This is the layer's memory: blocks of all its experts, one after another."""
        self._memory[layer] = memory
        self._hold(layer, memory.bytes)
