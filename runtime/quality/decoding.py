"""Reading texts as a deployment does: a prefill, then one decode step per token, the right token given each time.

B texts of S tokens, T of them in a forward, V vocabulary. What acts in decode steps only, or depends on what a cache
holds, is measured this way; a whole text in one forward would be one prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@torch.no_grad()
def forwards(model: PreTrainedModel, ids_BS: Tensor, prefill: int, *, logits_to_keep: int = 0) -> Iterator[Tensor]:
    """Logits [B, T, V] of each forward: one over the prefill, then one per token.

    Args:
        model: resident or offloaded.
        ids_BS: the texts, all of one length.
        prefill: tokens of each that the first forward takes together.
        logits_to_keep: of the last so many tokens of a forward; 0: of all.
    """
    ids_BS = ids_BS.to(next(model.parameters()).device)
    cache = DynamicCache(config=model.config)
    for ids_BT in (ids_BS[:, :prefill], *torch.split(ids_BS[:, prefill:], 1, dim=1)):
        if ids_BT.shape[1]:
            done = model(input_ids=ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=logits_to_keep)
            yield done.logits


def read_texts(
    model: PreTrainedModel, ids_BS: Tensor, prefill: int, *, prefilled: Callable[[], None] | None = None
) -> Tensor:
    """Log probabilities [B, S - prefill + 1, V] of what follows the prefill and of what follows each token after it.

    Args:
        model, ids_BS, prefill: as for :func:`forwards`.
        prefilled: called between the prefill and the first decode step.
    """
    steps = []
    for logits_B1V in forwards(model, ids_BS, prefill, logits_to_keep=1):
        steps.append(logits_B1V[:, -1].float().log_softmax(dim=-1))
        if len(steps) == 1 and prefilled is not None:
            prefilled()
    return torch.stack(steps, dim=1)
