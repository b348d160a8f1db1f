"""transformers' own assisted decoding cycle by cycle, and ours with a proposer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from expertcast.runtime.drafts.acceptance import accept_greedy
from expertcast.runtime.drafts.proposals import Proposer

NEW = 40
Candidates = list[tuple[list[int], list[int]]]


def prompt(length: int = 9, seed: int = 3) -> Tensor:
    """Ids [1, length] that repeat themselves."""
    ids = torch.randint(10, 4096, (1, length), generator=torch.Generator().manual_seed(seed))
    return torch.cat([ids, ids[:, : length // 2]], dim=1)


def prepared(model: PreTrainedModel, **options: Any) -> GenerationConfig:
    """As `generate` prepares it."""
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
        output = model.generate(text, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, **options)
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
