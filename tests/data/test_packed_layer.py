"""Decoder layers of one token by ggml, beside their own code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from expertcast.data import ggml, packed_layer
from expertcast.data.early import EarlyAttention
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.packed_linear import pack_linears
from expertcast.data.taps import RouterTaps
from tests.data.test_packed_attention import FAMILIES, SIZES, decoded, near, pack_attention
from tests.families.models import tiny_model

_ROUNDING = 0.003
"""Largest difference in float32, relative to the norm."""


def _routers(model: PreTrainedModel) -> list[str]:
    return [layer.router_name for layer in find_moe_layers(model)]


def _packed(family: str = "qwen3_moe", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = tiny_model(family, dtype, **SIZES)
    pack_attention(model, "Q8_0")
    pack_linears(model, {}, {}, _routers(model))
    return model


class _Counts:
    """Counts the layers that ran by graphs, and the products that routers took from them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers = self.products = 0
        run, linear = packed_layer._After.run, packed_layer._Router._linear

        def counted(*args: Any) -> Any:
            self.layers += 1
            return run(*args)

        def taken(*args: Any) -> Tensor:
            self.products += 1
            return linear(*args)

        monkeypatch.setattr(packed_layer._After, "run", counted)
        monkeypatch.setattr(packed_layer._Router, "_linear", taken)

    def clear(self) -> None:
        self.layers = self.products = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Counts]:
    """Layers that ran by graphs."""
    return _Counts(monkeypatch)


