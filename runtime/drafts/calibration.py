"""What a model's experts are given on some text, and rounding that makes the least of its error there (row C1).

T tokens, D width of what experts are given, E routed experts per layer, K experts per token, R rows of one expert,
N outputs, I inputs of a projection, S windows of W tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertcast.predictors.view import MoEView
from expertcast.runtime.drafts.compensation import compensated
from expertcast.runtime.drafts.matrices import Coded

ENOUGH = 64
"""Tokens of its own that an expert is calibrated on; one that saw fewer is calibrated on all tokens of its layer."""
_CHUNK = 1 << 24
"""Entries of the H of experts that are rounded at once."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Per layer the inputs of its experts on some text and who was chosen, in host memory: L x T x D values."""

    hidden_TD: Sequence[Tensor]
    ids_TK: Sequence[Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, model: PreTrainedModel, view: MoEView, ids_SW: Tensor, batch: int = 8) -> Calibration:
        """Run the model, resident or offloaded, over windows of token ids, some at a time; it stays as it is."""
        hidden: list[list[Tensor]] = [[] for _ in view]
        ids: list[list[Tensor]] = [[] for _ in view]
        with ExitStack() as stack:
            for layer in view:

                def keep(_experts: nn.Module, args: tuple[Tensor, ...], index: int = layer.index) -> None:
                    hidden[index].append(args[0].reshape(-1, args[0].shape[-1]).cpu())
                    ids[index].append(args[1].cpu())

                stack.callback(layer.experts.register_forward_pre_hook(keep).remove)
            for windows in torch.split(ids_SW, batch):
                model.base_model(input_ids=windows.to(model.device), use_cache=False)
        return cls([torch.cat(parts) for parts in hidden], [torch.cat(parts) for parts in ids])

    def inputs(self, layer: int, expert: int) -> Tensor:
        """[R, D]: what the expert was given; what all experts of its layer were given if that is less than `ENOUGH`."""
        own_T = (self.ids_TK[layer] == expert).any(dim=-1)
        return self.hidden_TD[layer][own_T] if int(own_T.sum()) >= ENOUGH else self.hidden_TD[layer]


def calibrated(
    weights: Callable[[int], Tensor], inputs: Callable[[int], Tensor], experts: int, bits: int, group: int
) -> Iterator[Coded]:
    """Each expert's codes and scales, in order.

    Args:
        weights: of an expert, [N, I].
        inputs: of an expert, [R, I], on the weights' device.
        experts: E.
        bits, group: as for :func:`expertcast.runtime.drafts.rounding.rounded`.
    """
    size = max(1, _CHUNK // weights(0).shape[-1] ** 2)
    for start in range(0, experts, size):
        chunk = range(start, min(start + size, experts))
        hessians = [(rows := inputs(expert).float()).T @ rows for expert in chunk]
        codes, scales = compensated(torch.stack([weights(each) for each in chunk]), torch.stack(hessians), bits, group)
        yield from zip(codes, scales, strict=True)
