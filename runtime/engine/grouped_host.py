"""transformers' grouped kernel over slots on the CPU: the very products that it makes over experts.

Rows are sorted by expert, as in the resident model: torch's CPU sort need not be stable, and where several tokens
share an expert its `mm` may round a row otherwise at another place in the group. Empty groups, which cost time on the
CPU, are skipped.

The kernel's own code runs, with other functions under two of the names that it uses. A mode that is asked at every
torch function would do the same, and took 2.5 of the 18.3 ms of a small model's decode step.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

_LINEAR, _MULTIPLY = "_grouped_linear", "_grouped_mm"
"""What the kernel calls, and what that calls in turn."""


class HostGrouped:
    """The kernel with its rows in an order that is given, and one product per group that has any.

    Args:
        forward: transformers' `grouped_mm_experts_forward`.
    """

    @classmethod
    def of(cls, forward: Callable[..., Tensor]) -> HostGrouped | None:
        """That; None where this transformers has written its kernel otherwise."""
        linear = getattr(forward, "__globals__", {}).get(_LINEAR)
        known = uses(forward, _LINEAR) and uses(forward, "torch") and uses(linear, _MULTIPLY)
        return cls(forward) if known else None

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        linear = with_names(forward.__globals__[_LINEAR], {_MULTIPLY: self._multiply})
        self._forward = with_names(forward, {_LINEAR: linear, "torch": _Torch(self._sort)})
        self._slots_P = self._order_P = torch.empty(0, dtype=torch.int64)
        self._groups: list[tuple[int, int]] = []
        """(slot, rows), in the order of the rows."""

    def run(
        self, experts: nn.Module, hidden_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, order_P: Tensor
    ) -> Tensor:
        """[T, D].

        Args:
            experts, hidden_TD, slots_TK, weights_TK: what the kernel takes, with slots in place of experts.
            order_P: in which token-expert pairs are computed; those of one slot lie together.
        """
        self._slots_P, self._order_P = slots_TK.reshape(-1), order_P
        return self._forward(experts, hidden_TD, slots_TK, weights_TK)

    def _sort(self, ids_P: Tensor) -> tuple[Tensor, Tensor]:
        assert ids_P.shape == self._order_P.shape
        sorted_P = self._slots_P[self._order_P]
        self._groups = [(slot, len(list(rows))) for slot, rows in groupby(sorted_P.tolist())]
        return sorted_P, self._order_P

    def _multiply(self, rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        del offs
        return products(rows, weight, self._groups)


class _Torch:
    """torch, but for its sort."""

    def __init__(self, sort: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        self.sort = sort

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def with_names(function: Callable[..., Tensor], names: dict[str, Any]) -> Callable[..., Tensor]:
    """A copy of a function of a module that finds other things under some of the module's names."""
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def uses(function: object, name: str) -> bool:
    """Whether a function is Python's own and asks its module for a name."""
    return isinstance(function, types.FunctionType) and name in function.__code__.co_names


def products(rows: Tensor, weight: Tensor, groups: Sequence[tuple[int, int]]) -> Tensor:
    """One product per group (slot, rows), the groups' rows one after another: [P, F] of `rows` [P, D] and `weight`
    [S, D, F]."""
    output = rows.new_empty(rows.shape[0], weight.shape[-1])
    start = 0
    for slot, count in groups:
        end = start + count
        torch.mm(rows[start:end], weight[slot], out=output[start:end])
        start = end
    return output
