"""A model's own heads draft for it while it is offloaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import expertcast
from expertcast.predictors import ExpertcastError
from tests.families.models import tiny_model
from tests.runtime.drafts.test_heads import PROMPT, checkpoint, loaded


@pytest.mark.parametrize(("family", "heads"), [("glm4_moe", 1), ("deepseek_v3", 3)])
def test_heads_draft_and_the_text_stays(family: str, heads: int, tmp_path: Path) -> None:
    """In fixed lengths and governed, one text and two with padding; each token's hidden state is shown once."""
    model = loaded(checkpoint(family, heads, tmp_path))
    both = torch.cat([PROMPT, PROMPT.flip(1)])
    mask = torch.ones_like(both)
    mask[1, :3] = 0
    with expertcast.offload(model, slots=12) as offloaded:
        for ids, kwargs in ((PROMPT, {}), (both, {"attention_mask": mask})):
            plain = offloaded.generate(ids, max_new_tokens=24, do_sample=False, **kwargs)
            for length in (1, 3, None):
                drafted = offloaded.generate(
                    ids, max_new_tokens=24, do_sample=False, draft="mtp", draft_length=length, **kwargs
                )
                assert torch.equal(drafted, plain)
        found = offloaded.stats.as_dict()["drafts"]
        assert found["by_sequences"]["1"]["drafts"]["mtp"]["cycles"] > 3
        assert found["memory_bytes"] > 0


def test_a_model_without_heads_says_so() -> None:
    with (
        expertcast.offload(tiny_model("mixtral"), slots=12) as offloaded,
        pytest.raises(ExpertcastError, match="has no heads"),
    ):
        offloaded.generate(PROMPT, max_new_tokens=4, draft="mtp")
