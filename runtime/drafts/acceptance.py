"""What verification makes of a draft: how much of it stands, and the token that follows (rows C4 and C18).

B rows, n drafted tokens, V the vocabulary. Position i of the exact logits is what the model says of drafted token i,
and position n of the token behind them all. A row may begin with text that is known: it stands as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pick(scores_BV: Tensor, *, sample: bool) -> Tensor:
    """The next tokens [B] of a draft, by processed logits [B, V]: the likeliest, or drawn."""
    if not sample:
        return scores_BV.argmax(dim=-1)
    return torch.multinomial(scores_BV.softmax(dim=-1), num_samples=1).squeeze(1)


def accept_greedy(logits_BNV: Tensor, drafted_Bn: Tensor, start_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Drafted tokens stand up to the first that is not the model's likeliest.

    Args:
        logits_BNV: exact logits [B, n + 1, V], processed.
        drafted_Bn: ids [B, n].
        start_B: positions before it are known text, 0 to n; None: none are.

    Returns:
        ids [B, n + 1], of which each row's first `accepted + 1` count (behind them -1), and accepted [B]: the drafted
        tokens that stand, known ones among them.
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
    """Rejection sampling: what comes out follows the exact model's distribution p, whatever the draft's q is.

    A token drafted with q stands with probability min(1, p / q). In the place of the first that does not, one is drawn
    from max(p - q, 0), normalised; behind a draft that stands whole, one from p (Leviathan et al., arXiv 2211.17192;
    Chen et al., arXiv 2302.01318).

    Args:
        logits_BNV: exact logits [B, n + 1, V], processed: temperature applied, -inf for what may not be drawn.
        drafted_Bn: ids [B, n], each drawn from its q.
        draft_logits_BnV: the logits of q [B, n, V], processed; None: the draft could say nothing else.
        start_B: as for :func:`accept_greedy`.
        generator: of the logits' device.

    Returns:
        as :func:`accept_greedy`.
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
    # Nothing is left where p and q are equal but for rounding: then p itself.
    use_B = rejected_B & (left_BV.sum(dim=-1) > 0)
    next_B1 = torch.multinomial(torch.where(use_B[:, None], left_BV, p_BV), 1, generator=generator)
    return _joined(drafted_Bn, accepted_B, next_B1), accepted_B


def _probability(logits_BnV: Tensor, ids_Bn: Tensor) -> Tensor:
    """[B, n] of these ids, fp32."""
    logits_BnV = logits_BnV.float()
    return (logits_BnV.gather(2, ids_Bn[..., None])[..., 0] - logits_BnV.logsumexp(dim=-1)).exp()


def _standing(right_Bn: Tensor, start_B: Tensor | None) -> Tensor:
    """[B] positions before the first wrong one, none of them wrong before `start`."""
    if start_B is not None:
        right_Bn = right_Bn | (torch.arange(right_Bn.shape[1], device=right_Bn.device) < start_B[:, None])
    return right_Bn.long().cumprod(dim=1).sum(dim=1)


def _joined(drafted_Bn: Tensor, accepted_B: Tensor, next_B1: Tensor) -> Tensor:
    """[B, n + 1]: what stands, the next token, -1."""
    place_N = torch.arange(drafted_Bn.shape[1] + 1, device=drafted_Bn.device)
    ids_BN = torch.cat([drafted_Bn, next_B1], dim=1).masked_fill(place_N > accepted_B[:, None], -1)
    return ids_BN.scatter(1, accepted_B[:, None], next_B1)
