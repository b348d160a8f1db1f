"""Whether the routing rule that is read from a model's routers is theirs: asked once per layer, of its first inputs.

T tokens, D hidden size.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import MoELayer, MoEView


class RuleCheck:
    """Remembers which layers' routers route otherwise than :meth:`MoELayer.route` says of their own logits.

    A router may go by more than the logits that it returns: nothing that is forecast for its layer would be right.
    """

    def __init__(self, view: MoEView) -> None:
        self._view = view
        self.unseen = set(range(len(view)))
        """Layers of which no input was seen; nothing is left to do when it is empty."""
        self.wrong: set[int] = set()
        self._warned = False

    def see(self, layer: int, router_input_TD: Tensor) -> None:
        """Ask a layer that was not asked yet; warn of the first one that is found wrong.

        Args:
            layer: MoE layer index.
            router_input_TD: what its router reads.
        """
        self.unseen.discard(layer)
        if layer not in self.wrong and not follows_rule(self._view[layer], router_input_TD):
            self.wrong.add(layer)
        if self.wrong and not self._warned:
            self._warned = True
            warnings.warn(self._line() + ": no forecast is made for such layers", stacklevel=2)

    @torch.no_grad()
    def try_out(self) -> None:
        """The same of made inputs, before there are any: a router that ends in an error on its own logits shall not do
        so in a forecast. The layers stay unseen."""
        generator = torch.Generator().manual_seed(0)  # its own: sampled generation must not change
        for layer in self._view:
            weight = next(layer.router.parameters())
            residual_TD = torch.randn(2, layer.hidden_size, generator=generator).to(weight.device)
            self.see(layer.index, layer.router_input(residual_TD))
        self.unseen.update(range(len(self._view)))

    def require(self, layer: int, router_input_TD: Tensor) -> None:
        """The same where nothing can be done without the rule.

        Raises:
            ExpertcastError: the layer's router routes otherwise.
        """
        self.unseen.discard(layer)
        if not follows_rule(self._view[layer], router_input_TD):
            self.wrong.add(layer)
            raise ExpertcastError(
                self._line() + ": what traces keep does not say how it routes; expertcast.offload without a predictor "
                "runs such a model"
            )

    def _line(self) -> str:
        layer = min(self.wrong)
        return (
            f"router {type(self._view[layer].router).__name__} of MoE layer {layer} does not give the experts and "
            "weights that its own logits say: it goes by more than these"
        )


@torch.no_grad()
def follows_rule(layer: MoELayer, router_input_TD: Tensor) -> bool:
    """Whether a router's own logits, sent through the rule, give the router's own ids and weights, bit for bit."""
    logits_TE, weights_TK, ids_TK = layer.routed(router_input_TD, hooks=False)
    if not logits_TE.isfinite().all():  # NaN is like nothing, itself included: others refuse it
        return True
    try:
        routed_TK, given_TK = layer.route(logits_TE)
    except Exception:  # whatever a router does that is not given what it goes by
        return False
    return given_TK.dtype == weights_TK.dtype and torch.equal(routed_TK, ids_TK) and torch.equal(given_TK, weights_TK)
