"""Sampled texts with a draft follow the exact model's own distribution: chi-square over whole texts.

A vocabulary of 4 and 4 new tokens: 256 texts, the probability of each the product of what the model says of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper

from expertcast.runtime import OffloadedModel, offload
from tests.runtime.drafts.loops import SLOTS, Scripted, cycles_of, script, tiny

VOCABULARY, NEW = 4, 4
PROMPT = torch.tensor([[1, 3, 1, 3, 2, 1]])
"""Prompt lookup finds the 1 again; with rows of different acceptance some are ahead of others."""
_LEAST = 5.0
"""Texts expected in a class of the test at least: rarer ones are one class."""


@pytest.fixture(scope="module")
def offloaded() -> Iterator[OffloadedModel]:
    model = tiny("qwen3_moe", vocabulary=VOCABULARY)
    model.lm_head.weight.data.mul_(0.6)  # every text has its chance
    for name, tensor in model.named_parameters():
        if "down_proj" in name:  # and experts matter
            tensor.data.mul_(10.0)
    with offload(model, slots=SLOTS) as opened:
        yield opened


def probabilities(offloaded: OffloadedModel, given: dict[str, Any]) -> Tensor:
    """[256] of each text, from the exact model's logits over the whole texts at once."""
    texts = torch.tensor(list(product(range(VOCABULARY), repeat=NEW)))
    whole_BS = torch.cat([PROMPT.expand(len(texts), -1), texts], dim=1)
    with torch.no_grad():
        logits_BSV = offloaded.model(whole_BS).logits.float()
    chance_B = torch.ones(len(texts))
    for place in range(NEW):
        column = PROMPT.shape[1] + place
        scores_BV = TemperatureLogitsWarper(given.get("temperature", 1.0))(whole_BS, logits_BSV[:, column - 1])
        if given["top_k"]:
            scores_BV = TopKLogitsWarper(given["top_k"])(whole_BS, scores_BV)
        chance_B *= scores_BV.softmax(dim=-1).gather(1, texts[:, place : place + 1])[:, 0]
    return chance_B


def chi_square(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom; the rarest texts are one class."""
    rare = expected < _LEAST
    kept = [(float(one), float(mean)) for one, mean in zip(counts[~rare], expected[~rare], strict=True)]
    if float(expected[rare].sum()) >= _LEAST:
        kept.append((float(counts[rare].sum()), float(expected[rare].sum())))
    return sum((one - mean) ** 2 / mean for one, mean in kept), len(kept) - 1


def far(freedom: int) -> float:
    """Where one in a million of chi-square's values lies beyond, by Wilson and Hilferty."""
    return float(freedom * (1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5) ** 3)


@pytest.mark.parametrize("given", [{"top_k": 0}, {"top_k": 3, "temperature": 1.6}])
@pytest.mark.parametrize(
    ("draft", "length", "rows", "batches"),
    [("int4", 2, 1000, 8), ("early_exit", 2, 1000, 8), ("resident", 2, 4, 250), ("prompt_lookup", 2, 1000, 4),
     ("script", 2, 1000, 4)],
)  # fmt: skip
def test_texts_follow_the_exact_model(
    draft: str,
    length: int,
    rows: int,
    batches: int,
    given: dict[str, Any],
    offloaded: OffloadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`script` proposes 1 whatever the text is: a certain guess that is mostly wrong. With many rows all experts are
    needed, and `resident` replaces none."""
    torch.manual_seed(1)
    if draft == "script":
        draft = script(offloaded, PROMPT, None)
        monkeypatch.setattr(
            Scripted, "propose", lambda _self, _text, most: (torch.ones(1, most, dtype=torch.long), None)
        )
    counts = torch.zeros(VOCABULARY**NEW)
    with cycles_of(monkeypatch) as cycles:
        for _ in range(batches):
            ids_BS = offloaded.generate(
                PROMPT, do_sample=True, max_new_tokens=NEW, num_return_sequences=rows, draft=draft, draft_length=length,
                **given,
            )[:, PROMPT.shape[1] :]  # fmt: skip
            place_B = (ids_BS * torch.tensor([64, 16, 4, 1])).sum(dim=1)
            counts += torch.bincount(place_B, minlength=len(counts))
    assert offloaded.drafting is not None
    offloaded.drafting.drafts.pop("prompt_lookup", None)
    judged = [kept - known for cycle in cycles for kept, known in zip(cycle.accepted, cycle.known, strict=True)]
    offered = sum(cycle.drafted - min(known, cycle.drafted) for cycle in cycles for known in cycle.known)
    assert 0.05 * offered < sum(judged) < 0.95 * offered
    assert any(max(cycle.known) > min(cycle.known) for cycle in cycles), "rows are never apart"
    chance = probabilities(offloaded, given)
    torch.testing.assert_close(float(chance.sum()), 1.0)
    assert counts[chance == 0].sum() == 0
    found, freedom = chi_square(counts, chance * rows * batches)
    assert freedom > 10
    assert found < far(freedom), (found, freedom)


def test_another_distribution_is_found_out(offloaded: OffloadedModel) -> None:
    """The test itself: texts of the model at temperature 1.1 are not taken for those at 1."""
    chance, other = (probabilities(offloaded, {"top_k": 0, "temperature": own}) for own in (1.0, 1.25))
    draw = torch.Generator().manual_seed(1)
    counts = torch.bincount(torch.multinomial(other, 4000, True, generator=draw), minlength=len(other))
    found, freedom = chi_square(counts.float(), chance * 4000)
    assert found > far(freedom)
