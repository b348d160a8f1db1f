"""What is kept of the last token for the next one's forecasts.

B sequences, L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

from torch import Tensor

from expertcast.data.router_call import RouterCall


class TokenMemory:
    """Router logits of the last token of each sequence, all layers.

    Beam search reorders sequences between steps; a row may then hold another beam's logits.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._now_BLE: Tensor | None = None
        self.previous_BLE: Tensor | None = None

    def start(self, fresh: bool) -> None:
        self.previous_BLE = None if fresh else self._now_BLE
        self._now_BLE = None

    def see(self, call: RouterCall, logits_TE: Tensor) -> None:
        """A layer was routed by these logits [T, E]."""
        last_BE = logits_TE.detach().reshape(call.sequences, call.tokens, -1)[:, -1]
        if self._now_BLE is None:
            self._now_BLE = last_BE.new_full((call.sequences, self._layers, last_BE.shape[-1]), float("nan"))
            if self.previous_BLE is not None and self.previous_BLE.shape != self._now_BLE.shape:
                self.previous_BLE = None
        self._now_BLE[:, call.layer] = last_BE
