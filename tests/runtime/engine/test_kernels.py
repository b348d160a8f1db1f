"""The experts' kernels over slots: which one runs when, and what it multiplies."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationMixin, PreTrainedModel, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward, grouped_mm_experts_forward

from expertcast import offload
from expertcast.data import packed_experts
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.packed_experts import BlockForm, Piece, combine, make_packed, matrices, run_experts, sizes_of
from expertcast.runtime.engine import kernels
from expertcast.runtime.engine import kernels as grouped
from expertcast.runtime.engine.kernels import SlotKernel, _SlotProducts, _SlotRanges, kernel_name, over_slots
from tests.families.models import CONFIGS, tiny_model
from tests.runtime.conftest import assert_same, greedy

SWITCH = "_optimize_model_for_decode"
CONFIGURATIONS: list[dict[str, Any]] = [
    {"slots": 40},
    {"slots": 40, "predictor": "next_norm"},
    {"slots": 16, "cache": False, "predictor": "next_norm"},
    {"slots": 3, "cache": False},
    {"slots": 3},
]
PROMPTS = {
    "input_ids": torch.tensor([[0, 0, 3, 4, 5, 6], [7, 8, 9, 3, 2, 1]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
}


def _model(family: str) -> PreTrainedModel:
    """A tiny model; "qwen3_vl_moe" is one whose experts belong to a sub-model with a config of its own."""
    if family in CONFIGS:
        return tiny_model(family)
    torch.manual_seed(0)
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "num_key_value_heads", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "initializer_range",
        "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    config = Qwen3VLMoeConfig(
        text_config={**{name: getattr(CONFIGS["qwen3_moe"], name) for name in names}, "rope_parameters": rope},
        vision_config={
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
    )  # fmt: skip
    return Qwen3VLMoeForConditionalGeneration(config).bfloat16().eval()


class _OnGpu:
    """A model as transformers' switch sees it on a device that is not the CPU."""

    device = torch.device("cuda")

    def __init__(self, model: object) -> None:
        self._model = model

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that run, the resident model's and the slots', while `generate` switches as on a GPU."""
    calls: list[str] = []

    def spy(name: str, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spied(*args: Any) -> Tensor:
            calls.append(name)
            return forward(*args)

        return spied

    for name, forward in (("grouped_mm", grouped_mm_experts_forward), ("batched_mm", batched_mm_experts_forward)):
        spied = spy(name, forward)
        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, name, spied)
        monkeypatch.setattr(kernels, f"{name}_experts_forward", spied)
        monkeypatch.setitem(kernels._KERNELS, name, spied)

    monkeypatch.setattr(kernels, "run_experts", spy("grouped_mm", run_experts))
    original = getattr(GenerationMixin, SWITCH)
    monkeypatch.setattr(GenerationMixin, SWITCH, lambda model: original(_OnGpu(model)))
    return calls


def _taken(calls: list[str]) -> list[str]:
    taken = calls.copy()
    calls.clear()
    return taken


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v2", "qwen3_vl_moe"])
def test_generate_switches_as_for_the_resident_model(family: str, ran: list[str]) -> None:
    model = _model(family)
    expected = greedy(model, PROMPTS, 6)
    resident = _taken(ran)
    assert [kernel for kernel, _ in groupby(resident)] == ["grouped_mm", "batched_mm"]
    for configuration in CONFIGURATIONS:
        with offload(model, **configuration) as offloaded:
            assert_same(greedy(offloaded, PROMPTS, 6), expected)
            in_slots = _taken(ran)
            with torch.no_grad():
                offloaded(**PROMPTS)
            assert set(_taken(ran)) == {"grouped_mm"}, "outside of generate nothing is switched"
        if configuration.get("slots") == 3:
            assert len(in_slots) > len(resident), "steps in chunks"
            assert [kernel for kernel, _ in groupby(in_slots)] == ["grouped_mm", "batched_mm"]
        else:
            assert in_slots == resident
        assert SWITCH not in model.__dict__
    assert_same(greedy(model, PROMPTS, 6), expected)
    assert _taken(ran) == resident


def test_an_interrupted_generate_switches_back(ran: list[str]) -> None:
    model = _model("qwen3_moe")

    def interrupt(*_args: object, **_kwargs: object) -> bool:
        raise KeyboardInterrupt

    with offload(model, slots=40) as offloaded:
        with pytest.raises(KeyboardInterrupt):
            offloaded.generate(**PROMPTS, max_new_tokens=6, stopping_criteria=[interrupt])
        ran.clear()
        offloaded(**PROMPTS)
        assert set(ran) == {"grouped_mm"}


@pytest.mark.parametrize(("own", "other"), [("batched_mm", "grouped_mm"), ("grouped_mm", "batched_mm")])
def test_the_kernel_of_the_part_that_has_experts(own: str, other: str, ran: list[str]) -> None:
    model = _model("qwen3_vl_moe")
    model.set_experts_implementation({"": other, "vision_config": other, "text_config": own})
    expected = greedy(model, PROMPTS, 3)
    resident = _taken(ran)
    assert kernel_name(model) == own
    with offload(model, slots=40) as offloaded:
        assert_same(greedy(offloaded, PROMPTS, 3), expected)
        assert _taken(ran) == resident


class _Batches(TorchFunctionMode):
    """Shapes of the factors of each `bmm`."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[torch.Size, ...]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.bmm:
            self.shapes.append(tuple(factor.shape for factor in args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@torch.no_grad()
def test_chunks_multiply_batches_of_the_resident_models_shape(family: str) -> None:
    """The library may choose its kernel by the number of products."""
    model = _model(family)
    model.set_experts_implementation("batched_mm")
    with _Batches() as resident:
        expected = model(**PROMPTS).logits
    with offload(model, slots=3) as offloaded, _Batches() as chunked:
        assert torch.equal(offloaded(**PROMPTS).logits, expected)
    assert len(chunked.shapes) > 2 * len(resident.shapes)
    assert set(chunked.shapes) == set(resident.shapes)


# torch's `grouped_mm` over slots


class _NoValues(TorchDispatchMode):
    """Fails where a tensor's value is asked for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func.overloadpacket is not torch.ops.aten._local_scalar_dense, "a value was asked for"
        return func(*args, **(kwargs or {}))


class _Multiply:
    """torch's `grouped_mm` within limits; rows behind the last group are no numbers."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.groups: list[int] = []

    def __call__(self, rows_PD: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        assert len(weight) == len(offs) <= self._most
        self.groups.append(len(weight))
        output_PF = functional.grouped_mm(rows_PD, weight, offs=offs)
        return torch.where(torch.arange(len(rows_PD)).unsqueeze(-1) < offs[-1], output_PF, torch.nan)


def _groups(slots: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorted slot ids, their rows, weights [S, D, F], and offsets as transformers' kernel computes them."""
    generator = torch.Generator().manual_seed(rows)
    slots_P = torch.randint(0, slots, (rows,), generator=generator).sort(stable=True).values
    hidden_PD = torch.randn(rows, 32, generator=generator).bfloat16()
    weight_SDF = torch.randn(slots, 16, 32, generator=generator).bfloat16().transpose(1, 2)
    offsets = torch.bincount(slots_P, minlength=slots).cumsum(0).int()
    return slots_P, hidden_PD, weight_SDF, offsets


@pytest.mark.parametrize("rows", [1, 8, 100])
@pytest.mark.parametrize("slots", [8, 13, 14, 40])
def test_ranges_of_groups(rows: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several calls of at most 7 groups, some empty, against one over all; no value is read on the host."""
    _, hidden_PD, weight_SDF, offsets = _groups(slots, rows)
    expected = functional.grouped_mm(hidden_PD, weight_SDF, offs=offsets)
    multiply = _Multiply(7)
    monkeypatch.setattr(grouped, "_MOST_GROUPS", 7)
    monkeypatch.setattr(grouped, "_GROUPED_MM", (multiply,))
    with _NoValues():
        got = _SlotRanges().__torch_function__(multiply, (), (hidden_PD, weight_SDF), {"offs": offsets})
    assert torch.equal(got, expected)
    assert sum(multiply.groups) == slots + len(multiply.groups) - 1, "each range after the first shares one"


@pytest.mark.parametrize("rows", [1, 8, 100])
def test_products_where_torch_has_no_kernel(rows: int) -> None:
    slots_P, hidden_PD, weight_SDF, offsets = _groups(40, rows)
    expected = functional.grouped_mm(hidden_PD, weight_SDF, offs=offsets)
    with _SlotProducts(slots_P[torch.randperm(rows)].tolist()):
        got = functional.grouped_mm(hidden_PD, weight_SDF, offs=offsets)
    assert torch.equal(got, expected)


def test_the_whole_kernel_in_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = find_moe_layers(tiny_model("qwen3_moe"))[0].experts
    torch.manual_seed(0)
    hidden_TD = torch.randn(9, 32).bfloat16()
    slots_TK, weights_TK = torch.rand(9, 8).topk(2).indices, torch.rand(9, 2).bfloat16()
    expected = grouped_mm_experts_forward(experts, hidden_TD, slots_TK, weights_TK)
    monkeypatch.setattr(grouped, "_MOST_GROUPS", 3)
    monkeypatch.setattr(kernels, "over_slots", lambda *_: _SlotRanges())
    monkeypatch.setattr(SlotKernel, "by_expert", lambda *_: False)
    with _NoValues():
        got = SlotKernel(grouped_mm_experts_forward).run(experts, hidden_TD, slots_TK, weights_TK, slots_TK)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(("count", "kind"), [(1023, None), (1024, _SlotRanges)])
def test_a_cuda_device_is_not_asked_for_slots(count: int, kind: type | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    with FakeTensorMode():  # which has no values
        experts = nn.Module()
        views = torch.empty(count, 8, 16, dtype=torch.bfloat16, device="cuda")
        experts.register_parameter("down_proj", nn.Parameter(views))
        slots_TK = torch.empty(4, 2, dtype=torch.int64, device="cuda")
        between = over_slots(experts, count, slots_TK, None)
    assert isinstance(between, kind) if kind else not isinstance(between, _SlotRanges)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_the_cpu_kernel_gives_the_resident_bits(family: str, tokens: int) -> None:
    """With biases and transposed weights too, several tokens to an expert, slots in another order than experts."""
    experts = find_moe_layers(tiny_model(family))[0].experts
    torch.manual_seed(tokens)
    dtype = next(experts.parameters()).dtype
    hidden_TD, weights_TK = torch.randn(tokens, 32).to(dtype), torch.rand(tokens, 2).to(dtype)
    ids_TK = torch.rand(tokens, 8).topk(2).indices
    expected = grouped_mm_experts_forward(experts, hidden_TD, ids_TK, weights_TK)
    expert_of = torch.randperm(8)
    for parameter in experts.parameters(recurse=False):
        parameter.copy_(parameter[expert_of])
    order_P = torch.sort(ids_TK.reshape(-1)).indices
    got = run_experts(experts, hidden_TD, expert_of.argsort()[ids_TK], weights_TK, lambda: order_P)
    assert torch.equal(got, expected)


def _all_packed(experts: nn.Module) -> None:
    """Hold a module's matrices in bf16, as blocks of ggml."""
    for name, matrix in matrices(experts, len(experts.down_proj)).items():  # type: ignore[arg-type]
        outputs, inputs = sizes_of(experts, matrix)
        held = (matrix.mT if experts.is_transposed else matrix).detach().bfloat16().contiguous()
        make_packed(experts, len(held), {name: BlockForm((Piece("BF16", outputs),), inputs)})
        experts._parameters[f"{name}_blocks"].copy_(held.view(torch.uint8).flatten(1))  # type: ignore[union-attr]


class _Norm(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows / rows.float().norm(dim=-1, keepdim=True).to(rows.dtype)


@torch.no_grad()
@pytest.mark.parametrize("change", ["", "no gate", "norm"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("many", [64, 3, 1])
def test_packed_experts_follow_transformers_kernel(
    family: str, tokens: int, change: str, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases, transposed weights, interleaved gates, no gate, a norm; resident and in chunks the same bits.

    By ggml's products, expanded for experts of three rows, and for all, as on CUDA.
    """
    monkeypatch.setattr(packed_experts, "MANY_ROWS", many)
    experts = find_moe_layers(tiny_model(family))[0].experts
    if change == "no gate":
        experts.has_gate, experts.act_fn = False, nn.SiLU()
        for name in [name for name in experts._parameters if "gate_up" in name]:
            own = experts._parameters.pop(name)
            assert own is not None
            inner = experts.down_proj.shape[1 if experts.is_transposed else 2]  # type: ignore[union-attr]
            part = own[..., :inner] if experts.is_transposed or own.dim() == 2 else own[:, :inner]
            experts.register_parameter(name.replace("gate_up", "up"), nn.Parameter(part.contiguous()))
    elif change == "norm":
        experts.has_post_expert_norm, experts.post_expert_norm = True, _Norm()
    torch.manual_seed(tokens)
    hidden_TD, weights_TK = torch.randn(tokens, 32).bfloat16(), torch.rand(tokens, 2).bfloat16()
    ids_TK = torch.rand(tokens, 8).topk(2).indices
    expected = grouped_mm_experts_forward(experts, hidden_TD, ids_TK, weights_TK)
    _all_packed(experts)
    near, expected = expected.float(), experts(hidden_TD, ids_TK, weights_TK)
    assert (expected.float() - near).norm() <= 0.02 * near.norm()
    kernel, chunks = SlotKernel(grouped_mm_experts_forward), torch.sort(ids_TK.reshape(-1))
    assert torch.equal(kernel.run(experts, hidden_TD, ids_TK, weights_TK, ids_TK), expected)
    output_PD = torch.empty(2 * tokens, 32, dtype=torch.bfloat16)
    for own in (chunks.values < 3, chunks.values >= 3):
        pairs = chunks.indices[own]
        output_PD[pairs] = kernel.run_pairs(experts, hidden_TD, 2, pairs, chunks.values[own])
    assert torch.equal(combine(output_PD, weights_TK, torch.bfloat16), expected)
