"""Forecast the routing of the next tokens at all layers, from the sequence's routing so far and the next token's id.

B sequences, T tokens, L MoE layers, E routed experts, N = L * E, K experts per token, J = L * K, D hidden size,
A averages, P components of an expert embedding, V known token ids, C first layers, S tokens forecast one by one,
H = S + 1 rows of a forecast: the token about to run (h = 0), then one row for each later token, and a last row for all
tokens after these.

Source: SeqMoE (arXiv 2609.12978) predicts whole-stack routing states from earlier ones with a Mamba2, and evicts by the
prediction. Here moving averages replace the Mamba2, and a residual and the token's id are inputs too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from expertcast.predictors.base import Predictor, PredictorConfig, RouterState
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.options import check_between, check_finite, written
from expertcast.predictors.view import ModelShape, MoEView, route_all, routes_by_logits

# The network
#
#     u   = moving averages of the sum of each token's expert embeddings [P]   updated token by token
#     z_0 = z + mix(z),  z = SiLU(norm(state(u) + residual's map + token's row))
#     z_h = z_0 + step_h(z_0)            for the h-th later token; h = S: all tokens after these
#     logits_h = head(z_h) + bias_h
#
# A token uses J of the N experts, so only the head grows with N.

GAIN = 4.0
"""Multiplier of token-id rows: each row has few training examples, so its learning rate must be higher."""


class NextTokenNetwork(nn.Module):
    """Computes logits of every expert's use by S tokens, and on average by the tokens after them.

    Args:
        experts: N.
        used: J.
        hidden: D.
        averages: A moving averages of the routing.
        inner: P.
        known_ids: V.
        steps: S.
        width: W.
    """

    def __init__(
        self, *, experts: int, used: int, hidden: int, averages: int, inner: int, known_ids: int, steps: int, width: int
    ) -> None:
        super().__init__()
        self.expert_NP = nn.Parameter(torch.randn(experts, inner) / used**0.5)
        self.state = nn.Linear(averages * inner, width)
        self.residual = nn.Linear(hidden, width)
        self.token_VW = nn.Parameter(torch.zeros(known_ids + 1, width))
        """Row V stands for unknown ids."""
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.step = nn.Linear(width, steps * width)
        self.head = nn.Linear(width, experts, bias=False)
        nn.init.zeros_(self.head.weight)  # training starts at the experts' frequencies
        self.bias_RN = nn.Parameter(torch.zeros(steps + 1, experts))

    def stand_ins(self, ids_XJ: Tensor) -> Tensor:
        """Sum the embeddings of the experts (0..N-1) that each of X tokens uses: [X, P]."""
        return functional.embedding_bag(ids_XJ, self.expert_NP, mode="sum")

    def first(self, text_BF: Tensor, residual_BD: Tensor, row_B: Tensor) -> Tensor:
        """Return z_0 [B, W] from averages [B, A * P], standardised residuals and rows of token ids."""
        x_BW = self.state(text_BF) + self.residual(residual_BD) + GAIN * self.token_VW[row_B]
        z_BW = functional.silu(self.norm(x_BW))
        return z_BW + self.mix(z_BW)  # type: ignore[no-any-return]

    def row(self, z_BW: Tensor, row: int) -> Tensor:
        """Return logits [B, N] of one row from z_0: the token itself (0), a later token, or all tokens after (S)."""
        if row:
            part = slice((row - 1) * z_BW.shape[1], row * z_BW.shape[1])
            z_BW = z_BW + functional.linear(z_BW, self.step.weight[part], self.step.bias[part])
        logits_BN: Tensor = self.head(z_BW) + self.bias_RN[row]
        return logits_BN

    def forward(self, text_BF: Tensor, residual_BD: Tensor, row_B: Tensor) -> Tensor:
        """Return logits [B, S + 1, N] of all rows; arguments as for :meth:`first`."""
        z_BW = self.first(text_BF, residual_BD, row_B)
        z_B1W = z_BW[:, None]
        z_BRW = torch.cat([z_B1W, z_B1W + self.step(z_BW).view(len(z_BW), -1, z_BW.shape[1])], dim=1)
        if len(z_BRW) == 1:  # equivalent, in one operation
            return torch.addmm(self.bias_RN, z_BRW[0], self.head.weight.t())[None]
        logits_BRN: Tensor = self.head(z_BRW) + self.bias_RN
        return logits_BRN


MOST_MEMORIES = 64
PRIOR = 2.0
"""Weight of the network's forecast for a token id, in tokens, against counts at the first layers."""
NO_ID = torch.iinfo(torch.int64).max
"""Padding of the list of known ids."""


