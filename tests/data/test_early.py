"""Early attention against forwards with a replaced block output; caches stay as they are; traced programs."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel, Qwen3NextConfig, StaticCache
from transformers.cache_utils import DynamicLayer

from expertcast import offload
from expertcast.data import early
from expertcast.data.batch import RouterCall
from expertcast.data.early import (
    _CHECKED,
    FIRST,
    EarlyAttention,
    ranges,
    refusal_lines,
    stand_in_mask,
    static_refusals,
    tokens_that_see_themselves,
)
from expertcast.data.kv_cache import appended_layer, reading_copy
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.taps import RouterTaps
from expertcast.predictors import MoEView
from expertcast.predictors.early_attention import EarlyAttention as EarlyPredictor
from expertcast.predictors.early_attention import EarlyConfig
from tests.data.early_oracle import Follower, oracle, random_stand_in
from tests.families.models import _COMMON, CONFIGS, tiny_model

LENGTH = 21
"""More than gpt_oss's window of 16 tokens."""


IN_A_ROW = early._IN_A_ROW


@pytest.fixture(autouse=True)
def traced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is traced in its first calls."""
    monkeypatch.setattr(early, "_IN_A_ROW", 0)


def ids(rows: int = 1, length: int = LENGTH) -> Tensor:
    return torch.randint(3, 4096, (rows, length), generator=torch.Generator().manual_seed(2))


def assert_near(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    assert float((found - expected).norm()) <= 1e-5 * float(expected.norm())


def prefilled(model: PreTrainedModel, given: Tensor, cache: Cache | None = None, **kwargs: Any) -> Cache:
    with torch.no_grad():
        return model.base_model(input_ids=given, past_key_values=cache, use_cache=True, **kwargs).past_key_values


@pytest.mark.parametrize("family", list(CONFIGS))
def test_a_decode_step_and_a_whole_text_give_the_oracles_residuals(family: str) -> None:
    model = tiny_model(family, torch.float32)
    view = find_moe_layers(model)
    stand_in, given = random_stand_in(view), ids(2)
    whole = Follower(model, view, stand_in, whole=True)
    rows = [found.view(2, LENGTH, -1) for found in whole.run(input_ids=given, use_cache=False) if found is not None]
    assert whole.early.refused.keys() == {0}
    assert len(rows) == len(view) - 1
    follower = Follower(model, view, stand_in)
    for length in (4, LENGTH):
        expected = oracle(model, view, stand_in, given[:, :length])
        cache = prefilled(model, given[:, : length - 1])
        found = follower.run(input_ids=given[:, length - 1 : length], past_key_values=cache)
        for source, wanted in enumerate(expected):
            assert_near(rows[source][:, length - 1], wanted)
            if (family, source) == ("gpt_oss", 0):
                assert found[source] is None, "no block of the next one's kind has run"
            else:
                assert_near(found[source], wanted)
    assert follower.early.refused.keys() == {0}


def state(cache: Cache) -> list[dict[str, Any]]:
    return [{name: value.clone() if isinstance(value, Tensor) else value for name, value in vars(layer).items()}
            for layer in cache.layers]  # fmt: skip


def assert_same_caches(one: Cache, other: Cache) -> None:
    for first, second in zip(state(one), state(other), strict=True):
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert torch.equal(value, second[name]) if isinstance(value, Tensor) else value == second[name], name


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_the_cache_is_left_as_it_was(family: str, kind: type[Cache]) -> None:
    """Left padding too: the second text has five tokens less."""
    model = tiny_model(family, torch.float32)
    view, given = find_moe_layers(model), ids(2)
    stand_in = random_stand_in(view)
    mask = torch.ones_like(given)
    mask[1, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = (
        DynamicCache(config=model.config)
        if kind is DynamicCache
        else StaticCache(config=model.config, max_cache_len=32)
    )
    prefilled(model, given[:, :-1], cache, attention_mask=mask[:, :-1], position_ids=positions[:, :-1])
    step = {"input_ids": given[:, -1:], "attention_mask": mask, "position_ids": positions[:, -1:]}
    untouched = copy.deepcopy(cache)
    prefilled(model, step.pop("input_ids"), untouched, **step)
    step["input_ids"] = given[:, -1:]
    follower, before = Follower(model, view, stand_in), state(cache)
    reader = reading_copy(cache, 1)
    assert reader is not None
    reader.update(torch.ones_like(cache.layers[1].keys[:, :, :1]), torch.ones_like(cache.layers[1].values[:, :, :1]), 1)
    for first, second in zip(before, state(cache), strict=True):
        assert all(torch.equal(value, second[name]) for name, value in first.items() if isinstance(value, Tensor))
    found = follower.run(past_key_values=cache, **step)
    assert_same_caches(cache, untouched)
    short = oracle(model, view, stand_in, given[1:, 5:])
    long = oracle(model, view, stand_in, given[:1])
    for source in range(len(view) - 1):
        if (family, source) != ("gpt_oss", 0):
            assert_near(found[source], torch.cat([long[source], short[source]]))


class OwnCache(DynamicCache):
    """Somebody's: what a write to it changes is not known."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(*args, **kwargs)


