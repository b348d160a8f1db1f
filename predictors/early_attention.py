"""Early attention: the target's router on what the next block's attention makes of a stand-in for its input.

While the experts of layer l wait or run, block l+1 runs its attention on r_l + (a stand-in for the layer's output): its
cache holds the true keys and values of the past, only the newest position is approximate. Then the target's norm and
router. Nothing is trained but the stand-in: default vectors, or maps of low rank by least squares.

T tokens, D hidden size, L MoE layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from expertcast.predictors.base import Predictor, PredictorConfig, RouterState
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.fields import check_between
from expertcast.predictors.stand_in import MOST_RANK, HeldStandIn, StandIn
from expertcast.predictors.through_router import ThroughRouter
from expertcast.predictors.view import ModelShape


@dataclass(kw_only=True)
class EarlyConfig(PredictorConfig):
    """What early attention runs on."""

    stand_in_rank: int | None = None
    """Rank of the stand-in for each expert; traces say it (none: not known yet)."""

    def __post_init__(self) -> None:
        PredictorConfig.__post_init__(self)
        if self.stand_in_rank is not None:
            check_between(self, 0, MOST_RANK, "stand_in_rank")


class LooksEarly(Predictor):
    """Part of predictors that may read early attention: holds the stand-in that it runs on."""

    held: HeldStandIn | None
    """None: it reads no early attention."""

    def set_stand_in(self, stand_in: StandIn) -> None:
        """Take the stand-in of the traces, whose rank the config has."""
        assert self.held is not None
        self.held.take(stand_in)

    def stand_in(self, state: RouterState) -> Tensor:
        """r_l + the stand-in's output [T, D], fp32."""
        assert self.held is not None
        output_TD = self.held.output(state.layer, state.router_input_TD, state.topk_ids_TK, state.topk_weights_TK)
        return state.residual_TD.float() + output_TD

    def early_input(self, state: RouterState, ahead: int) -> Tensor:
        """LN_{l+ahead} of the early residual [T, D].

        Raises:
            ExpertcastError: nobody ran early attention.
        """
        if state.early_TD is None:
            raise ExpertcastError(
                f"{self.name} reads early attention, which these traces do not hold: collect them again, without "
                "--early-rank none, or choose other inputs"
            )
        return self.view[state.layer + ahead].router_input(state.early_TD)


class EarlyAttention(LooksEarly, ThroughRouter):
    """LN_{l+n} of the early residual of layer l+1 through router l+n."""

    name: ClassVar[str] = "early_attention"
    config_class: ClassVar[type[PredictorConfig]] = EarlyConfig
    config: EarlyConfig
    uses_early = True

    def __init__(self, config: PredictorConfig, shape: ModelShape) -> None:
        assert isinstance(config, EarlyConfig)
        super().__init__(config, shape)
        self.held = HeldStandIn(shape, config.stand_in_rank or 0)

    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        """LN_{l+ahead} of the early residual [T, D]."""
        return self.early_input(state, ahead)
