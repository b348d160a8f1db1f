"""The routing of the next tokens at all layers, from the routing of the text so far.

B sequences, T tokens, L MoE layers, E routed experts, N = L * E, K experts per token, D hidden size, A averages,
R triggers, S tokens forecast one by one, H = S + 2 rows of a forecast: the token under way (h = 0), the S tokens after
it, and each token after those.

Source: that the sequence of whole-stack routing states tells the next ones, and that eviction should go by them, is
SeqMoE's (2609.12978), which reads the routing alone with a Mamba2. Moving averages do here, and a residual is read too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from expertcast.predictors.base import Predictor, PredictorConfig, RouterState
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.fields import check_between, check_finite, written
from expertcast.predictors.next_token_network import NextTokenNetwork
from expertcast.predictors.routing_rule import goes_by_logits, route_all
from expertcast.predictors.view import ModelShape, MoEView

MOST_MEMORIES = 64


@dataclass(kw_only=True)
class NextTokenConfig(PredictorConfig):
    """How far ahead in the text it looks, what it remembers, and how it is trained."""

    ahead: tuple[int, ...] = ()
    """None: it does not look layers ahead."""
    tokens: int = 4
    """Tokens ahead that are forecast one by one; all further ones share one forecast."""
    triggers: tuple[int, ...] = (0,)
    """Layers after whose router a token's own forecast is made anew, beside the one at the end of each token."""
    memories: tuple[int, ...] = (2, 8, 32, 128)
    """Tokens over which the routing is averaged: the recurrent state is one average of each."""
    width: int = 256
    """Width of the network."""
    later_tokens: int = 64
    """Tokens whose mean routing stands for all that come after the first `tokens`."""
    steps: int = 3000
    """Most optimiser steps."""
    passes: int = 8
    """Most passes over the train split: a small one is not gone over 3000 times."""
    step_tokens: int = 512
    """Tokens per step."""
    learning_rate: float = 2e-3
    """Peak learning rate."""
    weight_decay: float = 0.01
    """AdamW's."""
    patience: int = 4
    """Validation rounds without gain after which training ends."""

    def __post_init__(self) -> None:
        check_finite(self)
        if self.ahead:
            raise ExpertcastError(f"ahead={self.ahead}: next_token looks tokens ahead, give tokens instead")
        self.ahead = ()  # a checkpoint's config gives a list
        self.triggers = tuple(sorted({int(layer) for layer in self.triggers}))
        self.memories = tuple(sorted({int(memory) for memory in self.memories}))
        if not 1 <= len(self.memories) <= MOST_MEMORIES or not 1 <= self.memories[0] <= self.memories[-1] <= 10**9:
            raise ExpertcastError(
                f"memories={written(self.memories)[:60]}: give one number of tokens, 1 or more, up to {MOST_MEMORIES}"
            )
        check_between(self, 1, 10_000, "tokens")
        check_between(self, 1, 10**6, "width", "later_tokens")
        check_between(self, 1, 10**9, "steps", "passes", "step_tokens", "patience")
        check_between(self, 1e-12, 1e3, "learning_rate")
        check_between(self, 0, 1e3, "weight_decay")


@dataclass(slots=True)
class TextState:
    """What `next_token` remembers of B texts; replaced, never changed."""

    average_BAN: Tensor
    """Moving averages of each expert's use."""
    last_BN: Tensor
    """The last token's router probabilities; zeros before the first token."""
    residual_BD: Tensor
    """The last token's residual at the last layer, standardised; zeros before the first token."""
    start_BW: Tensor | None = None
    """The network's part that is the same at every trigger, once it has been computed."""


