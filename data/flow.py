"""What a residual stream adds up to: sums followed through a forward, operation by operation, on any device.

Every tensor is a sum of atoms with factors: the result of an addition, of a product with a number, or of a change of
shape or dtype is told in the atoms of what it came from; the result of anything else is a new atom. No value is looked
at, so a model on the meta device tells as much as one with weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Sum = dict[int, float]
"""Factor by atom."""

_aten = torch.ops.aten
_SAME = {
    _aten.view, _aten._unsafe_view, _aten.reshape, _aten.clone, _aten._to_copy, _aten.alias, _aten.detach,
    _aten.unsqueeze, _aten.squeeze, _aten.contiguous, _aten.lift_fresh,
}  # fmt: skip
"""The same numbers in another shape, place or dtype."""
_PLUS = {_aten.add: 1.0, _aten.add_: 1.0, _aten.sub: -1.0, _aten.sub_: -1.0}
_TIMES = {_aten.mul, _aten.mul_, _aten.div, _aten.div_}


class Sums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every operation that runs inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sums: dict[int, Sum] = {}
        self._behind: list[frozenset[int]] = []
        """By atom, the marked atoms that it was computed from."""
        self._alive: list[Tensor] = []  # ids stay unique only while the tensors live

    def of(self, tensor: Tensor) -> Sum:
        """The tensor as a sum."""
        if id(tensor) not in self._sums:
            self._put(tensor, {self._atom(frozenset()): 1.0})
        return self._sums[id(tensor)]

    def mark(self, tensor: Tensor) -> int:
        """Make the tensor one atom, on which what is computed from it depends; the atom."""
        atom = self._atom(frozenset([len(self._behind)]))
        self._put(tensor, {atom: 1.0})
        return atom

    def depends(self, atoms: Iterable[int], marked: int) -> bool:
        """Whether any of the atoms is, or was computed from, the marked one."""
        return any(marked in self._behind[atom] for atom in atoms)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        output = func(*args, **kwargs)
        if isinstance(output, Tensor):
            self._follow(func.overloadpacket, args, kwargs, output)
        elif isinstance(output, (tuple, list)):
            for each in output:
                if isinstance(each, Tensor):
                    self._put(each, self._new(args, kwargs))
        return output

    def _follow(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        total = self._sum(operation, args, kwargs) if output.is_floating_point() else None
        self._put(output, self._new(args, kwargs) if total is None else total)
        if args and output is args[0] and output._base is not None:  # written through a view
            self._put(output._base, self._new((*args, output._base), kwargs))

    def _sum(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sum | None:
        """The operation's result in the atoms of its arguments; None: it is none of those that are followed."""
        first = args[0] if args else None
        if not isinstance(first, Tensor):
            return None
        if operation in _SAME:
            return self.of(first)
        if len(args) < 2:
            return None
        second = args[1]
        if operation in _TIMES and isinstance(second, Real):
            factor = float(second) if operation in (_aten.mul, _aten.mul_) else 1.0 / float(second)
            return {atom: factor * value for atom, value in self.of(first).items()}
        if operation in _PLUS and isinstance(second, Tensor):
            factor = _PLUS[operation] * float(kwargs.get("alpha", 1.0))
            return minus(self.of(first), self.of(second), -factor)
        return None

    def _new(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sum:
        behind: set[int] = set()
        _each_tensor((args, kwargs), lambda tensor: behind.update(*(self._behind[atom] for atom in self.of(tensor))))
        return {self._atom(frozenset(behind)): 1.0}

    def _atom(self, behind: frozenset[int]) -> int:
        self._behind.append(behind)
        return len(self._behind) - 1

    def _put(self, tensor: Tensor, total: Sum) -> None:
        self._alive.append(tensor)
        self._sums[id(tensor)] = total


def minus(first: Sum, second: Sum, factor: float = 1.0) -> Sum:
    """`first - factor * second`, without atoms that cancel."""
    total = dict(first)
    for atom, value in second.items():
        total[atom] = total.get(atom, 0.0) - factor * value
    return {atom: value for atom, value in total.items() if value}


def _each_tensor(values: object, see: Callable[[Tensor], None]) -> None:
    if isinstance(values, Tensor):
        see(values)
    elif isinstance(values, Mapping):
        for each in values.values():
            _each_tensor(each, see)
    elif isinstance(values, (tuple, list)):
        for each in values:
            _each_tensor(each, see)
