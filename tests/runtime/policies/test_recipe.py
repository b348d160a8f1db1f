"""Run the code of docs/add-a-policy.md."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from expertcast.predictors import ExpertcastError
from expertcast.runtime.policies import EVICTION, CacheShape
from tests.families.models import tiny_model

PAGE = Path(__file__).resolve().parents[3] / "docs" / "add-a-policy.md"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Run the code of the page and return its names; restore the registry afterwards."""
    monkeypatch.setattr(EVICTION, "_classes", dict(EVICTION._classes))
    module = ModuleType("policy_recipe")  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, "policy_recipe", module)
    namespace: dict[str, Any] = module.__dict__
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), namespace)
    return namespace


def test_the_recipe_works(recipe: dict[str, Any]) -> None:
    assert EVICTION.names()[-1] == "segmented"
    model = tiny_model("qwen3_moe")
    ids = torch.arange(1, 9).unsqueeze(0)
    expected = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True,
                              output_logits=True)  # fmt: skip
    stats = recipe["decode"](model, {"input_ids": ids}, slots=16)
    assert stats.total.misses > 0
    with_policies = recipe["expertcast"].offload(model, policies=recipe["POLICIES"], slots=16)
    with with_policies as offloaded:
        found = offloaded.generate(input_ids=ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True,
                                   output_logits=True)  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(expected.logits, found.logits, strict=True))


def test_its_order(recipe: dict[str, Any]) -> None:
    """Three slots, at most one of them kept. 1 is used twice and kept; 2 twice later, so that 1 is used-once again.

    insert 1 2 3; use 1, 2, 3, 1: once 2 3, often 1. Victims: 2 3 1.
    use 2: often would hold 1 and 2, 1 goes to the end of once. Victims: 3 1 2.
    """
    policy = EVICTION.choose("segmented:kept=0.4").make(CacheShape(layers=1, experts=8, top_k=2, slots=3))
    for key in (1, 2, 3):
        policy.insert(key)
        policy.use([key])
    policy.use([1])
    assert _victims(policy) == [2, 3, 1]
    policy.use([2])
    assert _victims(policy) == [3, 1, 2]
    policy.remove(1)
    assert _victims(policy) == [3, 2]
    with pytest.raises(ExpertcastError, match="kept='2'"):
        EVICTION.choose("segmented:kept=2")


def _victims(policy: Any) -> list[int]:
    victims: list[int] = []
    while (key := policy.victim(victims)) is not None:
        victims.append(key)
    return victims
