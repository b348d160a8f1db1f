"""Experts as a quantised checkpoint ships them: codes and scales, for the codecs that move these.

R rows and C columns of a matrix as the model holds it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from expertcast.data.quantisation import FP8, MXFP4
from expertcast.data.weights.files import Part, TensorFile
from expertcast.data.weights.fp8 import Fp8Tensor
from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.storage.expert_sources import ExpertSources, Group, check_complete

Shipped = tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]
"""Of one expert: codes and scales of each matrix, and the other parameters as they are, both by name."""


class ShippedExperts:
    """The experts of a checkpoint whose matrices all lie in one quantised form.

    Args:
        sources: the checkpoint's experts, with FP8 weights as :class:`Fp8Tensor`.
        layers: L
        form: `fp8` or `mxfp4`; also the name of the codec.

    Raises:
        ExpertcastError: a matrix lies in another form, cannot be taken apart by experts, or a layer has no experts.
    """

    def __init__(self, sources: ExpertSources, layers: int, form: str) -> None:
        self._sources, self._form = sources, form
        self._blocks: set[tuple[int, int]] = set()
        for layer in range(layers):
            groups = sources.groups(layer)
            if not groups:
                check_complete(set(sources.local(layer)))
            for group in groups:
                self._check(group)

    @property
    def codec(self) -> str:
        """The codec's text: FP8 with the largest blocks of which those of every matrix consist."""
        if self._form != FP8:
            return self._form
        rows, columns = (math.gcd(*sizes) for sizes in zip(*self._blocks, strict=True))
        return f"{FP8}:rows={rows},columns={columns}"

    def expert(self, layer: int, expert: int) -> Shipped:
        """Read one expert.

        Raises:
            ExpertcastError: weights are missing.
        """
        local = self._sources.local(layer)
        shipped: dict[str, tuple[Tensor, Tensor]] = {}
        kept: dict[str, Tensor] = {}
        for group in self._sources.groups(layer):
            form = _form(group, self._sources)
            if form == MXFP4:
                blocks, scales = (file[expert : expert + 1][0] for file in self._sources.files_of(group))
                shipped[local[group.target]] = blocks, scales
            elif form == FP8:
                made = self._sources.made(group, expert, _codes)
                grids = self._sources.made(group, expert, _scales)
                shipped |= {local[full]: (made[full][0], grids[full][0]) for full in made}
            else:
                kept |= {local[full]: value[0] for full, value in self._sources.made(group, expert).items()}
        check_complete({full for full, name in local.items() if name not in shipped and name not in kept})
        return shipped, kept

    def _check(self, group: Group) -> None:
        parameters = self._sources.parameters
        if not self._sources.separable(group):
            raise self._refused(group.target, "are not stored expert by expert")
        form = _form(group, self._sources)
        if form != self._form:
            if form is not None or parameters[group.target].dim() > 2:
                raise self._refused(group.target, f"are not shipped in {self._form}")
            return
        if form != FP8:
            return
        files = [file for file in self._sources.files_of(group) if isinstance(file, Fp8Tensor)]
        if len({file.block for file in files}) > 1 or not all(file.whole for file in files):
            raise self._refused(group.target, f"have scales for blocks of {sorted({file.block for file in files})}")
        for full, grid in self._sources.made(group, 0, _grid).items():
            rows, columns = parameters[full].shape[-2:]
            self._blocks.add((rows // grid.shape[-2], columns // grid.shape[-1]))

    def _refused(self, full: str, why: str) -> ExpertcastError:
        return ExpertcastError(
            f"codec {self._form!r} moves experts as they are shipped, and those of {full} {why}: choose codec 'raw'"
        )


def _form(group: Group, sources: ExpertSources) -> str | None:
    """In which form all tensors of a group lie; None: in plain floats, or in several forms."""
    if group.mxfp4:
        return MXFP4
    return FP8 if all(isinstance(file, Fp8Tensor) for file in sources.files_of(group)) else None


def _codes(file: TensorFile, part: Part) -> Tensor:
    assert isinstance(file, Fp8Tensor)
    return file.codes(part)


def _scales(file: TensorFile, part: Part) -> Tensor:
    assert isinstance(file, Fp8Tensor)
    return file.scales(part)


def _grid(file: TensorFile, part: Part) -> Tensor:
    """One expert's scales, without reading them."""
    assert isinstance(file, Fp8Tensor)
    return torch.empty(file.grid if part == ... else (1, *file.grid[1:]), device="meta")
