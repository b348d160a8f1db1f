"""The kit of the drafts' tests: tiny offloaded models, what their cycles were, hand-made drafts, and cycles of
transformers' own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from expertcast import OffloadedModel
from expertcast.checkpoints.bundled import REFERENCE
from expertcast.data.models import auto_class
from expertcast.runtime.drafts.costs import Cycle
from expertcast.runtime.drafts.decoding import accept_greedy
from expertcast.runtime.drafts.governor import Governor
from expertcast.runtime.drafts.kinds import ProposalDraft
from expertcast.runtime.drafts.proposals import Proposer
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


class Scripted(Proposer):
    """Proposes the continuation of known sequences, optionally with wrong tokens at the end.

    Args:
        texts_BS: whole sequences without padding, including the prompts.
        right: number of right tokens at the start of each proposal; None: all.
        vocabulary: vocabulary size, V.
    """

    def __init__(self, texts_BS: Tensor, right: int | None, vocabulary: int = 4096) -> None:
        self._texts, self._right, self._vocabulary = texts_BS, right, vocabulary

    def propose(self, ids_1S: Tensor, most: int) -> tuple[Tensor, Tensor | None]:
        length = ids_1S.shape[1]
        row = next(text_S for text_S in self._texts if torch.equal(text_S[:length], ids_1S[0]))
        ids_m = row[length : length + most].clone()
        if self._right is not None:
            ids_m[self._right :] = (ids_m[self._right :] + 1) % self._vocabulary
        return ids_m[None], None


def script(offloaded: OffloadedModel, texts_BS: Tensor, right: int | None, vocabulary: int = 4096) -> str:
    """Let the offload's `prompt_lookup` propose by script; the name to draft with."""

    def make(config: GenerationConfig, processors: LogitsProcessorList) -> Scripted:
        del config, processors
        return Scripted(texts_BS, right, vocabulary)

    assert offloaded.drafting is not None
    offloaded.drafting.drafts["prompt_lookup"] = ProposalDraft("prompt_lookup", make)
    return "prompt_lookup"


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


# transformers' own assisted decoding cycle by cycle, and ours with a proposer

Candidates = list[tuple[list[int], list[int]]]


def repeating(length: int = 9, seed: int = 3) -> Tensor:
    """Ids [1, length] that repeat themselves."""
    ids = torch.randint(10, 4096, (1, length), generator=torch.Generator().manual_seed(seed))
    return torch.cat([ids, ids[:, : length // 2]], dim=1)


def prepared(model: PreTrainedModel, **options: Any) -> GenerationConfig:
    """Return a configuration as `generate` prepares it."""
    config, _ = model._prepare_generation_config(GenerationConfig(pad_token_id=0, **options))
    model._prepare_special_tokens(config, True, device=torch.device("cpu"))
    return config


def recorded(
    monkeypatch: pytest.MonkeyPatch, generator: type, model: PreTrainedModel, text: Tensor, **options: Any
) -> tuple[Candidates, list[int]]:
    """Text and candidates of each cycle of transformers' own greedy `generate`, and its output."""
    cycles: Candidates = []
    own = generator.get_candidates

    def get_candidates(self: Any, input_ids: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
        ids, logits = own(self, input_ids, **given)
        cycles.append((input_ids[0].tolist(), ids[0, input_ids.shape[1] :].tolist()))
        return ids, logits

    with monkeypatch.context() as patched:
        patched.setattr(generator, "get_candidates", get_candidates)
        output = model.generate(text, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0, **options)
    return cycles, output[0].tolist()


def decoded(model: PreTrainedModel, proposer: Proposer, text: Tensor, lengths: list[int]) -> tuple[Candidates, Tensor]:
    """Our cycles, greedy, without a cache; a length of 0 is a cycle without a draft."""
    cycles: Candidates = []
    for most in lengths:
        drafted = text[:, :0]
        if most:
            drafted, logits = proposer.propose(text, most)
            assert logits is None
            assert drafted.shape[1] <= most
            cycles.append((text[0].tolist(), drafted[0].tolist()))
        exact = model(input_ids=torch.cat([text, drafted], dim=1)).logits[:, text.shape[1] - 1 :]
        ids, accepted = accept_greedy(exact, drafted)
        text = torch.cat([text, ids[:, : int(accepted[0]) + 1]], dim=1)
    return cycles, text
