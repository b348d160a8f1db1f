"""How far a run of a model is from the exact one on the same tokens: perplexity, agreement, KL, executed experts.

B windows, W tokens per window, T = B x W tokens, V vocabulary, L MoE layers, E routed experts per layer, K per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

from torch import Tensor

from expertcast.predictors.plain import Json
from expertcast.training.metrics.language import language_metrics
from expertcast.training.metrics.means import Recall


@dataclass(slots=True)
class Pass:
    """One forward over [B, W]."""

    log_probs_BWV: Tensor
    executed: list[Tensor]
    """Per layer the executed ids [T, K]."""
    logits: list[Tensor]
    """Per layer the router's logits [T, E]; of the exact pass only."""


class RunScores:
    """The metrics of one run on one domain."""

    def __init__(self, layers: int) -> None:
        # every process measures all windows
        self.language = language_metrics(sync_on_compute=False)
        self.executed = Recall(layers, sync_on_compute=False)

    def add(self, run: Pass, exact: Pass, ids_BW: Tensor) -> None:
        """Score a run of these windows against the exact model's (which may be scored itself): the distributions
        after each token but the last of a window.
        """
        reference_TV = exact.log_probs_BWV[:, :-1].flatten(0, 1)
        scored_TV = reference_TV if run is exact else run.log_probs_BWV[:, :-1].flatten(0, 1)
        self.language.to(reference_TV.device).update(
            log_probs_TV=scored_TV, reference_TV=reference_TV, token_T=ids_BW[:, 1:].flatten()
        )
        self.executed.to(reference_TV.device)
        for layer, (ids_TK, true_TK) in enumerate(zip(run.executed, exact.executed, strict=True)):
            self.executed.update(layer, ids_TK.to(reference_TV.device), true_TK.to(reference_TV.device))

    def as_dict(self) -> dict[str, float]:
        """`perplexity`, `top1_agreement` and `kl`."""
        return {name: float(value) for name, value in self.language.compute().items()}


def report(parts: Mapping[str, RunScores]) -> Json:
    """The scores of a run, given by domain: on all together, and on each."""
    first, *others = parts.values()
    total = deepcopy(first)
    for part in others:
        for name, metric in total.language.items():
            metric.merge_state(part.language[name])
        total.executed.merge_state(part.executed)
    recall: list[float] = total.executed.per_row()[1:].tolist()
    return {
        **total.as_dict(),
        "executed_recall": {"mean": sum(recall) / len(recall) if recall else 1.0, "per_layer": recall},
        "domains": {domain: part.as_dict() for domain, part in parts.items()},
    }
