"""Rolling back in every family: whatever was fed and taken out again, the model says what it says of the whole text.

The oracle is ordinary decoding in fp32: a fresh cache, the prompt, then token by token.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import QuantizedCache

from expertcast import offload
from expertcast.data.models import auto_class
from expertcast.predictors import ExpertcastError
from expertcast.runtime.drafts.cache import SharedCache
from tests.families.table import FAMILIES, REFUSED, tiny_config
from tests.runtime.conftest import refused
from tests.runtime.drafts.loops import SLOTS, check_books, cycles_of, prompt, script, tiny

PROMPT, DRAFTED, WINDOW = 3, 4, 8
"""The prompt is shorter than a convolution's kernel; windows fill on the way."""

FORGETFUL = ["jamba"]
"""Families whose passes over several tokens do not read the recurrent state."""

TOLERANCE = 3e-5
"""Relative to the largest logit."""

SPARSE = {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]}


def built(family: str, **own: Any) -> PreTrainedModel:
    """A random fp32 model of the family whose windows are small and whose indexers do not tie.

    An indexer's scores are sums of rectified products, often exactly zero with few heads: of equal scores topk takes
    others in one pass than in steps.
    """
    config = tiny_config(family)
    text = config.get_text_config(decoder=True)
    small = {
        "index_n_heads": 16,
        "indexer_n_heads": 16,
        **dict.fromkeys(("sliding_window", "sliding_window_size"), WINDOW),
    }
    for name, value in {**small, **own}.items():
        for one in (config, text):
            if getattr(one, name, None) is not None:
                setattr(one, name, value)
    torch.manual_seed(0)
    model: PreTrainedModel = auto_class(config).from_config(config, dtype=torch.float32).eval()
    for part in model.modules():
        if hasattr(part, "time_step_limit"):
            part.time_step_limit = (0.0, float("inf"))
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # at random a state is gone after two tokens
            parameter.fill_(-1.0)
    return model


class Fed:
    """A model with its shared cache, and what it says of a text token by token."""

    def __init__(self, model: PreTrainedModel, length: int = 30) -> None:
        self.model = model
        self.text = torch.randint(10, 4096, (1, length), generator=torch.Generator().manual_seed(3))
        output = model(input_ids=self.text[:, :PROMPT], use_cache=True)
        self.cache = SharedCache(output.past_key_values)
        self.whole = self.feed(self.text[:, PROMPT:], each=True)
        self.whole = torch.cat([output.logits, self.whole], dim=1)
        output = model(input_ids=self.text[:, :PROMPT], use_cache=True)
        self.cache = SharedCache(output.past_key_values)
        self.at = PROMPT

    def feed(self, ids: Tensor, each: bool = False) -> Tensor:
        """Logits [1, T, V] of these tokens [1, T], in one pass or one by one."""
        parts = ids.split(1, dim=1) if each else [ids]
        given = {"past_key_values": self.cache.cache, "use_cache": True}
        return torch.cat([self.model(input_ids=part, **given).logits for part in parts], dim=1)

    def same(self, logits: Tensor, start: int) -> None:
        """These logits [1, T, V] are those of the text from `start` on."""
        expected = self.whole[:, start : start + logits.shape[1]]
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE * float(self.whole.abs().max()))

    def go_on(self, accepted: int, each: bool) -> None:
        """Feed a draft that is right so far, go back to what was accepted, feed the text and compare."""
        start = self.cache.mark()
        assert start == self.at == self.cache.length
        draft = self.text[:, start : start + DRAFTED].clone()
        draft[:, accepted:] = 4100 - draft[:, accepted:]
        self.feed(draft, each)
        assert self.cache.length == start + DRAFTED
        reached = self.cache.roll_back(start + accepted)
        assert reached == self.cache.length
        assert reached == (start if self.cache._copies and accepted < DRAFTED else start + accepted)
        end = start + accepted + 2
        said = self.feed(self.text[:, reached:end])
        self.same(said, reached)
        self.at = end


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in {*REFUSED, *FORGETFUL}])
def test_goes_back_to_every_number_of_accepted_tokens(family: str) -> None:
    fed = Fed(built(family))
    fed.cache.check_verifiable(fed.model, lambda: fed.feed(fed.text[:, :2]))
    for each, accepted in ((False, 0), (True, 1), (False, 2), (True, 3), (False, 4), (True, 0), (False, 1)):
        fed.go_on(accepted, each)
    assert fed.cache.length == PROMPT + 11 + 7 * 2


