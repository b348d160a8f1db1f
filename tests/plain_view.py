"""The view of a model that is nothing but routers and norms: for parts that stand on a view alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from expertcast.predictors.view import ModelShape, MoELayer, MoEView


class LinearRouter(nn.Module):
    """A linear map, softmax, the K largest, renormalised: returns what a router of a `transformers` model does."""

    def __init__(self, weight_ED: Tensor, top_k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_ED, requires_grad=False)
        self.top_k = top_k

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = functional.linear(hidden_TD.to(self.weight.dtype), self.weight)
        weights_TK, ids_TK = logits_TE.float().softmax(dim=-1).topk(self.top_k, dim=-1)
        tiny = torch.finfo(torch.float32).tiny
        return logits_TE, weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + tiny), ids_TK


def plain_view(shape: ModelShape, routers: Sequence[nn.Module], norms: Sequence[nn.Module], model_id: str) -> MoEView:
    """A layer of each router and the norm before it; without experts."""
    layers = [
        MoELayer(
            index=index,
            norm_name=f"layers.{index}.norm",
            router_name=f"layers.{index}.router",
            experts_name=f"layers.{index}.experts",
            decoder=nn.Module(),
            block=nn.Module(),
            norm=norm,
            router=router,
            experts=nn.Module(),
            num_experts=shape.experts,
            top_k=shape.top_k,
            hidden_size=shape.hidden,
            has_shared=False,
        )
        for index, (router, norm) in enumerate(zip(routers, norms, strict=True))
    ]
    return MoEView(tuple(layers), model_id=model_id)
