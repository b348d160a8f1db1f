"""Every number of accepted tokens, through the whole loop: a draft by script is right so far and no further."""

from __future__ import annotations

import pytest
import torch

from expertcast.runtime import offload
from tests.runtime.drafts.loops import SLOTS, check_books, cycles_of, prompt, script, tiny

NEW = 13


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "lfm2_moe", "minimax"])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_goes_on_behind_what_was_accepted(family: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt gives 1 token, every cycle j + 1: 12 / (j + 1) cycles, rounded up; at the end a draft is shorter."""
    with offload(tiny(family), slots=SLOTS) as offloaded:
        whole = offloaded.generate(prompt(), max_new_tokens=NEW, do_sample=False, draft="none")
        for right in range(length + 1):
            draft = script(offloaded, whole, right)
            with cycles_of(monkeypatch) as cycles:
                got = offloaded.generate(
                    prompt(), max_new_tokens=NEW, do_sample=False, draft=draft, draft_length=length,
                    return_dict_in_generate=True,
                )  # fmt: skip
            assert torch.equal(got.sequences, whole)
            assert got.past_key_values.get_seq_length() == 5 + NEW - 1
            assert len(cycles) == -(-(NEW - 1) // (right + 1))
            assert all(cycle.accepted == (min(right, cycle.drafted),) for cycle in cycles)
            check_books(offloaded)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_rows_accept_different_numbers(family: str) -> None:
    """Three rows, right for 0, 1 and 3 of 3 tokens."""
    ids_BS = prompt(3)
    with offload(tiny(family), slots=SLOTS) as offloaded:
        whole = offloaded.generate(ids_BS, max_new_tokens=NEW, do_sample=False, draft="none")
        for shift in range(3):
            rights = iter((0, 1, 3)[shift:] + (0, 1, 3)[:shift])
            draft = script(offloaded, whole, None)
            assert offloaded.drafting is not None
            proposal = offloaded.drafting.drafts[draft]
            make = proposal.make  # type: ignore[attr-defined]

            def made(*given: object, make: object = make, rights: object = rights) -> object:
                proposer = make(*given)  # type: ignore[operator]
                proposer._right = next(rights)  # type: ignore[call-overload]
                return proposer

            proposal.make = made  # type: ignore[attr-defined]
            got = offloaded.generate(ids_BS, max_new_tokens=NEW, do_sample=False, draft=draft, draft_length=3)
            assert torch.equal(got, whole), shift
