"""Verification of drafted tokens: the accepted ones and the next token.

B rows, n drafted tokens, N = n + 1, V vocabulary size. Position i of the exact logits belongs to drafted token i, and
position n to the token after all drafted ones. The first tokens of a row may be settled already; they are always
accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pick(scores_BV: Tensor, *, sample: bool) -> Tensor:
    """Return the next token of each row [B] from processed logits [B, V]: sampled, or the likeliest."""
    if not sample:
        return scores_BV.argmax(dim=-1)
    return torch.multinomial(scores_BV.softmax(dim=-1), num_samples=1).squeeze(1)


def accept_greedy(logits_BNV: Tensor, drafted_Bn: Tensor, start_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens up to the first that differs from the model's likeliest token.

    Args:
        logits_BNV: processed exact logits [B, n + 1, V].
        drafted_Bn: drafted ids [B, n].
        start_B: number of leading tokens that are settled, 0 to n; None: 0.

    Returns:
        ids [B, n + 1]: in each row the accepted tokens, the next token, then -1; and the number of accepted tokens [B],
        including settled ones.

    Example:
        >>> import torch
        >>> from expertcast.runtime.drafts.acceptance import accept_greedy
        >>> logits_BNV = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]])  # the likeliest tokens are 1, 0, 1
        >>> accept_greedy(logits_BNV, torch.tensor([[1, 1]]))
        (tensor([[ 1,  0, -1]]), tensor([1]))
    """
    likeliest_BN = logits_BNV.argmax(dim=-1)
    accepted_B = _standing(drafted_Bn == likeliest_BN[:, :-1], start_B)
    return _joined(drafted_Bn, accepted_B, likeliest_BN.gather(1, accepted_B[:, None])), accepted_B


def accept_sampled(
    logits_BNV: Tensor,
    drafted_Bn: Tensor,
    draft_logits_BnV: Tensor | None,
    start_B: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens by rejection sampling, so that the result follows the exact distribution p.

    A token drafted from q is accepted with probability min(1, p / q). The first rejected one is replaced by a sample of
    the normalised max(p - q, 0). If all are accepted, the next token is a sample of p.

    Source: Leviathan et al. (2023, arXiv 2211.17192); Chen et al. (2023, arXiv 2302.01318).

    Args:
        logits_BNV: processed exact logits [B, n + 1, V]: temperature applied, -inf for excluded tokens.
        drafted_Bn: drafted ids [B, n], sampled from q.
        draft_logits_BnV: processed logits of q [B, n, V]; None: q has probability 1 for the drafted tokens.
        start_B: number of leading tokens that are settled, 0 to n; None: 0.
        generator: random generator on the device of the logits.

    Returns:
        The same as :func:`accept_greedy`.
    """
    rows, drafted = drafted_Bn.shape
    device = logits_BNV.device
    chance_Bn = torch.rand(rows, drafted, device=device, generator=generator)
    if draft_logits_BnV is not None:
        chance_Bn = chance_Bn * _probability(draft_logits_BnV, drafted_Bn)
    accepted_B = _standing(chance_Bn < _probability(logits_BNV[:, :-1], drafted_Bn), start_B)
    row_B = torch.arange(rows, device=device)
    p_BV = logits_BNV[row_B, accepted_B].float().softmax(dim=-1)
    left_BV = p_BV.clone()
    rejected_B = accepted_B < drafted
    if drafted:
        at_B = accepted_B.clamp(max=drafted - 1)
        if draft_logits_BnV is None:
            left_BV.scatter_(1, drafted_Bn[row_B, at_B][:, None], 0.0)
        else:
            left_BV = (left_BV - draft_logits_BnV[row_B, at_B].float().softmax(dim=-1)).clamp(min=0.0)
    # the difference is 0 where p and q are equal up to rounding: sample from p there
    use_B = rejected_B & (left_BV.sum(dim=-1) > 0)
    next_B1 = torch.multinomial(torch.where(use_B[:, None], left_BV, p_BV), 1, generator=generator)
    return _joined(drafted_Bn, accepted_B, next_B1), accepted_B


def _probability(logits_BnV: Tensor, ids_Bn: Tensor) -> Tensor:
    """Return the probability of each id [B, n], float32."""
    logits_BnV = logits_BnV.float()
    return (logits_BnV.gather(2, ids_Bn[..., None])[..., 0] - logits_BnV.logsumexp(dim=-1)).exp()


def _standing(right_Bn: Tensor, start_B: Tensor | None) -> Tensor:
    """Return the number of positions before the first wrong one [B]; positions before `start_B` count as right."""
    if start_B is not None:
        right_Bn = right_Bn | (torch.arange(right_Bn.shape[1], device=right_Bn.device) < start_B[:, None])
    return right_Bn.long().cumprod(dim=1).sum(dim=1)


def _joined(drafted_Bn: Tensor, accepted_B: Tensor, next_B1: Tensor) -> Tensor:
    """Return accepted tokens, the next token, then -1 [B, n + 1]."""
    place_N = torch.arange(drafted_Bn.shape[1] + 1, device=drafted_Bn.device)
    ids_BN = torch.cat([drafted_Bn, next_B1], dim=1).masked_fill(place_N > accepted_B[:, None], -1)
    return ids_BN.scatter(1, accepted_B[:, None], next_B1)
