"""Fit stand-ins for the MoE layers' outputs on a running model, in one pass over part of the text.

The model runs as in a collection. The outputs of its experts may be kept on disk, so that the collection need not run
them again.

T tokens, D hidden size, K experts per token, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertcast.data.experts import WINDOWS, Experts, ShownExperts, experts_of, run_windows, shown
from expertcast.data.means import down_projections, inner_width, sums_of
from expertcast.data.packed_experts import down_projection
from expertcast.data.plan import Plan, Window, WindowBatch, window_batches
from expertcast.predictors.artefacts import digest, file_digest
from expertcast.predictors.early_attention import MOST_RANK, StandIn
from expertcast.predictors.linear import WIDE
from expertcast.predictors.messages import ExpertcastError, with_token_progress
from expertcast.predictors.view import MoELayer, MoEView

# Principal directions of a layer's input

_EXACT = 512
"""Largest dimension for which all directions of a covariance are computed; 2048 would take seconds."""
_MORE, _ITERATIONS = 8, 6
"""Extra columns and rounds of the iteration for larger dimensions."""


class Moments:
    """Mean and covariance of a layer's input."""

    def __init__(self) -> None:
        self.count = 0
        self.sum_D = self.product_DD = torch.zeros(())

    def add(self, hidden_TD: Tensor) -> None:
        """Add the layer's inputs of one batch."""
        hidden_TD = hidden_TD.float()
        self.count += len(hidden_TD)
        self.sum_D = self.sum_D + hidden_TD.sum(dim=0)
        self.product_DD = self.product_DD + hidden_TD.T @ hidden_TD

    def principal(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return the mean [D] and the `rank` orthonormal directions [D, R] of the largest variance."""
        mean_D = self.sum_D.double() / self.count
        covariance_DD = self.product_DD.double() / self.count - torch.outer(mean_D, mean_D)
        return mean_D.float(), largest(covariance_DD, rank).float()


def largest(covariance_DD: Tensor, rank: int) -> Tensor:
    """Return the `rank` directions [D, R] of the largest variance, in descending order."""
    dimensions = len(covariance_DD)
    if dimensions <= _EXACT or rank + _MORE > dimensions // 4:
        _, vectors_DD = torch.linalg.eigh(covariance_DD)  # rising
        return torch.flip(vectors_DD[:, dimensions - rank :], (1,))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vectors_DR, _, _ = torch.svd_lowrank(covariance_DD.cpu(), q=rank + _MORE, niter=_ITERATIONS)
    return vectors_DR[:, :rank].to(covariance_DD.device)


# Sums of the regressions of one layer
#
# The down projection is linear, so the sums are over inner activations instead of outputs; the layer runs unchanged.
# The sums cover more than R directions; the final R are chosen at the end, from all tokens.
#
# I inner width of an expert, B >= R summed directions, Y = B + 1 and Z = R + 1 with a constant.

PRIOR_TOKENS = 16.0
"""Strength of the ridge penalty in tokens: an expert with few tokens keeps close to its mean."""
_BESIDE = 40
"""Summed directions beyond R."""


def _wide(layer: MoELayer, rank: int) -> int:
    """Return Y for a stand-in of rank R."""
    return 1 + (min(layer.hidden_size, rank + _BESIDE) if rank else 0)


class ExpertSums:
    """Sums for the regressions of one layer's experts; the last row is for the sum of its shared experts.

    Args:
        layer: MoE layer.
        rank: R.
        folder: existing folder for a file of the largest sums, which are not in memory then; None: host memory.
    """

    def __init__(self, layer: MoELayer, rank: int, folder: Path | None = None) -> None:
        self.layer, self._rank = layer, rank
        self._basis: tuple[Tensor, Tensor] | None = None
        """Origin [B] and directions [D, B]."""
        self._linear = not getattr(layer.experts, "has_post_expert_norm", False)
        device = down_projection(layer.experts).device
        wide = _wide(layer, rank)
        self._token_YY = torch.zeros(wide, wide, device=device)
        self._yy_EYY = torch.zeros(layer.num_experts + 1, wide, wide, device=device)
        size = layer.num_experts, wide, inner_width(layer)
        if folder is None:
            self._inner_EYI = torch.zeros(size)
        else:
            with TemporaryFile(dir=folder) as file:  # it stays, without a name, while it is mapped
                self._inner_EYI = torch.from_numpy(np.memmap(file, np.float32, "w+", shape=size))
        self._shared_YD = torch.zeros(wide, layer.hidden_size, device=device)

    def choose_among(self, moments: Moments) -> None:
        """Choose the summed directions: those of the largest variance in `moments`."""
        mean_D, directions_DB = moments.principal(len(self._token_YY) - 1)
        self._basis = mean_D @ directions_DB, directions_DB

    def add(self, hidden_TD: Tensor, ids_TK: Tensor) -> _Rows:
        """Add the layer's inputs and routing of one batch; returns an observer of the inner activations.

        The first batch chooses the directions if :meth:`choose_among` has not.
        """
        if self._basis is None and self._rank > 0:
            moments = Moments()
            moments.add(hidden_TD)
            self.choose_among(moments)
        y_TY = self._y(hidden_TD)
        self._token_YY += y_TY.T @ y_TY
        return _Rows(self, y_TY, ids_TK)

    def add_expert(self, expert: int, y_SY: Tensor, inner_SI: Tensor) -> None:
        """Add the rows of one expert: inputs in the summed directions, and inner activations."""
        self._yy_EYY[expert] += y_SY.T @ y_SY
        if self._linear:
            # a copy, because rounding depends on the alignment of a slice, which differs if experts run in parts
            self._inner_EYI[expert] += (y_SY.T @ inner_SI.to(torch.float32, copy=True)).cpu()

    def add_shared(self, hidden_TD: Tensor, shared_TD: Tensor) -> None:
        """Add the layer's inputs and the shared experts' outputs for them."""
        y_TY = self._y(hidden_TD)
        self._yy_EYY[-1] += y_TY.T @ y_TY
        self._shared_YD += y_TY.T @ shared_TD.float()

    def solve_into(self, stand_in: StandIn, experts: Experts) -> None:
        """Solve the regressions and write directions, means and maps to a stand-in.

        Args:
            stand_in: stand-in of the same rank.
            experts: experts of the model; their weights are read once.
        """
        layer, map_YZ = self.layer.index, self._chosen(stand_in)
        zz_EZZ = map_YZ.T @ self._yy_EYY.double() @ map_YZ
        zi_EZI = map_YZ.T @ self._inner_EYI.to(map_YZ)
        total_ZZ = zz_EZZ[:-1].sum(dim=0)
        spread_Z = total_ZZ.diagonal() / total_ZZ[0, 0].clamp(min=1)
        spread_Z[0] = 1e-6  # no penalty on the mean itself
        penalty_ZZ = (PRIOR_TOKENS * spread_Z).clamp(min=1e-12).diag()
        solved_EZZ = torch.linalg.inv(zz_EZZ + penalty_ZZ)
        if self._linear:
            for expert, (weight_ID, bias_D) in enumerate(down_projections(experts, self.layer)):
                solved_ZD = (solved_EZZ[expert] @ zi_EZI[expert]).float() @ weight_ID
                if bias_D is not None:
                    solved_ZD += (solved_EZZ[expert] @ zz_EZZ[expert, :, :1]).float() * bias_D
                stand_in.map_LEZD[layer, expert] = solved_ZD
        stand_in.shared_LZD[layer] = solved_EZZ[-1] @ map_YZ.T @ self._shared_YD.double()

    def _y(self, hidden_TD: Tensor) -> Tensor:
        if self._basis is None:
            return torch.ones(len(hidden_TD), 1, device=hidden_TD.device)
        centre_B, directions_DB = self._basis
        return nn.functional.pad(hidden_TD.float() @ directions_DB - centre_B, (1, 0), value=1.0)

    def _chosen(self, stand_in: StandIn) -> Tensor:
        """Choose the stand-in's directions, write them to it, and return the map to them and the constant, [Y, Z]."""
        total_YY = self._token_YY.double()
        map_YZ = total_YY.new_zeros(len(total_YY), self._rank + 1)
        map_YZ[0, 0] = 1
        if self._basis is None:
            return map_YZ
        centre_B, directions_DB = self._basis
        mean_B = total_YY[0, 1:] / total_YY[0, 0]
        chosen_BR = largest(total_YY[1:, 1:] / total_YY[0, 0] - torch.outer(mean_B, mean_B), self._rank)
        map_YZ[0, 1:], map_YZ[1:, 1:] = -mean_B @ chosen_BR, chosen_BR
        stand_in.projection_LDR[self.layer.index] = directions_DB.double() @ chosen_BR
        stand_in.centre_LR[self.layer.index] = (centre_B.double() + mean_B) @ chosen_BR
        return map_YZ


class _Rows:
    """Observer that adds inner activations to the sums, expert by expert in the kernel's order."""

    def __init__(self, sums: ExpertSums, y_TY: Tensor, ids_TK: Tensor) -> None:
        self._sums, self._y_TY = sums, y_TY
        ids_P, order_P = torch.sort(ids_TK.reshape(-1))  # the kernel's own order, including ties
        self._token_P = order_P // ids_TK.shape[1]
        ends = torch.bincount(ids_P, minlength=sums.layer.num_experts).cumsum(0).tolist()
        self._starts = [0, *ends]

    def __call__(self, inner_SI: Tensor, expert_G: Tensor, count_G: Tensor) -> None:
        """See :data:`expertcast.data.experts.Inner`."""
        start = 0
        for expert, count in zip(expert_G.tolist(), count_G.tolist(), strict=True):
            first, end = self._starts[expert], start + count
            if count:
                token_S = self._token_P[first : first + count]
                self._sums.add_expert(expert, self._y_TY[token_S], inner_SI[start:end])
            start = end


# Outputs of routed experts on disk: two passes over the text run the experts once


@dataclass(slots=True)
class LayerOutput:
    """Output and inner sums of one layer's experts for one batch."""

    output_TD: Tensor
    inner_EI: Tensor
    """Sums of inner activations, fp32."""
    count_E: Tensor

    @classmethod
    def zero(cls, layer: MoELayer, like_TD: Tensor) -> LayerOutput:
        """Return zeros for the tokens of `like_TD`, with its dtype and device."""
        inner_EI = torch.zeros(layer.num_experts, inner_width(layer), device=like_TD.device)
        return cls(torch.zeros_like(like_TD), inner_EI, inner_EI.new_zeros(layer.num_experts, dtype=torch.int64))

    def cpu(self) -> LayerOutput:
        """Return the same on the CPU."""
        return LayerOutput(*(each.cpu() for each in self.tensors().values()))

    def add_inner(self, inner_SI: Tensor, expert_G: Tensor, count_G: Tensor) -> None:
        """See :data:`expertcast.data.experts.Inner`."""
        self.inner_EI[expert_G] = sums_of(inner_SI, count_G)
        self.count_E[expert_G] = count_G

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


Outputs: TypeAlias = Callable[[MoELayer, Tensor], LayerOutput]
"""Known outputs of the routed experts in one forward, by layer and tokens [T, D]."""


_KEPT = "experts-{:05d}.safetensors"
"""Name of the file of a batch, by its number."""


class KeptOutputs:
    """One file of experts' outputs per batch, written and read by this process; a changed file is ignored.

    Args:
        folder: folder of the files; the first write creates it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[int, tuple[str, str]] = {}
        """Digests of the batch and of its file, by number of the batch."""

    @staticmethod
    def nbytes(view: MoEView, windows: Sequence[Window], batch_size: int, itemsize: int, rank: int) -> int:
        """Return the bytes of all files without headers, and of the sums of a fit.

        Args:
            view: the model's MoE layers.
            windows: windows for :func:`fit_stand_in`, which runs the first ones.
            batch_size: windows per forward.
            itemsize: bytes per number in the model's dtype.
            rank: R of the fit.
        """
        windows = first_windows(windows, TOKENS)
        tokens, batches = sum(len(window.token_ids) for window in windows), -(-len(windows) // batch_size)
        sums = sum(layer.num_experts * (4 * inner_width(layer) + 8) for layer in view)
        fitted = sum(4 * layer.num_experts * _wide(layer, rank) * inner_width(layer) for layer in view)
        return tokens * view.shape.layers * view.shape.hidden * itemsize + batches * sums + fitted

    def write(self, number: int, batch: WindowBatch, outputs: Mapping[int, LayerOutput]) -> None:
        """Write the `outputs` of a batch, by layer."""
        path = self.make_folder() / _KEPT.format(number)
        named = {f"{layer}.{name}": each for layer, own in outputs.items() for name, each in own.tensors().items()}
        save_file({name: each.contiguous() for name, each in named.items()}, path)
        self._written[number] = _identity(batch), file_digest(path)

    def of(self, number: int, batch: WindowBatch) -> Outputs | None:
        """Return the outputs of a batch, None if there are none."""
        path = self._folder / _KEPT.format(number)
        found = path.is_file() and self._written.get(number) == (_identity(batch), file_digest(path))
        return partial(_read, safe_open(path, framework="pt")) if found else None

    def make_folder(self) -> Path:
        """Return the folder, created if missing."""
        self._folder.mkdir(exist_ok=True)
        return self._folder


def _read(file: Any, layer: MoELayer, hidden_TD: Tensor) -> LayerOutput:
    names = (f"{layer.index}.{field.name}" for field in fields(LayerOutput))
    return LayerOutput(*(file.get_tensor(name).to(hidden_TD.device) for name in names))


def _identity(batch: WindowBatch) -> str:
    parts = (batch.token_T, batch.document_T, batch.position_T)
    return digest(torch.stack([part.long() for part in parts]).numpy().data)


TOKENS = 32_768
"""Tokens for the fit of maps."""
DIRECTION_TOKENS = 1024
"""Tokens for the first choice of directions: those of the first forward if it has as many, else of a separate pass."""


def check_rank(rank: int, view: MoEView) -> None:
    """Raise ExpertcastError if a stand-in of the model cannot have that rank."""
    most = min(view.shape.hidden, MOST_RANK)
    if not 0 <= rank <= most:
        raise ExpertcastError(f"early_rank={rank} is out of range: choose 0 to {most} directions")


def with_rank(plan: Plan, view: MoEView) -> Plan:
    """Return a plan with the rank of its stand-in, which the model can have.

    Recall of early attention with ranks 8, 16 and 32 on the bundled model: .919, .926 and .932. With 48 layers of 128
    experts and a hidden size of 2048 they take 0.2, 0.4 and 0.8 GB, and each doubling .03 ms more per forecast.

    Raises:
        ExpertcastError: the rank is out of range.
    """
    rank, hidden = plan.options.early_rank, view.shape.hidden
    if rank == "auto":
        rank = 8 if hidden > WIDE else min(32, hidden // 4)
    check_rank(rank or 0, view)
    return replace(plan, early_rank=rank)


def stand_in_nbytes(view: MoEView, rank: int | None) -> int:
    """Return the bytes of a stand-in; None: 0."""
    return 0 if rank is None else sum(each.nbytes for each in StandIn(view.shape, rank, "meta").buffers())


def fit_stand_in(
    model: PreTrainedModel, view: MoEView, windows: Sequence[Window], *, rank: int, batch_size: int = WINDOWS,
    keep: KeptOutputs | None = None,
) -> StandIn:  # fmt: skip
    """Fit the stand-in of a model's MoE layers, and return it on the CPU.

    Args:
        model: model to run.
        view: its MoE layers.
        windows: windows of the train split; the first ones with about :data:`TOKENS` tokens run.
        rank: R, at most the hidden size; 0 fits means only.
        batch_size: windows per forward.
        keep: writes the experts' outputs to disk; None keeps none.

    Raises:
        ExpertcastError: `rank` is out of range.
    """
    check_rank(rank, view)
    windows = first_windows(windows, TOKENS)
    stand_in = StandIn(view.shape, rank)
    folder = None if keep is None else keep.make_folder()
    sums = [ExpertSums(layer, rank, folder) for layer in view]
    experts = experts_of(model, view)
    tokens = sum(len(window.token_ids) for window in windows[:batch_size])
    if rank and tokens < DIRECTION_TOKENS and len(windows) > batch_size:
        moments = [Moments() for _ in view]
        _run(
            model, experts, [_Look(*each, experts) for each in zip(view, moments, strict=True)],
            first_windows(windows, DIRECTION_TOKENS), batch_size, "directions",
        )  # fmt: skip
        for own, seen in zip(sums, moments, strict=True):
            own.choose_among(seen)
    looks = [_Look(*each, experts) for each in zip(view, sums, strict=True)]
    _run(model, experts, looks, windows, batch_size, "maps", keep)
    for own in sums:
        own.solve_into(stand_in, experts)
    return stand_in


def first_windows(windows: Sequence[Window], tokens: int) -> list[Window]:
    """Return the first windows that hold `tokens` tokens together, or all windows."""
    taken: list[Window] = []
    for window in windows:
        if sum(len(one.token_ids) for one in taken) >= tokens:
            break
        taken.append(window)
    return taken


@torch.no_grad()
def _run(
    model: PreTrainedModel, experts: Experts, looks: Sequence[_Look], windows: Sequence[Window], batch_size: int,
    what: str, keep: KeptOutputs | None = None,
) -> None:  # fmt: skip
    """Run one pass.

    Args:
        model: model to run.
        experts: its experts.
        looks: observers, one per layer.
        windows: windows to run.
        batch_size: windows per forward.
        what: name of the pass for the progress bar.
        keep: writes the experts' outputs to disk.
    """
    total = sum(len(window.token_ids) for window in windows)
    batches = window_batches(windows, batch_size)
    with shown(model, experts, looks):
        for number, batch in enumerate(with_token_progress(batches, f"stand-in for early attention: {what}", total)):
            keep_T = None if batch.mask_BS.all() else batch.mask_BS.reshape(-1).nonzero().squeeze(1)
            outputs: dict[int, LayerOutput] = {}
            for look in looks:
                look.keep_T, look.outputs = keep_T, None if keep is None else outputs
            run_windows(model, batch)
            if keep is not None:
                keep.write(number, batch, outputs)


class _Look(ShownExperts):
    """Runs one layer's experts as in a collection, and adds inputs and inner activations to its sums."""

    def __init__(self, layer: MoELayer, sums: Moments | ExpertSums, experts: Experts) -> None:
        super().__init__(layer, layer.has_shared and isinstance(sums, ExpertSums))
        self._sums, self._experts = sums, experts
        self.outputs: dict[int, LayerOutput] | None = None
        """Receives the experts' outputs by layer; None keeps none."""

    def run(self, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        sums, layer = self._sums, self.layer
        if isinstance(sums, Moments):
            sums.add(hidden_TD)
            return self._experts.run(layer, hidden_TD, ids_TK, weights_TK)
        rows = sums.add(hidden_TD, ids_TK)
        if self.outputs is None:
            return self._experts.run(layer, hidden_TD, ids_TK, weights_TK, rows)
        kept = LayerOutput.zero(layer, hidden_TD[:0])

        def inner(inner_SI: Tensor, expert_G: Tensor, count_G: Tensor) -> None:
            rows(inner_SI, expert_G, count_G)
            kept.add_inner(inner_SI, expert_G, count_G)

        kept.output_TD = self._experts.run(layer, hidden_TD, ids_TK, weights_TK, inner)
        self.outputs[layer.index] = kept.cpu()
        return kept.output_TD

    def see_shared(self, hidden_TD: Tensor, shared_TD: Tensor) -> None:
        assert isinstance(self._sums, ExpertSums)
        self._sums.add_shared(hidden_TD, shared_TD)
