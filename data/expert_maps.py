"""Fitting stand-ins for the MoE layers' outputs from a running model: two passes over a part of the text.

The first pass finds the directions in which each layer's input varies most, the second one gathers, per expert, the
sums of a ridge regression of its output on them.

S rows (token-expert pairs, sorted by expert), D hidden size, E routed experts per layer, K experts per token, R rank,
Z = R + 1 with a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertcast.data.experts import WINDOWS, Experts, experts_of
from expertcast.data.plan import Window
from expertcast.data.window_batch import window_batches
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.progress import tokens_read
from expertcast.predictors.stand_in import MOST_RANK, StandIn
from expertcast.predictors.view import MoELayer, MoEView

RANK = 8
"""Directions per layer."""
TOKENS = 32_768
"""Tokens that maps are fitted on."""
DIRECTION_TOKENS = 8_192
"""Tokens that directions are found on."""
PRIOR_TOKENS = 16.0
"""Tokens' worth of holding maps back: an expert that few tokens reach keeps to its mean."""
M = TypeVar("M", "_Moments", "_Sums")


def fit_stand_in(
    model: PreTrainedModel, view: MoEView, windows: Sequence[Window], *, rank: int = RANK, batch_size: int = WINDOWS
) -> StandIn:
    """The stand-in of a model's MoE layers, on the CPU.

    Args:
        model: is run over the windows twice.
        view: its MoE layers.
        windows: of the train split, some :data:`TOKENS` of them; the first :data:`DIRECTION_TOKENS` give directions.
        rank: R; 0 leaves the experts' means.
        batch_size: windows per forward.

    Raises:
        ExpertcastError: a rank that no model has.
    """
    hidden = view.shape.hidden
    if not 0 <= rank <= min(hidden, MOST_RANK):
        raise ExpertcastError(f"rank={rank}: give 0 to {min(hidden, MOST_RANK)} directions")
    device = next(view[0].router.parameters()).device
    stand_in = StandIn.of_shape(view.shape, rank, device)
    if rank:
        for layer, moments in enumerate(
            _run(model, view, first_windows(windows, DIRECTION_TOKENS), batch_size, _Moments, "directions")
        ):
            mean_D, directions_DR = moments.principal(rank)
            stand_in.projection_LDR[layer] = directions_DR
            stand_in.centre_LR[layer] = mean_D @ directions_DR
    sums = _run(model, view, windows, batch_size, lambda layer: _Sums(layer, stand_in), "maps")
    for layer, own in enumerate(sums):
        own.solve_into(stand_in, layer)
    return stand_in.to("cpu")


class _Moments:
    """Mean and covariance of a layer's input."""

    def __init__(self, layer: MoELayer) -> None:
        self.count = 0
        self.sum_D: Tensor | float = 0.0
        self.product_DD: Tensor | float = 0.0

    def add(self, hidden_TD: Tensor) -> None:
        """The layer's inputs of one batch."""
        hidden_TD = hidden_TD.float()
        self.count += len(hidden_TD)
        self.sum_D = self.sum_D + hidden_TD.sum(dim=0)
        self.product_DD = self.product_DD + hidden_TD.T @ hidden_TD

    def principal(self, rank: int) -> tuple[Tensor, Tensor]:
        """The mean [D], and the `rank` directions [D, R] of the largest variance, orthonormal."""
        assert isinstance(self.sum_D, Tensor)
        assert isinstance(self.product_DD, Tensor)
        mean_D = self.sum_D.double() / self.count
        covariance_DD = self.product_DD.double() / self.count - torch.outer(mean_D, mean_D)
        _, vectors_DD = torch.linalg.eigh(covariance_DD)  # rising
        return mean_D.float(), vectors_DD[:, -rank:].flip(1).float()


class _Sums:
    """Of the regressions of one layer's experts and of its shared experts' sum, which comes last."""

    def __init__(self, layer: MoELayer, stand_in: StandIn) -> None:
        self._layer, self._stand_in = layer.index, stand_in
        self._experts = layer.num_experts
        device = stand_in.base_LED.device
        width = stand_in.rank + 1
        self.zz_EZZ = torch.zeros(layer.num_experts + 1, width, width, device=device)
        self.zy_EZD = torch.zeros(layer.num_experts + 1, width, layer.hidden_size, device=device)

    def _z(self, hidden_SD: Tensor) -> Tensor:
        return nn.functional.pad(self._stand_in.directions(self._layer, hidden_SD), (1, 0), value=1.0)

    def add_pairs(self, rows_SD: Tensor, output_SD: Tensor, ids_S: Tensor) -> None:
        """Pairs sorted by expert: their inputs, the experts' outputs, and which expert."""
        z_SZ = self._z(rows_SD)
        counts = torch.bincount(ids_S, minlength=self._experts).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count:
                z, y = z_SZ[start : start + count], output_SD[start : start + count].float()
                self.zz_EZZ[expert] += z.T @ z
                self.zy_EZD[expert] += z.T @ y
            start += count

    def add_shared(self, hidden_TD: Tensor, shared_TD: Tensor) -> None:
        """The layer's inputs, and what the shared experts put out for them."""
        z_TZ = self._z(hidden_TD)
        self.zz_EZZ[-1] += z_TZ.T @ z_TZ
        self.zy_EZD[-1] += z_TZ.T @ shared_TD.float()

    def solve_into(self, stand_in: StandIn, layer: int) -> None:
        """Means and maps into a stand-in's rows of one layer."""
        total_ZZ = self.zz_EZZ[:-1].sum(dim=0).double()
        spread_Z = total_ZZ.diagonal() / total_ZZ[0, 0].clamp(min=1)
        spread_Z[0] = 1e-6  # the mean itself is not held back
        penalty_ZZ = (PRIOR_TOKENS * spread_Z).clamp(min=1e-12).diag()
        solved_EZD = torch.linalg.solve(self.zz_EZZ.double() + penalty_ZZ, self.zy_EZD.double())
        stand_in.base_LED[layer] = solved_EZD[:-1, 0]
        stand_in.map_LERD[layer] = solved_EZD[:-1, 1:]
        stand_in.shared_LD[layer] = solved_EZD[-1, 0]
        stand_in.shared_map_LRD[layer] = solved_EZD[-1, 1:]


