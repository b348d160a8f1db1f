"""Other families than the bundled one: tokens are vLLM's, from slots for hardly more than one token's experts."""

from pathlib import Path

import pytest
from engines import both
from family_models import FAMILIES, LAYERS, make_model, top_k

_SMOKE = [pytest.param(family, marks=pytest.mark.smoke) if family == "qwen2_moe" else family for family in FAMILIES]


@pytest.mark.parametrize("family", _SMOKE)
def test_same_tokens(family: str, tmp_path: Path) -> None:
    slots = top_k(family) + 1
    resident, offloaded = both({"slots": slots}, model=make_model(tmp_path, family))
    assert len({tuple(tokens) for tokens in resident.tokens}) == len(resident.tokens)  # they depend on their prompts
    assert offloaded.tokens == resident.tokens
    assert "OffloadedExperts" not in resident.layers
    assert "OffloadedExperts" in offloaded.layers
    (counted,) = offloaded.workers
    assert counted["slots"] == slots
    forwards = len(resident.tokens[0])
    assert counted["steps"] > 2 * forwards * LAYERS  # eight tokens' experts do not fit: groups after groups