def predictor(view: MoEView) -> EarlyPredictor:
    made = EarlyPredictor(EarlyConfig(stand_in_rank=3), view.shape)
    made.set_stand_in(random_stand_in(view))
    made.bind(view)
    return made


def decode(model: PreTrainedModel, cache: Cache | None = None, **kwargs: Any) -> Any:
    return model.generate(
        ids(), past_key_values=cache, max_new_tokens=6, min_new_tokens=6, do_sample=False, return_dict_in_generate=True,
        output_logits=True, **kwargs,
    )  # fmt: skip


def assert_same_logits(one: Any, other: Any) -> None:
    assert all(torch.equal(first, second) for first, second in zip(one.logits, other.logits, strict=True))


def test_a_cache_that_cannot_be_read_is_told_of_once() -> None:
    model = tiny_model("qwen3_moe")
    view = find_moe_layers(model)
    expected = decode(model)
    for cache in (OwnCache(), DynamicCache(config=model.config)):
        with (
            offload(model, predictor=predictor(view), slots=8, forecasts="always") as offloaded,
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            assert_same_logits(decode(model, cache), expected)
            assert offloaded.stats.total.prefetched > 0
        lines = [str(each.message) for each in said if "early attention" in str(each.message)]
        assert len(lines) == (type(cache) is OwnCache)
        assert all("OwnCache cannot be read without being changed" in line for line in lines)
    assert reading_copy(OwnCache(), 0) is None
    assert reading_copy(DynamicCache(), 2) is not None


class OwnLayer(DynamicLayer):
    """Somebody's: what a write to it changes is not known."""


def test_caches_that_can_be_read_and_grow() -> None:
    """Unreadable caches are refused, and so is an index without a layer, unless the cache adds layers by itself."""
    model = tiny_model("qwen3_moe", torch.float32)
    cache, empty = prefilled(model, ids(length=4)), DynamicCache()
    one = torch.ones(1, 2, 1, 8)
    reader = reading_copy(empty, 0)
    assert reader is not None
    reader.update(one, one, 0)
    assert not empty.layers
    assert appended_layer(empty, 0) is None
    assert [appended_layer(cache, index) for index in range(4)] == cache.layers
    full = DynamicCache(config=model.config)
    assert appended_layer(full, 1) is None, "nothing was written yet"
    assert reading_copy(full, 3) is not None
    assert reading_copy(full, 4) is None, "it has as many layers as the model"
    static = StaticCache(config=model.config, max_cache_len=8)
    prefilled(model, ids(length=4), static)
    assert reading_copy(static, 1) is not None
    assert appended_layer(static, 1) is None, "it writes into its own tensors"
    cache.layers[2] = OwnLayer()
    assert [reading_copy(cache, index) is None for index in (1, 2, 3)] == [False, True, False]
    assert appended_layer(cache, 2) is None
    cache.offloading = True
    assert reading_copy(cache, 1) is None
    assert appended_layer(cache, 1) is None


@pytest.mark.parametrize("kind", [None, torch.bool, torch.float32, torch.bfloat16])
def test_masks_of_whole_texts(kind: torch.dtype | None) -> None:
    """A query reads the true keys before its own that it may, and beside them its own stand-in where it sees itself."""
    length, hidden_BSD = 5, torch.zeros(2, 5, 3)
    may = torch.ones(2, 1, length, length).tril().bool()
    if kind is not None:
        may[1, :, :, :2] = False  # padding
    mask = None if kind is None else may if kind == torch.bool else torch.where(may, 0.0, float("-inf")).to(kind)
    found, rows_BS = stand_in_mask(mask, hidden_BSD), tokens_that_see_themselves(mask, hidden_BSD)
    assert found.isfinite().all() or kind is not None
    seen = (found if found.dtype == torch.bool else found == 0).expand(2, 1, length, 2 * length)
    assert found.dtype == (kind or torch.bool)
    for text, query, key in itertools.product(range(2), range(length), range(length)):
        visible = bool(may[text, 0, query, key])
        assert bool(seen[text, 0, query, key]) == (visible and key != query)
        assert bool(seen[text, 0, query, length + key]) == (visible and key == query)
    assert rows_BS is None if kind is None else torch.equal(rows_BS, may.diagonal(dim1=-2, dim2=-1)[:, 0])


def test_what_the_structure_refuses() -> None:
    model = tiny_model("qwen3_moe")
    view = find_moe_layers(model)
    assert static_refusals(model, view, whole=True) == {0: FIRST}
    model.config._attn_implementation = "flash_attention_2"
    assert static_refusals(model, view) == {0: FIRST}
    refused = static_refusals(model, view, whole=True)
    assert refusal_lines(refused) == [
        "layers 1-3: attention by flash_attention_2 does not take arbitrary masks (sdpa does)"
    ]
    view[2].decoder.self_attn.layer_idx = None
    assert refusal_lines(static_refusals(model, view)) == [
        "layer 2: its block has no layer_idx, so its cache cannot be read"
    ]
    assert EarlyAttention(model, view).works
    assert not EarlyAttention(model, view, whole=True).works


def qwen3_next() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        **{**_COMMON, "num_hidden_layers": 5}, num_key_value_heads=2, head_dim=8, num_experts=8,
        moe_intermediate_size=16, intermediate_size=48, shared_expert_intermediate_size=16, norm_topk_prob=True,
        linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()


def sparse() -> PreTrainedModel:
    config = copy.deepcopy(CONFIGS["qwen3_moe"])
    config.decoder_sparse_step = 2
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()


@pytest.mark.parametrize(
    ("make", "expected"),
    [(qwen3_next, ["layers 2-3: linear attention keeps a state that a read would change"]),
     (sparse, ["layer 1: another layer is between it and the MoE layer before it"])],
)  # fmt: skip
def test_layers_that_cannot_be_run_early_are_refused_and_runs_stay_exact(make: Any, expected: list[str]) -> None:
    model = make()
    view = find_moe_layers(model)
    assert refusal_lines(EarlyAttention(model, view).refused) == expected
    plain = decode(model)
    with offload(model, predictor=predictor(view), slots=8, forecasts="always") as offloaded:
        assert_same_logits(decode(model), plain)
        assert offloaded.stats.total.prefetched > 0
    whole = Follower(model, view, random_stand_in(view), whole=True)
    found = whole.run(input_ids=ids(), use_cache=False)
    assert refusal_lines(whole.early.refused) == expected
    assert [each is not None for each in found] == [layer not in whole.early.refused for layer in range(1, len(view))]


@pytest.mark.parametrize(
    ("fails", "line"),
    [(False, "its attention gave another result"), (True, r"its block cannot .* \(ValueError: two lines\)")],
)
def test_a_block_that_gives_another_result_early_or_fails_is_refused(fails: bool, line: str) -> None:
    """Found when it is first called, told of once, and not run again; the model's own run goes on."""
    model = tiny_model("qwen3_moe")
    view = find_moe_layers(model)
    own, calls = view[2].decoder.self_attn.forward, [0]

    def drifting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if fails and calls[0] == 1:
            raise ValueError("two\nlines")
        output, *rest = own(*args, **kwargs)
        return (output * calls[0], *rest)

    view[2].decoder.self_attn.forward = drifting
    follower = Follower(model, view, random_stand_in(view), whole=True)
    with pytest.warns(UserWarning, match=f"without early attention at layer 2: {line}"):
        found = follower.run(input_ids=ids(), use_cache=False)
    assert [each is None for each in found] == [False, True, False]
    ran = calls[0]
    follower.run(input_ids=ids(), use_cache=False)
    assert calls[0] == ran + 1


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_outputs_hold_the_models_own_entries(family: str) -> None:
    """Forecasts run routers and blocks of the model, whose hooks gather what they see."""
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    view, given = find_moe_layers(model), ids()
    asked = {"output_router_logits": True, "output_hidden_states": True, "output_attentions": True}
    cache = prefilled(model, given[:, :-1])
    runs = [({"input_ids": given}, None), ({"input_ids": given[:, -1:]}, cache)]
    for predicted in (predictor(view), "next_norm"):
        for inputs, past in runs:
            given_kwargs = {**inputs, **asked, "use_cache": past is not None}
            with torch.no_grad():
                expected = model(**given_kwargs, past_key_values=copy.deepcopy(past))
                with offload(
                    model, predictor=predicted, slots=32, speculate_prefill=True, forecasts="always"
                ) as offloaded:
                    found = model(**given_kwargs, past_key_values=copy.deepcopy(past))
                    assert past is None or offloaded.stats.total.prefetched > 0
            for name in ("router_logits", "hidden_states", "attentions"):
                assert len(found[name]) == len(expected[name]) > 0, name
                assert all(torch.equal(one, other) for one, other in zip(found[name], expected[name], strict=True)), (
                    name
                )


def test_ranges() -> None:
    assert ranges([1, 2, 3, 5, 8, 9]) == "1-3, 5, 8-9"
    assert refusal_lines({0: FIRST, 2: "odd", 1: "odd", 4: "even"}) == ["layers 1-2: odd", "layer 4: even"]


PROMPT, STEPS = 9, 12
"""gpt_oss's window of 16 tokens is passed on the way."""


def decoded(model: PreTrainedModel, *, programs: bool) -> tuple[list[list[Tensor | None]], Follower]:
    """What early attention gave in decode steps, by step and source layer."""
    view = find_moe_layers(model)
    follower = Follower(model, view, random_stand_in(view))
    for program in () if programs else follower.early._programs:
        program.run = lambda _hidden, _call, own, _in_a_row: own()  # type: ignore[method-assign]
    given = torch.randint(3, 4096, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        cache = model.base_model(input_ids=given[:, :PROMPT], use_cache=True).past_key_values
    steps = [follower.run(input_ids=token, past_key_values=cache) for token in given[:, PROMPT:].split(1, dim=1)]
    return steps, follower


def assert_same(found: list[list[Tensor | None]], expected: list[list[Tensor | None]]) -> None:
    for one, other in zip(found, expected, strict=True):
        for first, second in zip(one, other, strict=True):
            assert (first is None) == (second is None)
            assert first is None or second is None or torch.equal(first, second)


def runs(follower: Follower) -> list[list[bool]]:
    """By layer that can be run early, whether each of its programs is in use."""
    programs = follower.early._programs[1:]
    return [[made.run is not None and made.calls > _CHECKED for made in each._made.values()] for each in programs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v2", "glm4_moe_lite"])
def test_a_program_gives_the_blocks_own_bits(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype)
    expected, _ = decoded(model, programs=False)
    found, follower = decoded(model, programs=True)
    assert_same(found, expected)
    assert runs(follower) == [[] if each is None else [True] for each in found[-1]]


@pytest.mark.parametrize(("in_a_row", "in_all", "calls"), [(IN_A_ROW, 1000, STEPS - 2), (1000, 6, STEPS - 7)])
def test_when_a_block_is_worth_a_trace(in_a_row: int, in_all: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the third forward in a row, or once it has run often: the first call is not counted, it checks the block."""
    monkeypatch.setattr(early, "_IN_A_ROW", in_a_row)
    monkeypatch.setattr(early, "_IN_ALL", in_all)
    _, follower = decoded(tiny_model("qwen3_moe"), programs=True)
    assert [[made.calls for made in each._made.values()] for each in follower.early._programs[1:]] == [[calls]] * 3
    follower.early.follow(True)
    assert follower.early._in_a_row == STEPS
    follower.early.follow(True)  # after a forward that ran no block early, such as one of a prompt
    assert follower.early._in_a_row == 0


def same_with_programs(model: PreTrainedModel, hooked: Callable[[], RemovableHandle]) -> Follower:
    """Decode without programs and with them, each under a hook of its own: the same; the follower that has them."""

    def run(**kwargs: bool) -> tuple[list[list[Tensor | None]], Follower]:
        handle = hooked()
        try:
            return decoded(model, **kwargs)
        finally:
            handle.remove()

    expected, _ = run(programs=False)
    found, follower = run(programs=True)
    assert_same(found, expected)
    return follower


def _branching(attention: nn.Module) -> None:
    """It goes by the length of the text, from the ninth step on."""
    own = attention.forward

    def forward(*args: Any, past_key_values: Cache | None = None, **kwargs: Any) -> Any:
        output, *rest = own(*args, past_key_values=past_key_values, **kwargs)
        held = 0 if past_key_values is None else past_key_values.layers[attention.layer_idx].keys.shape[-2]
        return (output * 2 if held > PROMPT + 8 else output, *rest)

    attention.forward = forward


def _counting(attention: nn.Module) -> None:
    """It goes by what it has itself, another thing in each step."""
    own = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output, *rest = own(*args, **kwargs)
        return (output * attention.scale, *rest)

    attention.forward, attention.scale = forward, 1.0


@pytest.mark.parametrize("change", [_branching, _counting])
def test_a_block_that_no_trace_would_follow_runs_itself(change: Callable[[nn.Module], None]) -> None:
    model = tiny_model("qwen3_moe")
    attention = find_moe_layers(model)[2].decoder.self_attn
    change(attention)

    def hooked() -> RemovableHandle:
        attention.scale = 1.0
        return model.base_model.register_forward_pre_hook(lambda *_: setattr(attention, "scale", attention.scale + 1))

    assert runs(same_with_programs(model, hooked)) == [[True], [False], [True]]


@pytest.mark.parametrize(("change", "last"), [(None, 1), (_branching, 2)])
def test_how_often_a_block_runs(change: Callable[[nn.Module], None] | None, last: int) -> None:
    """In the end in the model alone; one that cannot be traced early too, and it is not traced for ever."""
    model = tiny_model("qwen3_moe")
    attention = find_moe_layers(model)[2].decoder.self_attn
    if change is not None:
        change(attention)
    own, calls, by_step = attention.forward, itertools.count(), list[int]()
    attention.forward = lambda *args, **kwargs: (next(calls), own(*args, **kwargs))[1]
    handle = model.base_model.register_forward_hook(lambda *_: by_step.append(next(calls)))
    decoded(model, programs=True)
    handle.remove()
    steps = [later - former - 1 for former, later in itertools.pairwise(by_step)]
    assert max(steps) > last
    assert steps[-4:] == [last] * 4


def test_a_block_that_fails_before_it_was_checked_is_refused() -> None:
    """In a decode step a layer's block runs early before it has run in the model: generation goes on."""
    model = tiny_model("qwen3_moe", torch.float32)
    view = find_moe_layers(model)
    cache = prefilled(model, ids(1, PROMPT))
    own = view[2].decoder.self_attn.forward

    def takes_one_cache(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is not cache:
            raise ValueError("another cache")
        return own(*args, past_key_values=past_key_values, **kwargs)

    view[2].decoder.self_attn.forward = takes_one_cache
    found: dict[int, bool] = {}
    with closing(EarlyAttention(model, view)) as early:
        early.follow(True)

        def see(call: RouterCall) -> None:
            if call.layer + 1 < len(view):
                found[call.layer + 1] = early.attend(call.layer + 1, call.residual_TD.float()) is not None

        with (
            closing(RouterTaps(model, view, see)), torch.no_grad(),
            pytest.warns(UserWarning, match=r"at layer 2: its block cannot .* \(ValueError: another cache\)"),
        ):  # fmt: skip
            model.base_model(input_ids=ids(1, 1), past_key_values=cache)
    assert found[1]
    assert not found[2]


def test_tensors_of_a_dictionary_are_inputs_of_a_program() -> None:
    """Blocks are called with another scale in each step."""
    model = tiny_model("qwen3_moe")
    for layer in find_moe_layers(model):

        def scaled(*args: Any, own: Any = layer.decoder.self_attn.forward, given: Any, **kwargs: Any) -> Any:
            output, *rest = own(*args, **kwargs)
            return (output * given["scale"], *rest)

        layer.decoder.self_attn.forward = scaled

    def hooked() -> RemovableHandle:
        scales = itertools.count(1.0, 0.125)
        return model.base_model.register_forward_pre_hook(
            lambda _model, args, kwargs: (args, {**kwargs, "given": {"scale": torch.tensor(next(scales))}}),
            with_kwargs=True,
        )

    assert runs(same_with_programs(model, hooked)) == [[True]] * 3


def test_a_forward_that_is_not_followed_costs_nothing() -> None:
    """No module has a hook then; followed again, early attention is there again."""
    model = tiny_model("qwen3_moe", torch.float32)
    view = find_moe_layers(model)
    early, cache = EarlyAttention(model, view), prefilled(model, ids(1, PROMPT))
    hooked: list[bool] = []
    found: list[bool] = []
    for wanted in (True, False, True, True):
        early.follow(wanted)
        hooked.append(any(module._forward_pre_hooks for module in model.modules()))

        def see(call: RouterCall) -> None:
            if call.layer == 0:
                found.append(early.attend(1, call.residual_TD.float()) is not None)

        with closing(RouterTaps(model, view, see)), torch.no_grad():
            model.base_model(input_ids=ids(1, 1), past_key_values=cache)
    early.close()
    assert hooked == found == [True, False, True, True]