@dataclass(kw_only=True)
class NextTokenConfig(PredictorConfig):
    """Range, memory, size and training of `next_token`."""

    ahead: tuple[int, ...] = ()
    """Empty: next_token forecasts tokens, not layers."""
    tokens: int = 4
    """Tokens forecast one by one, including the one about to run; all later tokens share one forecast."""
    memories: tuple[int, ...] = (1, 4, 16, 64, 256)
    """Time constants, in tokens, of the moving averages of the routing."""
    inner: int = 64
    """Components of an expert's embedding in the averages."""
    known_ids: int = 8192
    """Token ids with a row of their own: the most frequent ones of the train split."""
    counted_layers: int = 2
    """First layers whose experts are counted for each known id; their routing depends on little else."""
    width: int = 128
    """Width of the network."""
    later_tokens: int = 64
    """Tokens whose mean routing is the target of the forecast for all tokens after the first `tokens`."""
    steps: int = 2000
    """Maximum number of optimiser steps."""
    passes: int = 8
    """Maximum number of passes over the train split."""
    step_tokens: int = 512
    """Tokens per step."""
    learning_rate: float = 3e-3
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Weight decay (AdamW)."""
    patience: int = 4
    """Validation rounds without improvement before training stops."""

    def __post_init__(self) -> None:
        check_finite(self)
        if self.ahead:
            raise ExpertcastError(f"ahead={self.ahead}: next_token forecasts tokens, set tokens instead")
        self.ahead = ()  # JSON has a list
        self.memories = tuple(sorted({int(memory) for memory in self.memories}))
        if not 1 <= len(self.memories) <= MOST_MEMORIES or not 1 <= self.memories[0] <= self.memories[-1] <= 10**9:
            raise ExpertcastError(
                f"memories={written(self.memories)[:60]}: use 1 to {MOST_MEMORIES} numbers of tokens, each 1 or more"
            )
        check_between(self, 1, 10_000, "tokens")
        check_between(self, 1, 10**6, "width", "inner", "later_tokens")
        check_between(self, 1, 10**7, "known_ids")
        check_between(self, 1, 10_000, "counted_layers")
        check_between(self, 1, 10**9, "steps", "passes", "step_tokens", "patience")
        check_between(self, 1e-12, 1e3, "learning_rate")
        check_between(self, 0, 1e3, "weight_decay")


@dataclass(slots=True)
class SequenceState:
    """Recurrent state of `next_token` for B sequences; immutable."""

    average_BAP: Tensor
    """Moving averages of the summed embeddings of each token's experts."""
    residual_BD: Tensor
    """Standardised residual of the last token at the last layer; zeros before the first token."""


