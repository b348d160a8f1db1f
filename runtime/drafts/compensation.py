"""Rounding weights one input after another, each one's error made good by the inputs behind it: GPTQ (row C1).

For one output's weights w and inputs X the squared error of X w is (w - q)' H (w - q), H = X' X. Once weight i is
rounded to q_i, the best that those behind it can do is to move by -(w_i - q_i) / [F^-1]_ii * [F^-1]_:i, F being H over
the inputs that are not rounded yet. Up to a factor, all those columns of inverses are rows of one Cholesky factor of
H^-1. Inputs are taken in their order; a group's scale is set when its first input comes.

C experts, N outputs, I inputs, G inputs in a group, J = I // G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from expertcast.runtime.drafts.rounding import codes_of, expanded, rounded, scales_of

DAMPING = 0.01
"""Share of the mean of H's diagonal that is added to it: few inputs, or alike, do not make weights run away."""


def compensated(weights_CNI: Tensor, hessians_CII: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Codes, int8 [C, N, I], and scales, float32 [C, N, J]; no output's error is larger than with nearest rounding.

    Args:
        weights_CNI: of any float dtype.
        hessians_CII: X' X of each expert's inputs, float32.
        bits, group: as for :func:`expertcast.runtime.drafts.rounding.rounded`.
    """
    weights_CNI = weights_CNI.float()
    codes, scales = _one_after_another(weights_CNI, inverse_factor(hessians_CII), bits, group)
    plain_codes, plain_scales = rounded(weights_CNI, bits, group)
    better_CN1 = (
        squared_error(weights_CNI, expanded(codes, scales), hessians_CII)
        < squared_error(weights_CNI, expanded(plain_codes, plain_scales), hessians_CII)
    ).unsqueeze(-1)
    return torch.where(better_CN1, codes, plain_codes), torch.where(better_CN1, scales, plain_scales)


def squared_error(weights_CNI: Tensor, found_CNI: Tensor, hessians_CII: Tensor) -> Tensor:
    """[C, N]: of each output, summed over the inputs that H was made of."""
    error_CNI = weights_CNI - found_CNI
    return ((error_CNI @ hessians_CII) * error_CNI).sum(dim=-1)


def inverse_factor(hessians_CII: Tensor) -> Tensor:
    """Upper U [C, I, I], float32, with U' U the inverse of the damped H; H without any input counts as the identity."""
    damped = hessians_CII.double()
    mean_C11 = damped.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[:, None, None]
    added_C11 = torch.where(mean_C11 == 0, torch.ones_like(mean_C11), DAMPING * mean_C11)
    damped = damped + added_C11 * torch.eye(damped.shape[-1], dtype=damped.dtype, device=damped.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True).float()
    return factor


def _one_after_another(weights_CNI: Tensor, factor_CII: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    left_CNI = weights_CNI.clone()
    codes_CNI = torch.empty_like(left_CNI, dtype=torch.int8)
    scales = []
    for start in range(0, left_CNI.shape[-1], group):
        end = start + group
        block_CNG, own_CGG = left_CNI[..., start:end], factor_CII[:, start:end, start:end]
        scale_CN = scales_of(block_CNG, bits)
        errors_CNG = torch.empty_like(block_CNG)
        for place in range(group):
            weight_CN = block_CNG[..., place]
            code_CN = codes_of(weight_CN, scale_CN, bits)
            error_CN = (weight_CN - scale_CN * code_CN) / own_CGG[:, None, place, place]
            block_CNG[..., place + 1 :] -= error_CN.unsqueeze(-1) * own_CGG[:, None, place, place + 1 :]
            errors_CNG[..., place] = error_CN
            codes_CNI[..., start + place] = code_CN
        left_CNI[..., end:] -= errors_CNG @ factor_CII[:, start:end, end:]
        scales.append(scale_CN)
    return codes_CNI, torch.stack(scales, dim=-1)