def test_sparse_blocks_go_back() -> None:
    model = built("minimax_m3_vl", **SPARSE, index_n_heads=4, index_block_size=4, index_topk_blocks=2)
    fed = Fed(model)
    assert "MiniMaxM3VLSparseCacheLayer" in {type(layer).__name__ for layer in fed.cache.cache.layers}
    for accepted in (0, 1, 2, 3, 4):
        fed.go_on(accepted, False)


@pytest.mark.parametrize("family", FORGETFUL)
def test_a_model_that_forgets_is_refused(family: str) -> None:
    fed = Fed(built(family))
    with refused("ignores its state"):
        fed.cache.check_verifiable(fed.model, lambda: fed.feed(fed.text[:, :2]))
    start = fed.cache.length
    assert start == PROMPT
    fed.same(fed.feed(fed.text[:, start : start + 1]), start)


@pytest.mark.parametrize("family", ["gpt_oss", "glm_moe_dsa", "lfm2_moe", "qwen3_next", "minimax", "inkling2"])
def test_a_draft_that_left_early_is_taken_out_of_the_first_layers(family: str) -> None:
    """Every number of layers runs 3 tokens alone; then the whole model says what it says of the text."""
    fed = Fed(built(family))
    config = fed.model.config.get_text_config(decoder=True)
    layers = config.num_hidden_layers
    for first in range(1, layers):
        start = fed.cache.mark()
        config.num_hidden_layers = first
        fed.feed(4100 - fed.text[:, start : start + 3], each=True)
        config.num_hidden_layers = layers
        assert fed.cache.roll_back(start) == start
        said = fed.feed(fed.text[:, start : start + 2])
        fed.same(said, start)


def test_layers_of_unequal_length_go_back_to_the_mark() -> None:
    """Two layers ran three tokens more than the third: a recurrent state has no other place to go back to."""
    fed = Fed(built("qwen3_next", layer_types=["full_attention", "linear_attention", "full_attention"]))
    config = fed.model.config
    start = fed.cache.mark()
    fed.feed(fed.text[:, start : start + 1])
    config.num_hidden_layers = 2
    fed.feed(4100 - fed.text[:, start + 1 : start + 4])
    config.num_hidden_layers = 3
    assert fed.cache.roll_back(start + 1) == start
    fed.same(fed.feed(fed.text[:, start : start + 2]), start)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_next", "lfm2_moe", "minimax"])
def test_an_empty_cache_is_a_mark_too(family: str) -> None:
    fed = Fed(built(family))
    fed.cache = SharedCache(type(fed.cache.cache)() if family == "minimax" else DynamicCache(config=fed.model.config))
    assert fed.cache.mark() == 0
    fed.feed(4100 - fed.text[:, :12])
    assert fed.cache.roll_back(0) == 0
    said = fed.feed(fed.text[:, :5])
    fed.same(said, 0)


def test_windows_keep_no_more_than_a_cycle() -> None:
    """gpt_oss, window 8: a layer keeps 7 tokens, and those fed since the mark."""
    fed = Fed(built("gpt_oss"))
    for _ in range(3):
        fed.feed(fed.text[:, :6])
        assert fed.cache.cache.layers[0].keys.shape[-2] <= 7 + 6
        fed.cache.mark()
    assert fed.cache.cache.layers[0].keys.shape[-2] == 7


def test_further_back_than_the_mark_is_refused() -> None:
    fed = Fed(built("qwen3_moe"))
    start = fed.cache.mark()
    fed.feed(fed.text[:, start : start + 4])
    with pytest.raises(RuntimeError, match="cannot roll back to"):
        fed.cache.roll_back(start - 1)
    with pytest.raises(RuntimeError, match="cannot roll back to"):
        fed.cache.roll_back(start + 5)
    fed.cache.roll_back(start + 2)
    with pytest.raises(RuntimeError, match="cannot roll back to"):
        fed.cache.roll_back(start + 1)


def test_time_steps_that_passes_alone_limit_are_refused() -> None:
    """nemotron_h as it is configured: a step of .0005 is .001 in a pass over several tokens."""
    fed = Fed(built("nemotron_h"))
    for part in fed.model.modules():
        if hasattr(part, "time_step_limit"):
            part.time_step_limit = (0.001, float("inf"))
    with pytest.raises(ExpertcastError, match="NemotronHMamba2Mixer limits its time steps"):
        fed.cache.check_verifiable(fed.model, lambda: fed.feed(fed.text[:, :2]))


