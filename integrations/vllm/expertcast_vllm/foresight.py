"""What forecasts are made with under vLLM.

T tokens, L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig

from expertcast.data.batch import RouterCall
from expertcast.predictors import Predictor
from expertcast.predictors.base import Forecast
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoELayer, MoEView
from expertcast.runtime.engine.drift import DriftMonitor
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.offloading import make_monitor, resolve_predictor
from expertcast_vllm.config_check import captures_whole_steps
from expertcast_vllm.previous import PreviousTokens
from expertcast_vllm.watching import Watching

if TYPE_CHECKING:
    from expertcast_vllm.offload import WorkerOffload


@dataclass(frozen=True, slots=True, kw_only=True)
class Foresight:
    """What an engine forecasts with."""

    speculator: Speculator
    drift: DriftMonitor | None
    """Follows the forecasts' recall; None where the device alone knows it."""

    @classmethod
    def make(cls, offload: WorkerOffload, watching: Watching | None) -> Self:
        """For a model that is loaded; `watching` is None where nothing is to be forecast.

        Raises:
            ExpertcastError: a predictor that does not exist, of another model, or one that reads what vLLM does not
                show.
        """
        config = offload.settings.offload
        if watching is None:
            return cls(speculator=Speculator(_view(offload), None), drift=None)
        view = watching.view
        predictor, checkpoint = resolve_predictor(config.resolved_predictor(), view)
        if predictor is None:
            return cls(speculator=Speculator(view, None), drift=None)
        _check(predictor, watching, config=offload.config)
        predictor.to(next(view[0].router.parameters()).device)
        speculator = WatchedSpeculator(watching, predictor, ahead=config.ahead, reach=config.reach)
        assert offload.parts is not None
        on_host = not offload.parts.link.decides_on_device
        return cls(speculator=speculator, drift=make_monitor(config, view, predictor, checkpoint) if on_host else None)


class WatchedSpeculator(Speculator):
    """Forecasts from what the watched model shows of its layers; the exact routing is what runs."""

    def __init__(self, watching: Watching, predictor: Predictor, *, ahead: int, reach: int | None) -> None:
        with torch.inference_mode(False):
            super().__init__(watching.view, predictor, ahead=ahead, reach=reach)
        self._watching = watching
        self._memory = None  # rows of one step are other requests in the next
        shape = watching.view.shape
        self._previous_tokens = PreviousTokens(shape) if predictor.uses_previous_token else None

    def start(self, fresh: bool) -> None:
        super().start(fresh)
        if self._previous_tokens is not None and self._watching.running is not None:
            self._previous_tokens.start(self._watching.running)

    def forecast(self, call: RouterCall, executed: tuple[Tensor, Tensor] | None, **options: object) -> Forecast | None:
        seen = self._watching.seen(call)
        if self._previous_tokens is not None:
            self._previous_tokens.see(seen)
        return super().forecast(seen, executed, **options)  # type: ignore[arg-type]

    def _previous(self, call: RouterCall) -> Tensor | None:
        return None if self._previous_tokens is None or call.tokens > 1 else self._previous_tokens.of(call)


def _check(predictor: Predictor, watching: Watching, config: VllmConfig) -> None:
    """
    Raises:
        ExpertcastError: the predictor reads what is not there.
    """
    if predictor.looks == "tokens":
        raise ExpertcastError(
            f"{predictor.name} looks tokens ahead, which nothing under vLLM uses: give another predictor"
        )
    if predictor.uses_early:
        raise ExpertcastError(
            f"{predictor.name} reads early attention, which vLLM cannot run: train it with --set "
            "inputs=quasi_hidden/router_input/routing/previous, or give linear"
        )
    if predictor.uses_previous_token and captures_whole_steps(config):
        raise ExpertcastError(
            f"{predictor.name} keeps the last token's routing on the host, which whole CUDA graphs leave out: give "
            'another predictor, or start vLLM with --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\''
        )
    if predictor.reads_residual and not watching.sees_residuals:
        raise ExpertcastError(
            f"{predictor.name} reads the residual stream, which compiled layers do not show: start vLLM with "
            "--enforce-eager, or give router_input, or linear trained with --set reads=router_input"
        )


def _view(offload: WorkerOffload) -> MoEView:
    shape = offload.shape
    layers = [
        MoELayer(
            index=index, block_name=layer.layer_name, norm_name="", router_name="", experts_name=layer.layer_name,
            decoder=nn.Module(), block=nn.Module(), norm=nn.Identity(), router=nn.Module(), experts=layer,
            num_experts=shape.experts, top_k=shape.top_k, hidden_size=shape.hidden, has_shared=False,
        )
        for index, layer in enumerate(offload.layers)
    ]  # fmt: skip
    return MoEView(tuple(layers), model_id=offload.config.model_config.model)
