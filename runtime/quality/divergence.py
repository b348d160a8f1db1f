"""How far a run of a model is from the exact one on the same tokens: perplexity, agreement, KL, executed experts.

B windows, W tokens per window, T = B x W tokens, V vocabulary, L MoE layers, E routed experts per layer, K per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional


@dataclass(slots=True)
class Pass:
    """One forward over [B, W]."""

    log_probs_BWV: Tensor
    executed: list[Tensor]
    """Per layer the executed ids [T, K]."""
    logits: list[Tensor]
    """Per layer the router's logits [T, E]; of the exact pass only."""


class Sums:
    """Sums over tokens of one run on one domain."""

    def __init__(self, layers: int) -> None:
        self.tokens = 0
        self.nll = 0.0
        self.agreement = 0.0
        self.kl = 0.0
        self.routed_tokens = 0
        self.recall = [0.0] * layers

    def add(self, run: Pass, exact: Pass, ids_BW: Tensor) -> None:
        scored, reference = run.log_probs_BWV[:, :-1], exact.log_probs_BWV[:, :-1]
        self.tokens += ids_BW[:, 1:].numel()
        self.nll += float(functional.nll_loss(scored.flatten(0, 1), ids_BW[:, 1:].flatten(), reduction="sum"))
        self.agreement += float((scored.argmax(-1) == reference.argmax(-1)).sum())
        if run is not exact:
            self.kl += float(functional.kl_div(scored, reference, reduction="sum", log_target=True))
        self.routed_tokens += ids_BW.numel()
        for layer, (ids_TK, true_TK) in enumerate(zip(run.executed, exact.executed, strict=True)):
            found_TK = (true_TK.unsqueeze(-1) == ids_TK.unsqueeze(-2)).any(-1)
            self.recall[layer] += float(found_TK.float().mean(-1).sum())

    def as_dict(self) -> dict[str, float]:
        return {
            "perplexity": math.exp(self.nll / self.tokens),
            "top1_agreement": self.agreement / self.tokens,
            "kl": max(0.0, self.kl / self.tokens),
        }

    def __iadd__(self, other: Sums) -> Sums:
        self.tokens += other.tokens
        self.nll += other.nll
        self.agreement += other.agreement
        self.kl += other.kl
        self.routed_tokens += other.routed_tokens
        self.recall = [own + more for own, more in zip(self.recall, other.recall, strict=True)]
        return self


def report(parts: dict[str, Sums]) -> dict[str, Any]:
    total = Sums(len(next(iter(parts.values())).recall))
    for part in parts.values():
        total += part
    recall = [value / total.routed_tokens for value in total.recall[1:]]
    return {
        **total.as_dict(),
        "executed_recall": {"mean": sum(recall) / len(recall) if recall else 1.0, "per_layer": recall},
        "domains": {domain: part.as_dict() for domain, part in parts.items()},
    }