class NextToken(Predictor):
    """Forecasts the routing of the next tokens once per token, when its id is known and before its first layer runs.

    The last residual of a token contains the model's forecast of the next token, the id identifies that token, and the
    moving averages describe the topic. Unknown ids lower the accuracy. :meth:`forecast` raises an error: this predictor
    forecasts no single layer.
    """

    name: ClassVar[str] = "next_token"
    looks: ClassVar[str] = "tokens"
    config_class: ClassVar[type[PredictorConfig]] = NextTokenConfig
    config: NextTokenConfig
    usual_LE: Tensor
    mean_D: Tensor
    inverse_D: Tensor
    ids_V: Tensor
    count_VCE: Tensor
    count_V: Tensor
    keep_A: Tensor
    share_A1: Tensor
    first_L1: Tensor

    def __init__(self, config: PredictorConfig, shape: ModelShape) -> None:
        assert isinstance(config, NextTokenConfig)
        super().__init__(config, shape)
        self.register_buffer("usual_LE", torch.full((shape.layers, shape.experts), shape.top_k / shape.experts))
        self.register_buffer("mean_D", torch.zeros(shape.hidden))
        self.register_buffer("inverse_D", torch.ones(shape.hidden))
        self.register_buffer("ids_V", torch.full((config.known_ids,), NO_ID))
        counted = min(config.counted_layers, shape.layers)
        self.register_buffer("count_VCE", torch.zeros(config.known_ids + 1, counted, shape.experts))
        self.register_buffer("count_V", torch.zeros(config.known_ids + 1))
        keep_A = 1 - 1 / torch.tensor(config.memories, dtype=torch.float32)
        self.register_buffer("keep_A", keep_A, persistent=False)
        self.register_buffer("share_A1", 1 - keep_A[:, None], persistent=False)
        first_L1 = torch.arange(shape.layers)[:, None] * shape.experts
        self.register_buffer("first_L1", first_L1, persistent=False)
        self.network = NextTokenNetwork(
            experts=shape.layers * shape.experts,
            used=shape.layers * shape.top_k,
            hidden=shape.hidden,
            averages=len(config.memories),
            inner=config.inner,
            known_ids=config.known_ids,
            steps=config.tokens,
            width=config.width,
        )
        self._plain = False
        self._row_of: Tensor | None = None
        """Row of each token id up to the largest known one; built on first use."""

    @property
    def rows(self) -> int:
        """H, the number of rows of a forecast."""
        return self.config.tokens + 1

    def bind(self, view: MoEView) -> Predictor:
        super().bind(view)
        self._plain = routes_by_logits(view)
        return self

    def logits(self, state: RouterState, ahead: int) -> NoReturn:
        raise ExpertcastError("next_token forecasts tokens, not layers: pass it as next_token, not as predictor")

    def forecast(self, state: RouterState, ahead: int = 1) -> NoReturn:
        """Raise :class:`ExpertcastError`: next_token forecasts no single layer."""
        self.logits(state, ahead)

    def chosen(self, logits_BLE: Tensor) -> Tensor:
        """Return the experts [B, J], numbered layer * E + expert, that the model's routers choose by these logits."""
        if self._plain:
            ids_BLK = logits_BLE.topk(self.shape.top_k, dim=-1).indices
        else:
            ids_BLK = torch.stack(route_all(self.view, logits_BLE)[0], dim=1)
        return (ids_BLK + self.first_L1).flatten(1)

    def standardised(self, residual_BD: Tensor) -> Tensor:
        """Standardise residuals of the last layer: zero mean and unit variance on the training tokens."""
        return (residual_BD.float() - self.mean_D) * self.inverse_D

    def rows_of(self, token_B: Tensor) -> Tensor:
        """Return the network's rows [B] of token ids [B]."""
        if self._row_of is None or self._row_of.device != token_B.device:
            known = self.ids_V[self.ids_V != NO_ID]
            # one more than the largest known id: larger ids are clamped to it
            size = int(known.max()) + 2 if len(known) else 1
            self._row_of = torch.full((size,), len(self.ids_V), device=token_B.device)
            self._row_of[known] = torch.arange(len(known), device=token_B.device)
        return self._row_of[token_B.clamp(max=len(self._row_of) - 1)]

    def set_known_ids(self, ids: Tensor) -> None:
        """Set the token ids (at most V) that have rows of their own."""
        self.ids_V.fill_(NO_ID)
        self.ids_V[: len(ids)] = ids
        self._row_of = None

    def start(self, batch: int) -> SequenceState:
        """Return the state before the first token of `batch` sequences."""
        average_P = self.usual_LE.flatten() @ self.network.expert_NP
        return SequenceState(
            average_BAP=average_P.expand(batch, len(self.keep_A), -1),
            residual_BD=average_P.new_zeros(batch, self.shape.hidden),
        )

    def read(self, state: SequenceState, ids_BTJ: Tensor, residual_BD: Tensor) -> SequenceState:
        """Return the state after T more tokens, which used experts `ids_BTJ` (numbered layer * E + expert).

        `residual_BD` is the residual of the last of these tokens at the last layer.
        """
        batch, tokens, _ = ids_BTJ.shape
        if tokens == 1:
            stands_B1P = self.network.expert_NP[ids_BTJ].sum(dim=2)
            average_BAP = torch.lerp(state.average_BAP, stands_B1P, self.share_A1)
        else:
            stands_BTP = self.network.stand_ins(ids_BTJ.flatten(0, 1)).view(batch, tokens, -1)
            keep_A1 = self.keep_A[:, None]
            age_T = torch.arange(tokens - 1, -1, -1, device=keep_A1.device)
            share_AT = (1 - keep_A1) * keep_A1**age_T
            average_BAP = state.average_BAP * keep_A1**tokens + share_AT @ stands_BTP
        return SequenceState(average_BAP, self.standardised(residual_BD))

    def averages_before(self, average_BAP: Tensor, stands_BTP: Tensor) -> Tensor:
        """Return the averages [B, T, A, P] before each of T tokens; `average_BAP` are those before the first."""
        index_T = torch.arange(stands_BTP.shape[1], device=stands_BTP.device)
        age_TU = index_T[:, None] - 1 - index_T[None, :]
        keep_A11 = self.keep_A[:, None, None]
        share_ATU = torch.where(age_TU >= 0, (1 - keep_A11) * keep_A11 ** age_TU.clamp(min=0), 0.0)
        kept_TA1 = (self.keep_A ** index_T[:, None])[:, :, None]
        return kept_TA1 * average_BAP[:, None] + torch.einsum("atu,bup->btap", share_ATU, stands_BTP)

    @torch.no_grad()
    def tokens_ahead(self, state: SequenceState, token_B: Tensor | None = None) -> Tensor:
        """Return the probability [B, H, L, E] that each expert is used; `token_B` are the next ids, if known."""
        if token_B is None:
            row_B = state.residual_BD.new_full((len(state.residual_BD),), len(self.ids_V), dtype=torch.long)
        else:
            row_B = self.rows_of(token_B)
        return self.probability(state.average_BAP.flatten(1), state.residual_BD, row_B)

    def probability(self, text_BF: Tensor, residual_BD: Tensor, row_B: Tensor) -> Tensor:
        """Return the probability [B, H, L, E] that each expert is used, from the network's inputs.

        For the token itself at the first C layers, blend counts for its id with the network's forecast, which weighs as
        much as `PRIOR` tokens.
        """
        shape = self.shape
        probability_BHN: Tensor = self.network(text_BF, residual_BD, row_B).sigmoid_()
        probability_BHLE = probability_BHN.view(*probability_BHN.shape[:2], shape.layers, shape.experts)
        own_BCE = probability_BHLE[:, 0, : self.count_VCE.shape[1]]
        total_B = self.count_V[row_B] + PRIOR
        own_BCE.mul_(PRIOR).add_(self.count_VCE[row_B]).div_(total_B[:, None, None])
        return probability_BHLE