def first_windows(windows: Sequence[Window], tokens: int) -> list[Window]:
    """The first windows that hold so many tokens together, or all."""
    taken: list[Window] = []
    for window in windows:
        if sum(len(one.token_ids) for one in taken) >= tokens:
            break
        taken.append(window)
    return taken


@torch.no_grad()
def _run(
    model: PreTrainedModel,
    view: MoEView,
    windows: Sequence[Window],
    batch_size: int,
    make: Callable[[MoELayer], M],
    what: str,
) -> list[M]:
    """One pass; returns what was made for each layer.

    Args:
        model, view: are run.
        windows: are run over.
        batch_size: windows per forward.
        make: from a layer, what gathers its sums.
        what: they are for.
    """
    sums = [make(layer) for layer in view]
    with ExitStack() as stack:
        if model.training:
            stack.callback(model.train)
            model.eval()
        experts = experts_of(model, view)
        looks = [_Look(layer, own, experts) for layer, own in zip(view, sums, strict=True)]
        for look in looks:
            if look.layer.has_shared:
                stack.callback(look.layer.block.register_forward_hook(look.after_block).remove)
        stack.enter_context(experts.answered({look.layer.experts: look.experts for look in looks}))
        total = sum(len(window.token_ids) for window in windows)
        batches = window_batches(windows, batch_size)
        for batch in tokens_read(batches, f"stand-in for early attention: {what}", total):
            keep_T = batch.mask_BS.reshape(-1).nonzero().squeeze(1).to(model.device)
            for look in looks:
                look.keep_T = keep_T
            model.base_model(
                input_ids=batch.input_ids_BS.to(model.device),
                attention_mask=batch.mask_BS.to(model.device),
                use_cache=False,
            )
    return sums


class _Look:
    """Shows one layer's experts to its sums."""

    def __init__(self, layer: MoELayer, sums: _Moments | _Sums, run: Experts) -> None:
        self.layer, self._sums, self._run = layer, sums, run
        self.keep_T = torch.empty(0, dtype=torch.int64)
        """Indices of the batch's real tokens."""
        self._routed: tuple[Tensor, Tensor] | None = None

    def experts(self, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """In place of the experts' forward; where outputs are asked for, each pair as a token of its own."""
        keep_T = self.keep_T.to(hidden_TD.device)
        hidden, ids, weights = hidden_TD[keep_T], ids_TK[keep_T], weights_TK[keep_T]
        if isinstance(self._sums, _Moments):
            self._sums.add(hidden)
            routed_TD = torch.zeros_like(hidden_TD)
            routed_TD[keep_T] = self._run.run(self.layer, hidden, ids, weights)
            return routed_TD
        ids_S, order_S = ids.reshape(-1).sort(stable=True)
        rows_SD = hidden[order_S // ids.shape[1]]
        ones_S1 = torch.ones_like(ids_S[:, None], dtype=weights.dtype)
        output_SD = self._run.run(self.layer, rows_SD, ids_S[:, None], ones_S1)
        self._sums.add_pairs(rows_SD, output_SD, ids_S)
        pairs_SD = torch.empty_like(output_SD)
        pairs_SD[order_S] = output_SD
        mixed = (pairs_SD.view(*ids.shape, -1) * weights.to(pairs_SD.dtype)[..., None]).sum(dim=1)
        routed_TD = torch.zeros_like(hidden_TD)
        routed_TD[keep_T] = mixed.to(hidden_TD.dtype)
        self._routed = (hidden_TD, routed_TD) if self.layer.has_shared else None
        return routed_TD

    def after_block(self, _module: nn.Module, _args: tuple[object, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        """What the block puts out beyond its routed experts is the shared experts' output."""
        if self._routed is None:
            return
        block = output[0] if isinstance(output, tuple) else output
        (hidden_TD, routed_TD), self._routed = self._routed, None
        assert isinstance(self._sums, _Sums)
        keep_T = self.keep_T.to(routed_TD.device)
        shared_TD = block.reshape(routed_TD.shape)[keep_T].float() - routed_TD[keep_T].float()
        self._sums.add_shared(hidden_TD[keep_T], shared_TD)
