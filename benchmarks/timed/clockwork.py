"""Lets time pass where an offloaded model launches work: the engine's own events say when.

E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn
from transformers import PreTrainedModel

from benchmarks.timed.costs import StepCosts
from benchmarks.timed.device import TimedDevice
from expertcast.predictors.view import MoEView
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.recording.recorder import Observer, State

_PIECES = 5
"""Kernels of a layer's part are launched one after another: the first runs while the last is launched."""


class Clockwork(Observer):
    """Hooks on a model's layers, and the observer of its offload.

    Args:
        device: whose time passes.
        costs: how much, in a decode step.
    """

    def __init__(self, device: TimedDevice, costs: StepCosts) -> None:
        self.device, self.costs = device, costs
        self._stack = ExitStack()
        self._state: State = "compute"
        self._policies = 0
        """Times that the running layer entered `policy`."""
        self._forecasting = range(0)
        self._offloaded: OffloadedModel | None = None

    def follow(self, model: PreTrainedModel, view: MoEView) -> None:
        """Hook the model; before it is offloaded, so that the clock has moved when the engine's hooks run."""
        self._stack.callback(model.base_model.register_forward_pre_hook(self._before_model).remove)
        for layer in view:
            self._stack.callback(layer.norm.register_forward_pre_hook(self._attended).remove)

    def offloaded(self, offloaded: OffloadedModel, ahead: int) -> None:
        """What the model became: whose slots kernels read, and which layers forecast."""
        self._offloaded = offloaded
        layers = len(offloaded.view)
        self._forecasting = range(layers - ahead if offloaded.predictor is not None else 0)

    def close(self) -> None:
        """Take the hooks away."""
        self._stack.close()

    def work(self, host_s: float, device_s: float, reads: tuple[int, ...] = (), name: str = "kernel") -> None:
        """The host launches kernels, piece by piece."""
        for _ in range(_PIECES):
            self.device.spend(host_s / _PIECES)
            self.device.launch(device_s / _PIECES, reads=reads, name=name)

    def enter(self, state: State, layer: int) -> None:
        before, self._state = self._state, state
        if state == "policy":
            self._policies += 1
            if self._policies in (1, 3):  # the router's hook begins; the experts' function begins
                self.device.spend(self.costs.policy_host_s / 2)
        elif state == "forecast" and layer in self._forecasting:
            self.work(self.costs.forecast_host_s, self.costs.forecast_device_s, name="forecast")
        elif state == "compute" and before == "wait":
            self.work(self.costs.experts_host_s, self.costs.experts_device_s, self._read(), name="experts")

    def _before_model(self, *_args: object) -> None:
        self.device.spend(self.costs.token_before_host_s)

    def _attended(self, _norm: nn.Module, _args: object) -> None:
        """Attention comes before the norm of the MoE block; forecasts call norms too, while the engine has the word."""
        if self._state != "compute":
            return
        self._policies = 0
        self.work(self.costs.attention_host_s, self.costs.attention_device_s, name="attention")

    def _read(self) -> tuple[int, ...]:
        """Addresses of the slots that the running layer reads."""
        assert self._offloaded is not None
        if self._offloaded.link.decides_on_device:
            return ()
        residency, pool = self._offloaded.residency, self._offloaded.pool
        here = residency.running.difference(residency.copies)
        return tuple(pool.block(pool.slots[key]).data_ptr() for key in sorted(here))