# Tracking a run layer by layer, in a live model or over traces


class NextTokenTracker:
    """Feeds router results to a predictor, and forecasts at the start of each pass of one token per sequence."""

    def __init__(self, predictor: NextToken) -> None:
        self._predictor = predictor
        self._state: SequenceState | None = None
        self._logits: list[Tensor] = []
        """Logits [T, E] of each layer of this pass so far."""

    @torch.no_grad()
    def start(self, fresh: bool, token_BS: Tensor | None = None) -> Tensor | None:
        """Begin a pass.

        Args:
            fresh: whether new sequences begin.
            token_BS: token ids of the pass; None if unknown.

        Returns:
            The probability [H, L, E] that at least one sequence uses an expert: for the token about to run, then one
            row for each later token, and a last row for all tokens after these. None unless known sequences continue
            with one token each.
        """
        self._logits.clear()
        if fresh:
            self._state = None
        state = self._state
        if state is None or (token_BS is not None and token_BS.shape != (len(state.residual_BD), 1)):
            return None
        return any_sequence(self._predictor.tokens_ahead(state, None if token_BS is None else token_BS[:, 0]))

    def see(self, layer: int, residual_TD: Tensor, logits_TE: Tensor, sequences: int) -> None:
        """Record the norm's input and the router's logits of a layer, for the tokens of B `sequences` in order."""
        predictor = self._predictor
        if len(self._logits) != layer:
            self._logits.clear()  # the previous pass was cut short
            if layer:
                return
        self._logits.append(logits_TE)
        if layer == predictor.shape.layers - 1:
            self._read(residual_TD, sequences)

    @torch.no_grad()
    def _read(self, residual_TD: Tensor, sequences: int) -> None:
        """Update the state after the last layer's router."""
        predictor, state = self._predictor, self._state
        if state is None or len(state.residual_BD) != sequences:
            state = predictor.start(sequences)
        logits_TLE = torch.stack(self._logits, dim=1)
        self._logits.clear()
        ids_TJ = predictor.chosen(logits_TLE)
        tokens = len(ids_TJ) // sequences
        last_BD = residual_TD[tokens - 1 :: tokens].bfloat16()  # the dtype of traces
        self._state = predictor.read(state, ids_TJ.view(sequences, tokens, -1), last_BD)


def any_sequence(probability_BHLE: Tensor) -> Tensor:
    """Return the probability [H, L, E] that at least one of B independent sequences uses an expert."""
    if len(probability_BHLE) == 1:
        return probability_BHLE[0]
    return 1 - (1 - probability_BHLE).prod(dim=0)
