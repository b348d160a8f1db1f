"""Early attention by another way: a forward over the whole text in which one block's output is replaced."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertcast.data.batch import RouterCall
from expertcast.data.early import EarlyAttention
from expertcast.data.taps import RouterTaps
from expertcast.predictors.early_attention import StandIn
from expertcast.predictors.view import MoEView


def random_stand_in(view: MoEView, rank: int = 3) -> StandIn:
    """One whose every tensor matters."""
    stand_in, generator = StandIn(view.shape, rank), torch.Generator().manual_seed(5)
    for tensor in stand_in.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return stand_in


@torch.no_grad()
def oracle(model: PreTrainedModel, view: MoEView, stand_in: StandIn, ids_BS: Tensor, **kwargs: Any) -> list[Tensor]:
    """By source layer, the residual [B, D] of the newest tokens before the next router's norm, when the block of that
    layer puts out the stand-in there; `kwargs` go to the model."""
    found = []
    for layer in list(view)[:-1]:
        given: dict[str, Any] = {}
        following = view[layer.index + 1]

        def routed(_m: nn.Module, args: tuple[Tensor], output: tuple[Tensor, ...], given: Any = given) -> None:
            _, given["weights"], given["ids"] = output
            given["input"] = args[0].reshape(-1, view.shape.hidden)

        def replaced(_m: nn.Module, _a: Any, output: Any, given: Any = given, index: int = layer.index) -> Any:
            whole = output[0] if isinstance(output, tuple) else output
            standing_TD = stand_in.output(index, given["input"], given["ids"], given["weights"])
            new = whole.clone()
            new[:, -1] = standing_TD.view(whole.shape)[:, -1].to(whole.dtype)
            return (new, *output[1:]) if isinstance(output, tuple) else new

        def seen(_m: nn.Module, args: tuple[Tensor]) -> None:
            found.append(args[0].view(len(ids_BS), -1, view.shape.hidden)[:, -1].clone())

        handles = [
            layer.router.register_forward_hook(routed),
            layer.block.register_forward_hook(replaced),
            following.norm.register_forward_pre_hook(seen),
        ]
        model.base_model(input_ids=ids_BS, use_cache=False, **kwargs)
        for handle in handles:
            handle.remove()
    return found


class Follower:
    """Runs early attention at every layer of a model's forwards, and notes what came of it.

    Args:
        model, view, stand_in: of what, on what.
        whole: over whole texts.
    """

    def __init__(self, model: PreTrainedModel, view: MoEView, stand_in: StandIn, *, whole: bool = False) -> None:
        self.early, self._view, self._stand_in, self._whole = (
            EarlyAttention(model, view, whole=whole),
            view,
            stand_in,
            whole,
        )
        self._model = model
        self.found: list[Tensor | None] = []
        self._standing_TD = torch.empty(0)

    def _see(self, call: RouterCall) -> None:
        if self._whole and call.layer:
            self.found.append(self.early.attend_whole(call.layer, self._standing_TD))
        output_TD = self._stand_in.output(call.layer, call.router_input_TD, call.ids_TK, call.weights_TK)
        self._standing_TD = call.residual_TD.float() + output_TD
        if not self._whole and call.layer + 1 < len(self._view):
            self.found.append(self.early.attend(call.layer + 1, self._standing_TD))

    @torch.no_grad()
    def run(self, **kwargs: Any) -> list[Tensor | None]:
        """One forward; by source layer what early attention gave."""
        self.found = []
        self.early.attach()
        with (
            closing(self.early),
            closing(RouterTaps(self._model, self._view, self._see, lambda _fresh: self.early.follow(True))),
        ):
            self._model.base_model(**kwargs)
        return self.found
