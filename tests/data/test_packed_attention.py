"""Attention of one token by ggml, beside the module's own code."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from expertcast.data import ggml, packed_attention
from expertcast.data.packed_experts import BlockForm, Piece
from expertcast.data.packed_linear import PackedLinear, pack_linears
from tests.families.models import tiny_model

FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral"]
"""With norms of heads, with biases and shared experts, with neither."""
SIZES = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
_PACKED = ("q_proj", "k_proj", "v_proj", "o_proj")


def _packed(family: str = "qwen3_moe", kind: str = "Q8_0") -> PreTrainedModel:
    """A tiny model whose attention is packed."""
    model = tiny_model(family, **SIZES)
    pack_attention(model, kind)
    pack_linears(model, {}, {})
    return model


def pack_attention(model: nn.Module, kind: str) -> None:
    """Replace the projections of attention by packed ones."""
    for module in list(model.modules()):
        for name in _PACKED:
            linear = getattr(module, name, None)
            if isinstance(linear, nn.Linear):
                form = BlockForm((Piece(kind, linear.out_features),), linear.in_features)
                packed = PackedLinear(form, linear.bias, linear.weight.dtype)
                form.put(ggml.quantise(kind, linear.weight), packed.get_parameter("weight_blocks")[0])
                setattr(module, name, packed)


def _attention(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "o_proj")]


class _Runs:
    """Counts the steps that ggml's graph takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, own = 0, packed_attention._Attention.run

        def run(*args: Any) -> Tensor:
            self.count += 1
            return own(*args)

        monkeypatch.setattr(packed_attention._Attention, "run", run)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Runs]:
    """Steps that ran by ggml."""
    return _Runs(monkeypatch)


def decoded(model: PreTrainedModel, tokens: int = 6) -> Tensor:
    """Logits of tokens read one by one behind three others."""
    ids = torch.arange(3, 3 + 3 + tokens)[None] % model.config.vocab_size
    with torch.no_grad():
        past = model(ids[:, :3], use_cache=True).past_key_values
        found = [model(ids[:, at : at + 1], past_key_values=past).logits for at in range(3, ids.shape[1])]
    return torch.cat(found, dim=1).float()


def _steps(module: Any, tokens: int = 6, *, own: bool = False) -> tuple[Tensor, DynamicCache]:
    """Outputs of one attention module for tokens read one by one, and its cache; `own`: by its own code."""
    random, dtype = torch.Generator().manual_seed(1), module.o_proj.matrix.dtype
    hidden = torch.randn(1, tokens, 64, generator=random).to(dtype)
    angles = torch.rand(1, tokens, 16, generator=random).repeat(1, 1, 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    forward, cache, found = type(module).forward, DynamicCache(), []
    with torch.no_grad():
        for at in range(tokens):
            some = slice(at, at + 1)
            arguments = {
                "hidden_states": hidden[:, some], "position_embeddings": (cos[:, some], sin[:, some]),
                "attention_mask": None, "past_key_values": cache,
            }  # fmt: skip
            found.append((forward(module, **arguments) if own else module(**arguments))[0])
    return torch.cat(found, dim=1).float(), cache


def near(found: Tensor, expected: Tensor, bound: float) -> None:
    """Check that numbers differ by a share of their norm at most."""
    assert found.shape == expected.shape
    assert (found.float() - expected.float()).norm() <= bound * expected.float().norm()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs(family: str, kind: str, runs: _Runs) -> None:
    """Those of the module's own code up to rounding, and so are keys and values, in order."""
    for dtype, bound in ((torch.bfloat16, 0.02), (torch.float32, 0.003)):
        model = tiny_model(family, dtype, **SIZES)
        pack_attention(model, kind)
        pack_linears(model, {}, {})
        module, before = _attention(model)[1], runs.count
        (expected, held), (found, cache) = _steps(module, own=True), _steps(module)
        assert runs.count == before + 6
        near(found, expected, bound)
        for own, layer in zip(held.layers[1:], cache.layers[1:], strict=True):
            near(layer.keys, own.keys, bound)
            near(layer.values, own.values, bound)
        assert torch.equal(_steps(copy.deepcopy(module))[0], found)


def test_every_layer_of_a_model_runs(runs: _Runs) -> None:
    """Also after a prompt, and with the rotation of each step's own place."""
    model = _packed()
    runs.count = 0
    assert decoded(model).isfinite().all()
    assert runs.count == 6 * len(_attention(model))


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module.k_norm, "variance_epsilon", 1e3),
        lambda module: module._modules.pop("k_norm"),
        lambda module: module.v_proj.register_parameter("bias", nn.Parameter(torch.ones(64).bfloat16())),
    ],
)
def test_another_model_in_the_same_memory(change: Callable[[Any], object], runs: _Runs) -> None:
    """Matrices of a closed model may have lain there, whose norms and biases are not those of the next one."""
    module = _attention(_packed())[0]
    _steps(module)
    change(module)
    if "k_norm" not in module._modules:
        module.k_norm = nn.Identity().forward
    runs.count = 0
    (expected, _), (found, _) = _steps(module, own=True), _steps(module)
    assert runs.count == 6
    near(found, expected, 0.02)


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3_moe", "k_norm.weight"), ("qwen2_moe", "v_proj.bias"), ("mixtral", "q_proj.weight_blocks")],
)
def test_parameters_are_followed(family: str, name: str, runs: _Runs) -> None:
    """Changes of norms, biases and blocks count from the next step."""
    module = _attention(_packed(family))[0]
    before = _steps(module)[0]
    parameter = module.get_parameter(name)
    if parameter.dtype == torch.uint8:
        other = ggml.quantise("Q8_0", torch.randn(module.q_proj.out_features, 64))
        module.q_proj.form.put(other, parameter.data[0])
    else:
        parameter.data.mul_(2).add_(1)
    found = _steps(module)[0]
    assert not torch.equal(found, before)
    near(found, _steps(module, own=True)[0], 0.02)
    assert runs.count >= 12


