"""Kinds of drafts.

    int4, int8            all experts in low precision on the device; `int4:calibrated` compensates rounding errors
    resident              resident experts replace absent ones
    drop, substitute, cascade, drop_cascade, cache_aware     a lossy policy, with its options
    speculate             the model executes the forecasts of the predictor
    early_exit:layers=N   the first N blocks and the output head
    prompt_lookup, mtp    proposers of transformers; also an assistant model

Source of int4 drafts: MoE-SpeQ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from torch import nn
from transformers import GenerationConfig, LogitsProcessorList

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.drafts.proposals import Proposer
from expertcast.runtime.engine.engine import Engine, Stage
from expertcast.runtime.engine.speculation import Speculator


@dataclass
class Draft:
    """Base class of drafts, which propose tokens for verification."""

    name: str
    """Name with options."""
    nbytes: int = field(default=0, kw_only=True)
    """Device memory of the draft in addition to the slots, in bytes."""


@dataclass
class PassDraft(Draft):
    """Draft by cheaper passes of the model itself, which share its key-value cache."""

    engine: Engine
    stage: Stage | None = None
    """Runs the MoE layers while drafting; None: the engine."""
    swap: tuple[object, str, object] | None = None
    """An object, the name of its attribute, and the attribute's value while drafting."""

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Return a context manager in which forward passes of the model are draft passes."""
        with ExitStack() as undo:
            if self.swap is not None:
                owner, name, value = self.swap
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            with self.engine.drafting(self.stage):
                yield


def forecast_draft(name: str, engine: Engine, speculator: Speculator) -> PassDraft:
    """Return the draft that executes forecasts at all layers that have one."""
    return PassDraft(name, engine, swap=(speculator, "layers", frozenset(range(len(speculator.view)))))


def early_exit(name: str, engine: Engine, model: nn.Module, inside: nn.Module, count: int) -> PassDraft:
    """Return the draft that runs the first blocks and the output head.

    Args:
        name: name of the draft, with options.
        engine: engine of the offload.
        model: the model; its list of decoder blocks is replaced by a shorter one while drafting.
        inside: a module inside one of the decoder blocks.
        count: number of blocks that run, less than all; 0: half of them.

    Raises:
        ExpertcastError: `count` is out of range, or the model has no list of blocks.
    """
    lists = (
        (owner, attribute, blocks)
        for owner in model.modules()
        for attribute, blocks in owner.named_children()
        if isinstance(blocks, nn.ModuleList) and any(part is inside for part in blocks.modules())
    )
    found = next(lists, None)
    if found is None:
        raise ExpertcastError(f"draft {name!r} needs a model with a list of decoder blocks: choose another draft")
    owner, attribute, blocks = found
    count = count or len(blocks) // 2
    if not 0 < count < len(blocks):
        raise ExpertcastError(f"draft {name!r}: give layers from 1 to {len(blocks) - 1}")
    return PassDraft(name, engine, swap=(owner, attribute, nn.ModuleList(list(blocks)[:count])))


@dataclass
class ProposalDraft(Draft):
    """Draft that proposes all tokens of a cycle at once, without passes of the offloaded model."""

    make: Callable[[GenerationConfig, LogitsProcessorList], Proposer]
    """Creates the proposer of one row from the configuration and logits processors of a generation."""
    needs_hidden: bool = False
    """Whether proposers read the last hidden states of the model."""