class NextToken(Predictor):
    """Rolls the routing of the coming tokens out, at the end of a token and at the trigger layers of the next.

    The last residual of a token holds the model's forecast of the next token, the first residual of the next token
    which one it was; the moving averages hold what the text is about. It forecasts no single layer: `forecast` refuses.
    """

    name: ClassVar[str] = "next_token"
    looks: ClassVar[str] = "tokens"
    config_class: ClassVar[type[PredictorConfig]] = NextTokenConfig
    config: NextTokenConfig
    usual_LE: Tensor
    mean_RD: Tensor
    inverse_RD: Tensor
    keep_A: Tensor

    def __init__(self, config: PredictorConfig, shape: ModelShape) -> None:
        assert isinstance(config, NextTokenConfig)
        super().__init__(config, shape)
        if config.triggers and not 0 <= config.triggers[0] <= config.triggers[-1] < shape.layers - 1:
            raise ExpertcastError(
                f"triggers={config.triggers}: give layers 0 to {shape.layers - 2}, the model's last one but one"
            )
        self.layers = (shape.layers - 1, *config.triggers)
        """Layer whose residual each trigger reads; the first one is the end of the token before."""
        triggers = len(self.layers)
        self.register_buffer("usual_LE", torch.full((shape.layers, shape.experts), shape.top_k / shape.experts))
        self.register_buffer("mean_RD", torch.zeros(triggers, shape.hidden))
        self.register_buffer("inverse_RD", torch.ones(triggers, shape.hidden))
        keep_A = 1 - 1 / torch.tensor(config.memories, dtype=torch.float32)
        self.register_buffer("keep_A", keep_A, persistent=False)
        self.network = NextTokenNetwork(
            experts=shape.layers * shape.experts,
            hidden=shape.hidden,
            averages=len(config.memories),
            triggers=triggers,
            steps=config.tokens,
            width=config.width,
            spread=(shape.experts / shape.top_k) ** 0.5,
        )
        self._plain = False

    @property
    def rows(self) -> int:
        """H, the rows of a forecast."""
        return self.config.tokens + 2

    def bind(self, view: MoEView) -> Predictor:
        super().bind(view)
        self._plain = goes_by_logits(view)
        return self

    def logits(self, state: RouterState, ahead: int) -> NoReturn:
        raise ExpertcastError("next_token forecasts tokens, not layers: give it to the eviction policy `forecast`")

    def forecast(self, state: RouterState, ahead: int = 1) -> NoReturn:
        """Refuse: there is no layer ahead to forecast.

        Raises:
            ExpertcastError: always.
        """
        self.logits(state, ahead)

    def chosen(self, logits_BLE: Tensor) -> Tensor:
        """The experts [B, L, K] that the model's routers choose by these logits."""
        if self._plain:
            return logits_BLE.topk(self.shape.top_k, dim=-1).indices
        return torch.stack(route_all(self.view, logits_BLE)[0], dim=1)

    def membership(self, ids_BLK: Tensor) -> Tensor:
        """1 for chosen experts, else 0: [B, N]."""
        member_BLE = torch.zeros(*ids_BLK.shape[:2], self.shape.experts, device=ids_BLK.device)
        return member_BLE.scatter_(2, ids_BLK, 1.0).flatten(1)

    def standardised(self, residual_BD: Tensor, trigger: int) -> Tensor:
        """Residuals at a trigger about their mean, in units of their spread."""
        return (residual_BD.float() - self.mean_RD[trigger]) * self.inverse_RD[trigger]

    def start(self, batch: int) -> TextState:
        """The state before the first token of `batch` texts."""
        average_AN = self.usual_LE.flatten().expand(len(self.keep_A), -1)
        return TextState(
            average_BAN=average_AN.expand(batch, -1, -1),
            last_BN=average_AN.new_zeros(batch, average_AN.shape[1]),
            residual_BD=average_AN.new_zeros(batch, self.shape.hidden),
        )

    def read(self, state: TextState, member_BTN: Tensor, last_BN: Tensor, residual_BD: Tensor) -> TextState:
        """The `state` after T more tokens: `member_BTN` is 1 for the experts that each chose, `last_BN` the last one's
        router probabilities, `residual_BD` its residual at the last layer."""
        tokens = member_BTN.shape[1]
        keep_A1 = self.keep_A[:, None]
        if tokens == 1:
            average_BAN = state.average_BAN * keep_A1 + (1 - keep_A1) * member_BTN
        else:
            age_T = torch.arange(tokens - 1, -1, -1, device=keep_A1.device)
            share_AT = (1 - keep_A1) * keep_A1**age_T
            average_BAN = state.average_BAN * keep_A1**tokens + share_AT @ member_BTN
        return TextState(average_BAN, last_BN, self.standardised(residual_BD, 0))

    def averages_before(self, average_AN: Tensor, member_TN: Tensor) -> Tensor:
        """The averages [T, A, N] that each of T tokens of a text finds, the first of them `average_AN`."""
        index_T = torch.arange(len(member_TN), device=member_TN.device)
        age_TV = index_T[:, None] - 1 - index_T[None, :]
        keep_A11 = self.keep_A[:, None, None]
        share_ATV = torch.where(age_TV >= 0, (1 - keep_A11) * keep_A11 ** age_TV.clamp(min=0), 0.0)
        kept_TAN = (self.keep_A ** index_T[:, None])[:, :, None] * average_AN
        return kept_TAN + (share_ATV @ member_TN).transpose(0, 1)

    @torch.no_grad()
    def tokens_ahead(self, state: TextState, layer: int | None = None, residual_BD: Tensor | None = None) -> Tensor:
        """Probability that an expert is used, [B, H, L, E].

        `layer` is a trigger layer that the token under way has reached, with its residual there; None at the end of a
        token, when the one under way has no layer left: its row is zero.
        """
        if state.start_BW is None:
            state.start_BW = self.network.start(state.average_BAN, state.last_BN)
        at = 0 if layer is None else self.layers.index(layer, 1)
        vector_BD = state.residual_BD if residual_BD is None else self.standardised(residual_BD, at)
        logits_BSN = self.network(state.start_BW, state.average_BAN, state.last_BN, vector_BD, at)
        p_BSLE = logits_BSN.sigmoid().view(*logits_BSN.shape[:2], self.shape.layers, self.shape.experts)
        if layer is None:
            return torch.cat([torch.zeros_like(p_BSLE[:, :1]), p_BSLE], dim=1)
        this_BLE = p_BSLE[:, 0]
        this_BLE[:, : layer + 1] = 0.0
        # one step short of S tokens after this one: as the later ones
        return torch.cat([p_BSLE, p_BSLE[:, -1:]], dim=1)
