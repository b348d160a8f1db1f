"""The kit of the drafts' tests: tiny offloaded models, what their cycles were, and scripted drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast import OffloadedModel
from expertcast.checkpoints.bundled import REFERENCE
from expertcast.data.models import auto_class
from expertcast.runtime.drafts.costs import Cycle
from expertcast.runtime.drafts.governor import Governor
from expertcast.runtime.drafts.kinds import PassDraft
from expertcast.runtime.drafts.sequences import Feed
from tests.families.table import tiny_config

SLOTS = 6
LENGTHS = (3, None)
"""Tokens drafted in each cycle; None: the governor decides."""


def tiny(family: str, dtype: torch.dtype = torch.float32, vocabulary: int = 4096, **own: Any) -> PreTrainedModel:
    """Return a random model of the family with small windows; sequences end by their length only."""
    config = tiny_config(family)
    text = config.get_text_config(decoder=True)
    small = dict.fromkeys(("sliding_window", "sliding_window_size"), 8)
    for name, value in {**small, "vocab_size": vocabulary, **own}.items():
        if getattr(text, name, None) is not None:
            setattr(text, name, value)
    for one in (config, text):
        one.eos_token_id = one.pad_token_id = None
    torch.manual_seed(0)
    model: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype).eval()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "bias" in name and tensor.is_floating_point():
            tensor.data.normal_(std=0.1)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.name_or_path = REFERENCE  # whose tokenizer has as many tokens
    return model


def prompt(rows: int = 1, length: int = 5, vocabulary: int = 4096, seed: int = 1) -> Tensor:
    """ids [B, S], none of them padding."""
    return torch.randint(1, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(rows: int, vocabulary: int = 4096) -> dict[str, Tensor]:
    """Return prompts of 6, 5, 4 and 3 tokens, padded on the left."""
    ids_BS, mask_BS = prompt(rows, 6, vocabulary), torch.ones(rows, 6, dtype=torch.long)
    for row in range(rows):
        ids_BS[row, :row], mask_BS[row, :row] = 0, 0
    return {"input_ids": ids_BS, "attention_mask": mask_BS}


@contextmanager
def cycles_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Cycle]]:
    """Collect the cycles that the governor observes."""
    found: list[Cycle] = []
    observe = Governor.observe

    def told(self: Governor, cycle: Cycle) -> None:
        found.append(cycle)
        observe(self, cycle)

    with monkeypatch.context() as patched:
        patched.setattr(Governor, "observe", told)
        yield found


@dataclass
class Scripted(PassDraft):
    """Drafts by exact passes whose likeliest tokens are those of known sequences, optionally with wrong ones last."""

    texts_BS: Tensor = field(kw_only=True)
    """Whole sequences, including the prompts."""
    rights: Sequence[int | None] = field(default=(None,), kw_only=True)
    """Number of right tokens at the start of each row's draft; None: all. Repeated for further rows."""

    @contextmanager
    def passes(self) -> Iterator[None]:
        own = Feed.run

        def run(feed: Feed, start: int, end: int, keep: int) -> Tensor:
            logits_BKV, sequences = own(feed, start, end, keep), feed._sequences
            logits_BKV.fill_(-torch.inf)
            for row, ids_S in enumerate(sequences.ids_BS):
                token, right = self.next(ids_S[:end]), self.rights[row % len(self.rights)]
                wrong = right is not None and end - sequences.known[row] >= right
                logits_BKV[row, -1, (token + wrong) % logits_BKV.shape[2]] = 0.0
            return logits_BKV

        with super().passes(), pytest.MonkeyPatch.context() as patched:
            patched.setattr(Feed, "run", run)
            yield

    def next(self, ids_S: Tensor) -> int:
        """Return the token that follows in the sequence that begins so; 0 behind a wrong draft."""
        length = len(ids_S)
        found = (int(text_S[length]) for text_S in self.texts_BS if torch.equal(text_S[:length], ids_S))
        return next(found, 0)


def script(offloaded: OffloadedModel, texts_BS: Tensor, *rights: int | None) -> str:
    """Let the offload's draft `script` draft by script; the name to draft with."""
    made = Scripted("script", offloaded._engine, texts_BS=texts_BS, rights=rights or (None,))
    offloaded.drafting.drafts["script"] = made
    return "script"


def check_books(offloaded: OffloadedModel) -> None:
    """Check that no draft runs, no expert is protected or requested, and slots, policies and copies agree."""
    residency, engine = offloaded.residency, offloaded._engine
    assert engine.stage is None
    assert engine.ahead is None
    assert not residency.only_arrived
    while not residency.idle:
        for copy in list(residency.copies.values()):
            residency.link.wait(copy)
    assert not residency.window.keys
    assert not residency._packed
    slots = residency.pool.slots
    assert len(set(slots.values())) == len(slots)
    assert sorted([*slots.values(), *residency.pool.free_slots[0]]) == list(range(residency.pool.count))
