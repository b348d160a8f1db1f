"""Recall of each expert for itself, as a torchmetrics metric over (token, expert) pairs.

T tokens, K experts per token, E routed experts per layer, L target layers.
States are plain counts, so that two ranks (or two halves of the data) add up to exactly the whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from expertcast.training.comparison import RoutingComparison


class ExpertRecall(Metric):  # type: ignore[misc]
    """How often the router used each expert, and how often it was then among the K forecast ones.

    An expert's recall is found / used; summed over a layer's experts first, the same quotient is the layer's recall@k.
    """

    full_state_update = False
    used_LE: Tensor
    found_LE: Tensor

    def __init__(self, layers: int, experts: int, **kwargs: Any) -> None:
        """
        Args:
            layers: target layers.
            experts: E.
            kwargs: torchmetrics' own.
        """
        super().__init__(**kwargs)
        for name in ("used_LE", "found_LE"):
            self.add_state(name, default=torch.zeros(layers, experts, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, layer: int, comparison: RoutingComparison) -> None:
        """Add the tokens of one batch at one target layer (0 = the first target layer)."""
        ids_TK, experts = comparison.truth.ids_TK, self.used_LE.shape[1]
        found_TK = comparison.place_TK < comparison.place_TK.shape[1]
        self.used_LE[layer] += torch.bincount(ids_TK.flatten(), minlength=experts)
        self.found_LE[layer] += torch.bincount(ids_TK[found_TK], minlength=experts)

    def compute(self) -> dict[str, Tensor]:
        """`used` and `found` [L, E]: tokens that needed the expert, and those of them whose forecast named it."""
        return {"used": self.used_LE, "found": self.found_LE}
