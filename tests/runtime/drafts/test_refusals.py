"""What a draft does not go with is refused in one line, and the next generation is as ever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache
from transformers.generation import BaseStreamer

from expertcast.predictors import ExpertcastError
from expertcast.runtime import OffloadedModel, offload
from expertcast.runtime.policies import Policies
from tests.runtime.drafts.loops import SLOTS, check_books, prompt, tiny


class _Deaf(BaseStreamer):  # type: ignore[misc]
    def put(self, value: Tensor) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def offloaded() -> Iterator[OffloadedModel]:
    with offload(tiny("qwen3_moe"), slots=SLOTS) as opened:
        yield opened


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft": "nonsense"}, "unknown draft 'nonsense': choose from none, auto, int4"),
        ({"draft": "early_exit:layers=3"}, "give layers from 1 to 2"),
        ({"draft": "early_exit:layers=-1"}, "early_exit:layers=-1|give layers"),
        ({"draft": "early_exit:depth=1"}, "depth"),
        ({"draft": "auto", "draft_length": 2}, "leave the length out"),
        ({"draft": "speculate"}, "offload the model with a predictor"),
        ({"draft": Policies()}, "lose nothing"),
        ({"num_beams": 2}, "num_beams"),
        ({"use_cache": False}, "use_cache=False"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"cache_implementation": "static"}, "cannot be rolled back"),
        ({"past_key_values": "static"}, "cannot be rolled back"),
        ({"inputs": prompt(2), "streamer": _Deaf()}, "streamer"),
    ],
)
def test_refusals_are_one_line(given: dict[str, Any], message: str, offloaded: OffloadedModel) -> None:
    asked: dict[str, Any] = {"inputs": prompt(), "max_new_tokens": 4, "do_sample": False, "draft": "int4", **given}
    if "past_key_values" in given:
        asked["past_key_values"] = StaticCache(config=offloaded.model.config, max_cache_len=16)
    with pytest.raises(ExpertcastError, match=message) as caught:
        offloaded.generate(**asked)
    assert "\n" not in str(caught.value)
    check_books(offloaded)
    plain: dict[str, Any] = {"inputs": prompt(), "max_new_tokens": 6, "do_sample": False}
    drafted = offloaded.generate(**plain, draft="int4", draft_length=2)
    assert torch.equal(drafted, offloaded.generate(**plain, draft="none"))


@pytest.mark.parametrize("options", [{"predictor": "next_norm", "mode": "speculate"}, {"policies": "drop"}])
def test_what_is_not_exact_verifies_nothing(options: dict[str, Any]) -> None:
    if "policies" in options:
        options = {"policies": Policies(prefetch="none", miss="drop")}
    with offload(tiny("qwen3_moe"), slots=SLOTS, **options) as lossy:
        with pytest.raises(ExpertcastError, match="offload it in mode 'exact', and give these as the draft") as caught:
            lossy.generate(prompt(), max_new_tokens=4, draft="int4")
        assert "\n" not in str(caught.value)


def test_a_link_that_decides_on_the_device_has_no_drafts() -> None:
    with offload(tiny("qwen3_moe"), slots=SLOTS, link="kernel") as opened:
        assert opened.drafting is None
        with pytest.raises(ExpertcastError, match="offload with link='cuda'") as caught:
            opened.generate(prompt(), max_new_tokens=4, draft="int4")
        assert "\n" not in str(caught.value)
