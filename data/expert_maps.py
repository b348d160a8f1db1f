"""Fitting stand-ins for the MoE layers' outputs from a running model: one pass over a part of the text.

The model runs as it does in a collection, and what its experts put out may be kept for that (`kept_outputs.py`).

T tokens, D hidden size, K experts per token, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertcast.data.directions import Moments
from expertcast.data.expert_sums import ExpertSums
from expertcast.data.experts import WINDOWS, Experts, experts_of
from expertcast.data.kept_outputs import BatchWriter, KeptOutputs, LayerOutput
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
DIRECTION_TOKENS = 1024
"""Tokens that directions are first chosen by: those of the first forward, where it has as many; else of a pass of its
own before."""


def fit_stand_in(
    model: PreTrainedModel, view: MoEView, windows: Sequence[Window], *, rank: int = RANK, batch_size: int = WINDOWS,
    keep: KeptOutputs | None = None,
) -> StandIn:  # fmt: skip
    """The stand-in of a model's MoE layers, on the CPU.

    Args:
        model: is run over the windows.
        view: its MoE layers.
        windows: of the train split, some :data:`TOKENS` of them.
        rank: R; 0 leaves the experts' means.
        batch_size: windows per forward.
        keep: gets what the experts put out; None keeps nothing.

    Raises:
        ExpertcastError: a rank that no model has.
    """
    hidden = view.shape.hidden
    if not 0 <= rank <= min(hidden, MOST_RANK):
        raise ExpertcastError(f"rank={rank}: give 0 to {min(hidden, MOST_RANK)} directions")
    device = next(view[0].router.parameters()).device
    stand_in = StandIn.of_shape(view.shape, rank, device)
    sums = [ExpertSums(layer, rank) for layer in view]
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
    return stand_in.to("cpu")


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
    model: PreTrainedModel, experts: Experts, looks: Sequence[_Look], windows: Sequence[Window], batch_size: int,
    what: str, keep: KeptOutputs | None = None,
) -> None:  # fmt: skip
    """One pass.

    Args:
        model, experts: are run.
        looks: one for each layer.
        windows: are run over.
        batch_size: windows per forward.
        what: the pass is for.
        keep: gets what the experts put out.
    """
    with ExitStack() as stack:
        if model.training:
            stack.callback(model.train)
            model.eval()
        for look in looks:
            if look.layer.has_shared:
                stack.callback(look.layer.block.register_forward_hook(look.after_block).remove)
        stack.enter_context(experts.answered({look.layer.experts: look.experts for look in looks}))
        total = sum(len(window.token_ids) for window in windows)
        batches = window_batches(windows, batch_size)
        for number, batch in enumerate(tokens_read(batches, f"stand-in for early attention: {what}", total)):
            keep_T = None if batch.mask_BS.all() else batch.mask_BS.reshape(-1).nonzero().squeeze(1).to(model.device)
            with nullcontext() if keep is None else keep.writing(number, batch) as writer:
                for look in looks:
                    look.keep_T, look.writer = keep_T, writer
                model.base_model(
                    input_ids=batch.input_ids_BS.to(model.device),
                    attention_mask=batch.mask_BS.to(model.device),
                    use_cache=False,
                )


class _Look:
    """Runs one layer's experts as a collection does, and shows them to its sums."""

    def __init__(self, layer: MoELayer, sums: Moments | ExpertSums, run: Experts) -> None:
        self.layer, self._sums, self._run = layer, sums, run
        self.keep_T: Tensor | None = None
        """Indices of the batch's real tokens; None for all."""
        self.writer: BatchWriter | None = None
        """Takes what the experts put out."""
        self._routed: tuple[Tensor, Tensor] | None = None

    def experts(self, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """In place of the experts' forward; rows of padding come out as zero."""
        if self.keep_T is None:
            routed_TD = self._real(hidden_TD, ids_TK, weights_TK)
        else:
            keep_T = self.keep_T.to(hidden_TD.device)
            routed_TD = torch.zeros_like(hidden_TD)
            routed_TD[keep_T] = self._real(hidden_TD[keep_T], ids_TK[keep_T], weights_TK[keep_T])
        if self.layer.has_shared and isinstance(self._sums, ExpertSums):
            self._routed = hidden_TD, routed_TD
        return routed_TD

    def _real(self, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        sums, layer = self._sums, self.layer
        if isinstance(sums, Moments):
            sums.add(hidden_TD)
            return self._run.run(layer, hidden_TD, ids_TK, weights_TK)
        if sums.lacks_directions:
            moments = Moments()
            moments.add(hidden_TD)
            sums.choose_among(moments)
        rows = sums.add(hidden_TD, ids_TK)
        if self.writer is None:
            return self._run.run(layer, hidden_TD, ids_TK, weights_TK, rows)
        kept = LayerOutput.zero(layer, hidden_TD[:0])

        def inner(inner_SI: Tensor, expert_G: Tensor, count_G: Tensor) -> None:
            rows(inner_SI, expert_G, count_G)
            kept.add_inner(inner_SI, expert_G, count_G)

        kept.output_TD = self._run.run(layer, hidden_TD, ids_TK, weights_TK, inner)
        self.writer.write(kept)
        return kept.output_TD

    def after_block(self, _module: nn.Module, _args: tuple[object, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        """What the block puts out beyond its routed experts is the shared experts' output."""
        if self._routed is None:
            return
        block = output[0] if isinstance(output, tuple) else output
        (hidden_TD, routed_TD), self._routed = self._routed, None
        assert isinstance(self._sums, ExpertSums)
        shared_TD = block.reshape(routed_TD.shape).float() - routed_TD.float()
        if self.keep_T is not None:
            keep_T = self.keep_T.to(routed_TD.device)
            hidden_TD, shared_TD = hidden_TD[keep_T], shared_TD[keep_T]
        self._sums.add_shared(hidden_TD, shared_TD)