def test_caches_that_cannot_be_rolled_back_are_refused() -> None:
    config = tiny_config("qwen3_moe")
    for cache in (StaticCache(config=config, max_cache_len=16), QuantizedCache("fp8", config), ((),)):
        with pytest.raises(ExpertcastError, match="cannot be rolled back: for drafts leave out cache_implementation"):
            SharedCache(cache)
    AutoModelForCausalLM.from_config(tiny_config("deepseek_v4"))  # its layers are known once its code is loaded
    compressed = DynamicCache(config=tiny_config("deepseek_v4"))
    with pytest.raises(ExpertcastError, match=r"DeepseekV4\w+Cache of this model's cache cannot be rolled back"):
        SharedCache(compressed)


class Adding(DynamicCache):
    """Keeps states of its own beside the layers': `fed` is the last one, and what is fed reads it, or does not."""

    def __init__(self) -> None:
        super().__init__()
        self.states = [torch.zeros(2), {"last": torch.full((2,), 3.0)}, None]
        self.seen = 0

    def feed(self, tokens: int, forgets: bool = False) -> None:
        new = torch.ones(1, 1, tokens, 4)
        self.update(new, new, 0)
        self.states[0] += tokens  # type: ignore[operator]
        last = self.states[1]["last"]  # type: ignore[index, call-overload]
        last.copy_(torch.ones(2) if forgets else 0.5 * last + 1)
        self.seen += tokens

    def found(self) -> tuple[int, float, float, int]:
        first, last = self.states[0], self.states[1]["last"]  # type: ignore[index, call-overload]
        return self.get_seq_length(), float(first.sum()), float(last.sum()), self.seen  # type: ignore[union-attr]


@pytest.mark.parametrize("fed", [2, 4])
def test_whatever_a_cache_adds_comes_back(fed: int) -> None:
    """Tensors in lists and dictionaries, and numbers, as often as it is gone back to the mark."""
    own = Adding()
    own.feed(3)
    cache = SharedCache(own)
    assert cache._copies
    before = own.found()
    for _ in range(2):
        own.feed(fed)
        assert own.found() != before
        assert cache.roll_back(2 + fed) == 3, "only the mark can be gone back to"
        assert own.found() == before
    own.feed(fed)
    after = own.found()
    assert cache.roll_back(3 + fed) == 3 + fed, "everything stands"
    assert own.found() == after
    with pytest.raises(RuntimeError, match="cannot roll back to"):
        cache.roll_back(2 + fed)


@pytest.mark.parametrize("base", [DynamicCache, type("Renamed", (DynamicCache,), {})])
def test_a_cache_that_adds_nothing_goes_back_to_any_length(base: type[DynamicCache]) -> None:
    own, new = base(), torch.ones(1, 1, 6, 4)
    if base is DynamicCache:
        own.note = torch.zeros(1)  # type: ignore[attr-defined]  # a model's note, no state of the cache's class
    cache = SharedCache(own)
    own.update(new, new, 0)
    assert cache.mark() == 6
    own.update(new, new, 0)
    assert not cache._copies
    assert [cache.roll_back(9), cache.length] == [9, 9]


@pytest.mark.parametrize("size", [0.1, 3.0, 1e4])
@pytest.mark.parametrize("forgets", [False, True])
def test_states_that_are_not_read_are_refused(forgets: bool, size: float) -> None:
    """Small states and large ones."""
    own, model = Adding(), torch.nn.Linear(1, 1)
    own.feed(3)
    own.states[1]["last"].fill_(size)  # type: ignore[index, call-overload]
    before, cache = own.found(), SharedCache(own)
    if forgets:
        with pytest.raises(ExpertcastError, match="a Linear ignores its state"):
            cache.check_verifiable(model, lambda: own.feed(2, forgets=True))
    else:
        cache.check_verifiable(model, lambda: own.feed(2))
    assert own.found() == before


NEW = 13


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "lfm2_moe", "minimax"])
@pytest.mark.parametrize("length", [1, 3])
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
            draft = script(offloaded, whole, *(0, 1, 3)[shift:], *(0, 1, 3)[:shift])
            got = offloaded.generate(ids_BS, max_new_tokens=NEW, do_sample=False, draft=draft, draft_length=3)
            assert torch.equal(got, whole), shift
