"""Drafts in every kind of offload: without a cache, with slots by layer, over instant and slow links, from disk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from expertcast.runtime import EmulatedLink, offload
from expertcast.runtime.policies import Policies
from tests.runtime.drafts.loops import check_books, prompt, tiny

OFFLOADS: dict[str, dict[str, Any]] = {
    "no cache": {"slots": 6, "cache": False},
    "no cache, slow": {"slots": 6, "cache": False, "link": "slow"},
    "by layer": {"slots": 9, "policies": Policies(scope="layer"), "link": "slow"},
    "instant": {"slots": 6, "link": "instant"},
    "few slots": {"slots": 2, "link": "slow"},
    "all slots": {"slots": 24, "link": "slow"},
    "disk": {"slots": 6, "store": "disk"},
}


@pytest.mark.parametrize("kind", OFFLOADS)
def test_the_same_tokens_whatever_the_offload(kind: str) -> None:
    options = dict(OFFLOADS[kind])
    if options.get("link") == "slow":
        options["link"] = EmulatedLink(1e9, 2e-5, jitter=1e-4, seed=1)
    given: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    with offload(tiny("qwen3_moe"), **options) as offloaded:
        expected = offloaded.generate(prompt(3), **given, draft="none")
        for draft in ("int4", "resident", "drop_cascade", "cascade", "prompt_lookup"):
            for length in (2, None):
                got = offloaded.generate(prompt(3), **given, draft=draft, draft_length=length)
                assert torch.equal(got, expected), (draft, length)
                check_books(offloaded)