def test_modes_of_autograd() -> None:
    """Steps run with gradients, without, and in inference mode, in any order on one thread."""
    model = _packed()
    model.base_model.layers[0].self_attn.q_norm.weight.requires_grad_()
    modes = [torch.enable_grad, torch.inference_mode, torch.no_grad, torch.enable_grad]
    expected = decoded(model)
    found: list[Tensor] = []

    def steps() -> None:
        for mode in (torch.inference_mode, *modes):
            with mode():
                past = model(torch.arange(3, 6)[None], use_cache=True).past_key_values
                logits = [model(torch.tensor([[at]]), past_key_values=past).logits for at in range(6, 12)]
                found.append(torch.cat(logits, dim=1).detach().float().clone())

    thread = threading.Thread(target=steps)  # whose graphs are made in inference mode
    thread.start()
    thread.join()
    assert len(found) == 5
    assert all(torch.equal(each, expected) for each in found)


def _observed(module: Any) -> None:
    module.q_proj.register_forward_hook(lambda *_: None)


def _replaced(module: Any) -> None:
    linear = nn.Linear(module.q_proj.in_features, module.q_proj.out_features, bias=False)
    linear.weight.data = module.q_proj.weight
    module.q_proj = linear


def _eager(module: Any) -> None:
    module.config._attn_implementation = "eager"


def _training(module: Any) -> None:
    module.train()


@pytest.mark.parametrize("change", [_observed, _replaced, _eager, _training])
def test_changed_modules_run_their_own_code(change: Callable[[Any], None], runs: _Runs) -> None:
    module = _attention(_packed())[0]
    change(module)
    runs.count = 0
    near(_steps(module)[0], _steps(module, own=True)[0], 0.02)
    assert not runs.count


def test_other_calls_run_the_own_code(runs: _Runs) -> None:
    """Several tokens, several sequences, masks, and no cache."""
    model = _packed()
    runs.count = 0
    ids, mask = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[0, 1, 1, 1]])
    with torch.no_grad():
        past = model(ids, use_cache=True).past_key_values
        model(ids, past_key_values=past)
        model(ids[:, :1], use_cache=False)
        several = model(ids[:, :2].T, use_cache=True).past_key_values
        model(ids[:, :2].T, past_key_values=several)
        masked = model(ids[:, :3], attention_mask=mask[:, :3], use_cache=True).past_key_values
        model(ids[:, 3:], attention_mask=mask, past_key_values=masked)
    assert runs.count == 0
    with torch.no_grad():
        model(ids[:, :1], past_key_values=past)
    assert runs.count == len(_attention(model))


def test_a_rotation_of_part_of_a_head(runs: _Runs) -> None:
    """Some families rotate a part of each head: the module's own code runs."""
    module, cache = _attention(_packed())[0], DynamicCache()
    hidden, turn = torch.randn(1, 1, 64).bfloat16(), torch.ones(1, 1, 1).bfloat16()
    runs.count = 0
    with torch.no_grad():
        module(
            hidden_states=hidden, position_embeddings=(turn, turn), attention_mask=None, past_key_values=cache
        )  # fmt: skip
    assert not runs.count


def test_unknown_structures_are_left(runs: _Runs) -> None:
    """Modules with parameters of their own, other children, or outputs that the graph does not give."""

    def with_parameter(module: Any) -> None:
        module.sinks = nn.Parameter(torch.zeros(4))

    def with_child(module: Any) -> None:
        module.gate = nn.Identity()

    def with_other_outputs(module: Any) -> None:
        module.__class__ = type("Other", (type(module),), {"forward": _doubled})

    for change in (with_parameter, with_child, with_other_outputs):
        model = tiny_model("qwen3_moe", **SIZES)
        for module in _attention(model):
            change(module)
        pack_attention(model, "Q8_0")
        pack_linears(model, {}, {})
        runs.count = 0
        assert decoded(model).isfinite().all()
        for module in _attention(model):
            assert "forward" not in vars(module)
            assert len(module._forward_pre_hooks) == 1  # its heads are grouped by a mask
        assert not runs.count


def _doubled(self: Any, hidden_states: Tensor, **given: Any) -> tuple[Tensor, Any]:
    output, weights = super(type(self), self).forward(hidden_states=hidden_states, **given)
    return output * 2, weights


def test_a_router_of_one_token_runs_without_onednn() -> None:
    """The setting is as before after each call, also one that fails."""
    model, seen = _packed(), list[bool]()
    name, router = next(each for each in model.named_modules() if each[0].endswith("mlp.gate"))
    enabled: Callable[[], bool] = torch._C._get_mkldnn_enabled  # type: ignore[attr-defined]
    own = type(router).forward

    def forward(self: nn.Module, hidden: Tensor) -> Any:
        seen.append(enabled())
        return own(self, hidden)

    router.__class__ = type("Router", (type(router),), {"forward": forward})
    pack_linears(model, {}, {}, [name])
    assert [*inspect.signature(router.forward).parameters] == ["hidden"]
    seen.clear()
    hidden = torch.randn(3, 64).bfloat16()
    many, one = router(hidden)[0], router(hidden[:1])[0]
    assert torch.allclose(one.float(), many[:1].float(), atol=0.1)
    with pytest.raises(RuntimeError):
        router(torch.randn(1, 63).bfloat16())
    assert seen == [True, False, False]
    assert enabled()
