"""Answers to `grouped_mm` over slots: the same products as torch's own, however the groups are told apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.runtime.engine import kernels
from expertcast.runtime.engine import kernels as grouped
from expertcast.runtime.engine.kernels import (
    HostGrouped,
    SlotKernel,
    _SlotProducts,
    _SlotRanges,
    over_slots,
)
from tests.families.models import tiny_model


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
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("slots", [8, 13, 14, 40])
def test_ranges_of_groups(rows: int, known: bool, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several calls of at most 7 groups, some empty, against one over all; the host may not know the slots."""
    slots_P, hidden_PD, weight_SDF, offsets = _groups(slots, rows)
    expected = functional.grouped_mm(hidden_PD, weight_SDF, offs=offsets)
    shuffled = slots_P[torch.randperm(rows)].tolist()
    multiply = _Multiply(7)
    monkeypatch.setattr(grouped, "_MOST_GROUPS", 7)
    monkeypatch.setattr(grouped, "_GROUPED_MM", (multiply,))
    ranges = _SlotRanges(shuffled if known else None)
    with _NoValues():
        got = ranges.__torch_function__(multiply, (), (hidden_PD, weight_SDF), {"offs": offsets})
    assert torch.equal(got, expected)
    if known:
        assert len(multiply.groups) == len({slot // 7 for slot in shuffled})
    else:
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
    monkeypatch.setattr(kernels, "over_slots", lambda *_: _SlotRanges(None))
    monkeypatch.setattr(SlotKernel, "by_expert", lambda *_: False)
    with _NoValues():
        got = SlotKernel(grouped_mm_experts_forward, 8).run(experts, hidden_TD, slots_TK, weights_TK, slots_TK)
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
    got = HostGrouped(grouped_mm_experts_forward).run(
        experts, hidden_TD, expert_of.argsort()[ids_TK], weights_TK, order_P
    )
    assert torch.equal(got, expected)


def test_another_kernel_of_transformers_is_refused() -> None:
    with pytest.raises(ExpertcastError, match=f"kernel of transformers {transformers.__version__} is not the one"):
        HostGrouped(batched_mm_experts_forward)
