"""A step that names more experts than there are slots runs token by token, in groups whose experts fit.

T tokens, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def groups(ids_TK: Tensor, experts: int, limit: int, held: Iterable[int] = ()) -> Iterator[Tensor]:
    """Rows of tokens, each token once, those of one group with at most `limit` experts together.

    A token is computed as a whole, so that its bits are those of the step in one piece. A group is grown from the token
    whose experts are wanted most, by the experts that are wanted most.

    Args:
        ids_TK: what a layer executes, on the CPU.
        experts: E.
        limit: at least K.
        held: experts that are there already: the first group prefers them.
    """
    ids_TK = ids_TK.long()
    left_T = torch.arange(len(ids_TK))
    bonus_E = torch.zeros(experts, dtype=torch.long)
    bonus_E[list(held)] = len(ids_TK)
    while len(left_T):
        left_TK = ids_TK[left_T]
        wanted_E = torch.bincount(left_TK.reshape(-1), minlength=experts)
        wanted_E += bonus_E * (wanted_E > 0)
        seed_K = left_TK[wanted_E[left_TK].sum(dim=1).argmax()]
        wanted_E[seed_K] += wanted_E.sum()
        chosen_E = torch.zeros(experts, dtype=torch.bool)
        chosen_E[wanted_E.topk(min(limit, experts)).indices] = True
        inside_T = chosen_E[left_TK].all(dim=1)
        yield left_T[inside_T]
        left_T, bonus_E = left_T[~inside_T], torch.zeros_like(bonus_E)
