"""How often a draft's routers choose what the model's do, for the same tokens (rows C1, C2).

The draft runs the same tokens from the beginning: its layers get what its own experts made of them.

T tokens, L MoE layers, K experts per token, S windows of W tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from expertcast.data.batch import RouterCall
from expertcast.data.moe_layers import experts_implementation
from expertcast.data.taps import RouterTaps
from expertcast.predictors import ExpertcastError, MoEView
from expertcast.predictors.view import MoELayer
from expertcast.runtime.drafts.quantised import QuantisedExperts, Views
from expertcast.runtime.storage.layout import expert_parameters

_DRAFT = "expertcast_draft"
"""Name of the experts function in transformers' registry with which a resident model runs as its own draft."""
_RUNNING: WeakKeyDictionary[nn.Module, tuple[QuantisedExperts, MoELayer]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactSets:
    """Shares of token-layer pairs, each a list by layer [L]."""

    hard: list[float]
    """The same experts in the same order."""
    soft: list[float]
    """The same experts in another order."""
    recall: list[float]
    """Of the model's experts, those that the draft chose too."""

    @property
    def exact(self) -> list[float]:
        """The same experts: hard and soft together."""
        return [hard + soft for hard, soft in zip(self.hard, self.soft, strict=True)]

    def as_dict(self) -> dict[str, float]:
        """Means over the layers: `hard`, `soft`, `exact`, `mismatch` and `recall`."""
        mean = {
            name: sum(values) / len(values)
            for name, values in (
                ("hard", self.hard),
                ("soft", self.soft),
                ("exact", self.exact),
                ("recall", self.recall),
            )
        }
        return {**mean, "mismatch": 1 - mean["exact"]}


def exact_sets(draft_TLK: Tensor, exact_TLK: Tensor) -> ExactSets:
    """Compare the experts that a draft and the model chose, ids in the order in which their routers gave them.

    Raises:
        ExpertcastError: no token, or not the same number of tokens, layers or experts.
    """
    if draft_TLK.shape != exact_TLK.shape or not len(exact_TLK):
        shapes = f"{tuple(draft_TLK.shape)} and {tuple(exact_TLK.shape)}"
        raise ExpertcastError(f"ids of shape {shapes} cannot be compared: run draft and model over the same tokens")
    hard_TL = (draft_TLK == exact_TLK).all(dim=-1)
    same_TLKK = draft_TLK.unsqueeze(-2) == exact_TLK.unsqueeze(-1)
    found_TLK = same_TLKK.any(dim=-1)
    soft_TL = found_TLK.all(dim=-1) & ~hard_TL
    shares = (hard_TL.float(), soft_TL.float(), found_TLK.float().mean(dim=-1))
    hard, soft, recall = (share_TL.mean(dim=0).tolist() for share_TL in shares)
    return ExactSets(hard=hard, soft=soft, recall=recall)


def resident_views(view: MoEView) -> Views:
    """The parameters of a model that holds its experts itself."""
    return lambda layer: {
        name: value.detach() for name, value in expert_parameters(view[layer].experts, view[layer].num_experts).items()
    }


@torch.no_grad()
def compare_draft(
    model: PreTrainedModel, view: MoEView, quantised: QuantisedExperts, ids_SW: Tensor, batch: int = 8
) -> tuple[ExactSets, float]:
    """Run windows of token ids through the model and through its draft.

    Args:
        model: its experts in memory; it stays as it is.
        view: its MoE layers.
        quantised: the draft's experts.
        ids_SW: the windows.
        batch: windows per forward.

    Returns:
        The comparison of their routing, and the share of tokens for which both find the same next token likeliest.
    """
    exact_TLK, exact_T = _choices(model, view, ids_SW, batch)
    with drafting(model, view, quantised):
        draft_TLK, draft_T = _choices(model, view, ids_SW, batch)
    return exact_sets(draft_TLK, exact_TLK), float((draft_T == exact_T).float().mean())


@contextmanager
def drafting(model: PreTrainedModel, view: MoEView, quantised: QuantisedExperts) -> Iterator[None]:
    """A resident model computes with quantised experts meanwhile."""
    _RUNNING.update({layer.experts: (quantised, layer) for layer in view})
    try:
        with experts_implementation(model, _DRAFT):
            yield
    finally:
        for layer in view:
            del _RUNNING[layer.experts]


def _choices(model: PreTrainedModel, view: MoEView, ids_SW: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """[T, L, K] experts that were chosen, and [T] the likeliest next tokens."""
    chosen: list[list[Tensor]] = [[] for _ in view]
    likeliest = []

    def keep(call: RouterCall) -> None:
        chosen[call.layer].append(call.ids_TK)

    with closing(RouterTaps(model, view, keep)):
        for windows in torch.split(ids_SW, batch):
            logits = model(input_ids=windows.to(model.device), use_cache=False).logits
            likeliest.append(logits.argmax(dim=-1).flatten())
    return torch.stack([torch.cat(parts) for parts in chosen], dim=1), torch.cat(likeliest)


def _drafted(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    quantised, layer = _RUNNING[experts]
    with torch.no_grad():
        return quantised.run(layer, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(_DRAFT, _drafted)
