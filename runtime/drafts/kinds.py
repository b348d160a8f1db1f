"""The kinds of drafts, and what each is called.

int4, int8            all experts resident in less precision (C1, C12); `int4:calibrated` with error compensation
resident              the experts that have a slot, in place of those that have none
drop, substitute, cascade, drop_cascade, cache_aware     a lossy policy over the slots, with its options
speculate             the predictor's forecasts are executed
early_exit:layers=N   the first N blocks and the head
prompt_lookup, mtp, assistant    transformers' own

B sequences, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn
from transformers import GenerationConfig, LogitsProcessorList

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.drafts.proposals import Proposer
from expertcast.runtime.engine.engine import HostEngine, Stage
from expertcast.runtime.engine.speculation import Speculator


class Draft(ABC):
    """What writes tokens ahead."""

    name: str
    """As it was asked for."""
    nbytes: int = 0
    """Bytes of the device's memory that it takes beside the slots."""


class PassDraft(Draft):
    """Passes of the model itself, in a cheaper way, over the same cache (row C11)."""

    def __init__(self, name: str, engine: HostEngine) -> None:
        self.name, self._engine = name, engine

    @abstractmethod
    def passes(self) -> AbstractContextManager[None]:
        """Inside, the model's forwards draft."""


class StageDraft(PassDraft):
    """In a stage of its own."""

    def __init__(self, name: str, engine: HostEngine, stage: Stage, nbytes: int = 0) -> None:
        super().__init__(name, engine)
        self._stage, self.nbytes = stage, nbytes

    def passes(self) -> AbstractContextManager[None]:
        return self._engine.drafting(self._stage)


class ForecastDraft(PassDraft):
    """The engine itself, executing its forecasts at all layers that have one."""

    def __init__(self, name: str, engine: HostEngine, speculator: Speculator) -> None:
        super().__init__(name, engine)
        self._speculator = speculator

    @contextmanager
    def passes(self) -> Iterator[None]:
        speculator = self._speculator
        before, speculator.layers = speculator.layers, frozenset(range(len(speculator.view)))
        try:
            with self._engine.drafting(None):
                yield
        finally:
            speculator.layers = before


class EarlyExit(PassDraft):
    """The model's first blocks, then its head; the cache of these blocks is the verification's own.

    Args:
        name: as it was asked for.
        engine: of the model's offload.
        model: whose list of decoder blocks is shorter while it drafts.
        inside: a module in any of them.
        count: blocks that run, from 1 to one less than there are; 0: half of them.

    Raises:
        ExpertcastError: as many blocks cannot be left out.
    """

    def __init__(self, name: str, engine: HostEngine, model: nn.Module, inside: nn.Module, count: int) -> None:
        super().__init__(name, engine)
        lists = (
            (owner, attribute, blocks)
            for owner in model.modules()
            for attribute, blocks in owner.named_children()
            if isinstance(blocks, nn.ModuleList) and any(part is inside for part in blocks.modules())
        )
        found = next(lists, None)
        if found is None:
            raise ExpertcastError(f"draft {name!r}: this model keeps no list of its blocks: choose another draft")
        self._owner, self._attribute, self._blocks = found
        count = count or len(self._blocks) // 2
        if not 0 < count < len(self._blocks):
            raise ExpertcastError(f"draft {name!r}: give layers from 1 to {len(self._blocks) - 1}")
        self._first = nn.ModuleList(list(self._blocks)[:count])

    @contextmanager
    def passes(self) -> Iterator[None]:
        modules = self._owner._modules
        modules[self._attribute] = self._first
        try:
            with self._engine.drafting(None):
                yield
        finally:
            modules[self._attribute] = self._blocks


class ProposalDraft(Draft):
    """Tokens from somewhere else, all at once.

    Args:
        name: as it was asked for.
        make: a proposer for one row of a generation, from its configuration and logits processors.
        needs_hidden: it is shown the model's last hidden states.
        nbytes: of the device's memory that it takes.
    """

    def __init__(
        self, name: str, make: Callable[[GenerationConfig, LogitsProcessorList], Proposer], *,
        needs_hidden: bool = False, nbytes: int = 0,
    ) -> None:  # fmt: skip
        self.name, self.make, self.needs_hidden, self.nbytes = name, make, needs_hidden, nbytes
