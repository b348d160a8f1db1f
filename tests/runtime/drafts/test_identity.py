"""Greedy decoding with any draft gives the tokens of decoding without one, in every kind of model.

fp32, so that several tokens in one pass round as single ones do, but for far less than lies between two logits. The
eight families: plain attention, latent attention, sliding windows, convolutions, recurrent states, shared experts.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast import OffloadedModel, offload
from expertcast.runtime.drafts.names import AUTO, NONE, draft_names
from tests.runtime.conftest import refused
from tests.runtime.drafts.loops import LENGTHS, SLOTS, check_books, cycles_of, prompt, tiny

FAMILIES = (
    "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoehybrid", "lfm2_moe", "minimax", "gemma4", "qwen3_next",
)  # fmt: skip
DRAFTS = [name for name in draft_names() if name not in (NONE, AUTO)]
EACH = ("int4", "resident", "speculate", AUTO)
"""One of each kind: the others differ in nothing that a family sees."""
NEW = 10


def plain(offloaded: OffloadedModel, ids_BS: Tensor, new: int = NEW) -> Tensor:
    """Generate without a draft."""
    said: Tensor = offloaded.generate(ids_BS, max_new_tokens=new, do_sample=False, draft=NONE)
    return said


def unlimited(family: str) -> PreTrainedModel:
    """Mamba2 layers limit no time steps."""
    model: PreTrainedModel = tiny(family)
    for part in model.modules():
        if hasattr(part, "time_step_limit"):
            part.time_step_limit = (0.0, float("inf"))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_draft_gives_the_same_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids_BS = prompt()
    drafted, accepted = 0, 0
    with offload(unlimited(family), slots=SLOTS, predictor="next_norm", forecasts="always") as offloaded:
        expected = plain(offloaded, ids_BS)
        for draft in [*DRAFTS, AUTO] if family == "qwen3_moe" else EACH:
            lengths = LENGTHS if family == "qwen3_moe" else LENGTHS[:1]
            for length in lengths if draft != AUTO else (None,):
                with cycles_of(monkeypatch) as cycles:
                    got = offloaded.generate(
                        ids_BS, max_new_tokens=NEW, do_sample=False, draft=draft, draft_length=length
                    )
                assert torch.equal(got, expected), (draft, length)
                drafted += sum(cycle.drafted for cycle in cycles)
                accepted += sum(cycle.accepted[0] for cycle in cycles)
                assert sum(cycle.emitted for cycle in cycles) == NEW - 1, "one comes with the prompt"
                if length:
                    assert max(cycle.drafted for cycle in cycles) == length
        check_books(offloaded)
        assert torch.equal(plain(offloaded, ids_BS), expected)
    assert 0 < accepted < drafted


@pytest.mark.parametrize("family", ["jamba", "nemotron_h"])
def test_models_whose_longer_passes_say_something_else_are_refused(family: str) -> None:
    ids_BS = prompt()
    with offload(tiny(family), slots=SLOTS) as offloaded:
        expected = plain(offloaded, ids_BS)
        for _ in range(2):
            with refused(r"pass(es)? over several tokens"):
                offloaded.generate(ids_BS, max_new_tokens=NEW, do_sample=False, draft="int4", draft_length=2)
            check_books(offloaded)
            assert torch.equal(plain(offloaded, ids_BS), expected)
        chosen = offloaded.generate(ids_BS, max_new_tokens=NEW, do_sample=False, draft="auto")
        assert torch.equal(chosen, expected)  # it may do without


def test_whether_a_model_fits_is_asked_once() -> None:
    """Two more forwards in a model's first generation if it has recurrent states; NEW tokens one by one take NEW."""
    forwards = 0

    def count(*_args: object) -> None:
        nonlocal forwards
        forwards += 1

    for family, asked in (("qwen3_next", 2), ("qwen3_moe", 0)):
        model = tiny(family)
        handle = model.base_model.register_forward_pre_hook(count)
        with offload(model, slots=SLOTS) as offloaded:
            for more in (asked, 0):
                forwards = 0
                offloaded.generate(prompt(), max_new_tokens=NEW, do_sample=False, draft="int4", draft_length=0)
                assert forwards == NEW + more, family
        handle.remove()
