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

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from torch import nn
from transformers import GenerationConfig, LogitsProcessorList

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.drafts.proposals import Proposer
from expertcast.runtime.engine.engine import HostEngine, Stage
from expertcast.runtime.engine.speculation import Speculator


@dataclass
class Draft:
    """What writes tokens ahead."""

    name: str
    """As it was asked for."""
    nbytes: int = field(default=0, kw_only=True)
    """Bytes of the device's memory that it takes beside the slots."""


@dataclass
class PassDraft(Draft):
    """Passes of the model itself, in a cheaper way, over the same cache (row C11)."""

    engine: HostEngine
    stage: Stage | None = None
    """Runs the MoE layers of these passes; None: the engine."""
    swap: tuple[object, str, object] | None = None
    """An object's attribute, and its value in these passes."""

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Inside, the model's forwards draft."""
        with ExitStack() as undo:
            if self.swap is not None:
                owner, name, value = self.swap
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            with self.engine.drafting(self.stage):
                yield


def forecast_draft(name: str, engine: HostEngine, speculator: Speculator) -> PassDraft:
    """The engine itself, executing its forecasts at all layers that have one."""
    return PassDraft(name, engine, swap=(speculator, "layers", frozenset(range(len(speculator.view)))))


def early_exit(name: str, engine: HostEngine, model: nn.Module, inside: nn.Module, count: int) -> PassDraft:
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
    lists = (
        (owner, attribute, blocks)
        for owner in model.modules()
        for attribute, blocks in owner.named_children()
        if isinstance(blocks, nn.ModuleList) and any(part is inside for part in blocks.modules())
    )
    found = next(lists, None)
    if found is None:
        raise ExpertcastError(f"draft {name!r}: this model keeps no list of its blocks: choose another draft")
    owner, attribute, blocks = found
    count = count or len(blocks) // 2
    if not 0 < count < len(blocks):
        raise ExpertcastError(f"draft {name!r}: give layers from 1 to {len(blocks) - 1}")
    return PassDraft(name, engine, swap=(owner, attribute, nn.ModuleList(list(blocks)[:count])))


@dataclass
class ProposalDraft(Draft):
    """Tokens from somewhere else, all at once."""

    make: Callable[[GenerationConfig, LogitsProcessorList], Proposer]
    """A proposer for one row of a generation, from its configuration and logits processors."""
    needs_hidden: bool = False
    """It is shown the model's last hidden states."""