def _own(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose layers and routers run the code of their classes."""
    made = copy.deepcopy(model)
    for module in made.modules():
        if isinstance(
            getattr(module.__dict__.get("forward"), "__func__", None), packed_layer._Layer | packed_layer._Router
        ):
            del module.forward
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs(family: str, counts: _Counts) -> None:
    """Those of the model's own code up to rounding, by the graphs in each layer and for each router."""
    model = _packed(family)
    counts.clear()
    found, layers = decoded(model), model.config.num_hidden_layers
    assert (counts.layers, counts.products) == (6 * layers, 6 * len(_routers(model)))
    expected = decoded(_own(model))
    assert (counts.layers, counts.products) == (6 * layers, 6 * len(_routers(model)))
    near(found, expected, _ROUNDING)
    assert torch.equal(decoded(copy.deepcopy(model)), found)
    assert counts.layers == 12 * layers


def test_all_heads_of_keys_with_biases_and_norms(counts: _Counts) -> None:
    """The graph before attention then has the most results between its first and its last."""
    model = tiny_model("qwen3_moe", torch.float32, **{**SIZES, "num_key_value_heads": 4, "attention_bias": True})
    for layer in model.base_model.layers:
        layer.self_attn.o_proj.bias = None
    pack_attention(model, "Q8_0")
    pack_linears(model, {}, {}, _routers(model))
    counts.clear()
    found = decoded(model)
    assert counts.layers == 6 * model.config.num_hidden_layers
    near(found, decoded(_own(model)), _ROUNDING)


def test_half_precision(counts: _Counts) -> None:
    """One layer alone gives its own output up to rounding, which would change what the next routers choose."""
    model = _packed(dtype=torch.bfloat16)
    hidden, turn = torch.randn(1, 1, 64).bfloat16(), torch.rand(1, 1, 16).repeat(1, 1, 2) * 6
    found = []
    for each in (model, _own(model)):
        with torch.no_grad():
            found.append(
                each.base_model.layers[0](
                    hidden, position_embeddings=(turn.cos().bfloat16(), turn.sin().bfloat16()), attention_mask=None,
                    past_key_values=DynamicCache(),
                )
            )  # fmt: skip
    assert counts.layers == 2, "the trial's and this one"
    near(found[0], found[1], 0.02)


@pytest.mark.parametrize("name", ["input_layernorm", "post_attention_layernorm", "mlp.gate", "self_attn.o_proj"])
@pytest.mark.parametrize("replaced", [False, True])
def test_parameters_are_followed(name: str, replaced: bool, counts: _Counts) -> None:
    """Changes in place and new parameters count from the next step."""
    model = _packed()
    before, layer = decoded(model), model.base_model.layers[0]
    module, packed = layer.get_submodule(name), name.endswith("o_proj")
    (key,) = module._parameters.keys() - {"bias"}
    other = torch.randn(64, module.in_features) if packed else module.weight.data * 2 + 0.5
    other = ggml.quantise("Q8_0", other).view(1, -1) if packed else other
    if replaced:
        module._parameters[key] = nn.Parameter(other, requires_grad=False)
    else:
        module._parameters[key].data.copy_(other)
    counts.clear()
    found = decoded(model)
    assert counts.layers == 24
    assert not torch.equal(found, before)
    near(found, decoded(_own(model)), _ROUNDING)


def _hooked(name: str) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        layer.get_submodule(name).register_forward_hook(lambda *_: None)

    return change


def _hooked_before(layer: Any) -> None:
    layer.post_attention_layernorm.register_forward_pre_hook(lambda _, args: (args[0] * 2,))


def _linear(layer: Any) -> None:
    linear = nn.Linear(layer.self_attn.o_proj.in_features, 64, bias=False)
    linear.weight.data = layer.self_attn.o_proj.weight
    layer.self_attn.o_proj = linear


def _patched(layer: Any) -> None:
    layer.self_attn.forward = lambda *args, **kwargs: (kwargs["hidden_states"] * 2, None)


@pytest.mark.parametrize(
    "change",
    [*map(_hooked, [*packed_layer._NORMS, "self_attn", "self_attn.o_proj", "self_attn.q_norm"]), _hooked_before,
     _linear, _patched],
)  # fmt: skip
def test_changed_layers_run_their_own_code(change: Callable[[Any], None], counts: _Counts) -> None:
    model = _packed()
    decoded(model)
    change(model.base_model.layers[0])
    counts.clear()
    found = decoded(model)
    assert counts.layers == 18
    near(found, decoded(_own(model)), _ROUNDING)


def test_taps_see_what_the_norms_take(counts: _Counts) -> None:
    """Hooks that only read keep no layer from running by graphs, and see its residual and its router's product."""
    model, other = _packed(), None
    found = []
    for each in (model, _own(model)):
        calls: list[Any] = []
        taps = RouterTaps(each, find_moe_layers(each), lambda call, calls=calls: calls.append(call))  # type: ignore[misc]
        counts.clear()
        decoded(each)
        taps.close()
        found.append((calls, counts.layers))
    (calls, ran), (others, other) = found
    assert (ran, other) == (24, 0)
    assert len(calls) == len(others)
    for call, own in zip(calls, others, strict=True):
        near(call.residual_TD, own.residual_TD, _ROUNDING)
        near(call.router_input_TD, own.router_input_TD, _ROUNDING)
        near(call.logits_TE, own.logits_TE, _ROUNDING)
        assert torch.equal(call.ids_TK, own.ids_TK)


def test_early_attention_leaves_the_bits(counts: _Counts) -> None:
    """Forecasts by it must not change what is generated: layers run by graphs also where it follows them."""
    model = _packed(dtype=torch.bfloat16)
    expected, early = decoded(model), EarlyAttention(model, find_moe_layers(model))
    refused = dict(early.refused)
    early.attach()
    counts.clear()
    assert torch.equal(decoded(model), expected)
    assert counts.layers == 6 * model.config.num_hidden_layers
    early.close()
    assert early.refused == refused, "its runs give the layers' own residuals"


def test_routers_that_use_their_input_otherwise_multiply_for_themselves(counts: _Counts) -> None:
    """A router may scale its input before the product, or use it behind."""
    model = tiny_model("qwen3_moe", torch.float32, **SIZES)
    pack_attention(model, "Q8_0")
    own = type(model.get_submodule(_routers(model)[0]))

    def forward(self: Any, hidden: Tensor) -> Any:
        logits, weights, ids = own.forward(self, hidden * 3)
        return logits, weights * hidden.mean(), ids

    for name in _routers(model):
        model.get_submodule(name).__class__ = type("Router", (own,), {"forward": forward})
    pack_linears(model, {}, {}, _routers(model))
    counts.clear()
    found = decoded(model)
    assert (counts.layers, counts.products) == (24, 0)
    near(found, decoded(_own(model)), _ROUNDING)


def test_layers_that_compute_otherwise_run_their_own_code(counts: _Counts) -> None:
    """Some families scale what they add to the residual."""
    model = tiny_model("qwen3_moe", torch.float32, **SIZES)
    pack_attention(model, "Q8_0")
    own = type(model.base_model.layers[0])

    def forward(self: Any, hidden: Tensor, **kwargs: Any) -> Tensor:
        return hidden + own.forward(self, hidden, **kwargs)

    for layer in model.base_model.layers:
        layer.__class__ = type("Layer", (own,), {"forward": forward})
    pack_linears(model, {}, {}, _routers(model))
    counts.clear()
    assert decoded(model).isfinite().all()
    assert not counts.layers


def test_gathered_outputs_leave_layers_by_graphs(counts: _Counts) -> None:
    """The hooks with which transformers gathers outputs stay in the model, and matter in such a call alone."""
    model = _packed()
    expected = decoded(model)
    with torch.no_grad():
        output = model(
            torch.tensor([[5]]), output_hidden_states=True, output_attentions=True, output_router_logits=True
        )
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    assert model.base_model.layers[0].self_attn._forward_hooks
    counts.clear()
    assert torch.equal(decoded(model), expected)
    assert (counts.layers, counts.products) == (24, 24)
    counts.clear()
    calls, steps = [], [[5], [7]]
    for each in (model, _own(model)):
        cache = DynamicCache()
        with torch.no_grad():
            for step in steps:
                made = each(torch.tensor([step]), past_key_values=cache, output_hidden_states=True)
        calls.append(made.hidden_states)
    for found, own in zip(*calls, strict=True):
        near(found, own, _ROUNDING)
