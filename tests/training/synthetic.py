"""Trace batches and sources of a tiny random model without running its attention: what is learned takes no time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from expertcast.data.batch import TraceBatch
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.plan import PlannedDocument
from expertcast.data.processes import Share
from expertcast.predictors.base import Predictor, PredictorConfig, RouterState
from expertcast.predictors.baselines import DefaultVectors
from expertcast.predictors.view import ModelShape, MoEView
from tests.families.models import tiny_model


def tiny_view(family: str = "qwen3_moe") -> MoEView:
    return find_moe_layers(tiny_model(family, dtype=torch.float32))


def random_batch(view: MoEView, tokens: int, *, seed: int = 0, document_tokens: int = 7) -> TraceBatch:
    """Residuals that change a little per layer, so that a layer's routing says something about the next one's."""
    generator = torch.Generator().manual_seed(seed)
    steps_TLD = torch.randn(tokens, len(view), view.shape.hidden, generator=generator)
    steps_TLD[:, 1:] *= 0.5
    residual_TLD = steps_TLD.cumsum(dim=1)
    with torch.no_grad():
        logits = [layer.router_logits(layer.router_input(residual_TLD[:, layer.index])) for layer in view]
    index_T = torch.arange(tokens)
    return TraceBatch(
        residual_TLD=residual_TLD,
        logits_TLE=torch.stack(logits, dim=1),
        document_T=index_T // document_tokens,
        position_T=index_T % document_tokens,
        token_T=torch.randint(0, 10, (tokens,), generator=generator),
    )


class Rows:
    """A source of the rows of one batch: two thirds are the train split, the others the validation split."""

    stand_in = None

    def __init__(self, view: MoEView, batch: TraceBatch) -> None:
        self.view, self.batch = view, batch
        tokens = len(batch)
        self.rows = {"train": slice(0, tokens * 2 // 3), "validation": slice(tokens * 2 // 3, tokens)}
        self.info: dict[str, Any] = {"id": "rows", "model": view.model_id}

    @property
    def defaults(self) -> DefaultVectors:
        shape, generator = self.view.shape, torch.Generator().manual_seed(5)
        return DefaultVectors(
            expert_LED=torch.randn(shape.layers, shape.experts, shape.hidden, generator=generator),
            shared_LD=torch.zeros(shape.layers, shape.hidden),
            count_LE=torch.ones(shape.layers, shape.experts, dtype=torch.int64),
            token_count=1,
        )

    def learned_from(self) -> frozenset[str]:
        return frozenset()

    def chosen(self, split: str) -> list[PlannedDocument]:
        found = self.batch.document_T[self.rows[split]].unique(return_counts=True)
        notes = zip(*(each.tolist() for each in found), strict=True)
        return [PlannedDocument(index=own, domain="", tokens=tokens, split=split, hash="") for own, tokens in notes]

    def token_count(self, split: str) -> int:
        return len(self.batch[self.rows[split]])

    def batches(
        self,
        split: str,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        max_tokens: int | None = None,
        share: Share | None = None,
    ) -> Iterator[TraceBatch]:
        rows = self.batch[self.rows[split]][:max_tokens]
        if shuffle:
            rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
        for first in range(0, len(rows), batch_size):
            yield rows[first : first + batch_size]


class Same(Predictor):
    """Forecasts the logits of the layer it stands at: as dependent on the executed routing as can be."""

    name = "same"

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        del ahead
        return state.logits_TE.roll(1, dims=1)  # rolled, so that a chain of copies differs from a copy of layer 0


class Oracle(Predictor):
    """Forecasts the target's true logits: those of the first rows of the batch it was given."""

    name = "oracle"

    def __init__(self, batch: TraceBatch, shape: ModelShape, ahead: tuple[int, ...] = (1,)) -> None:
        super().__init__(PredictorConfig(ahead=ahead), shape)
        self.batch = batch

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        return self.batch.logits_TLE[: len(state.logits_TE), state.layer + ahead]

    def input_vector(self, state: RouterState, ahead: int) -> Tensor:
        target = state.layer + ahead
        return 3.0 * self.view[target].router_input(self.batch.residual_TLD[: len(state.logits_TE), target])


class Before(Predictor):
    """Forecasts what the previous token had at the target layer, and expert order where there is none."""

    name = "before"
    uses_previous_token = True

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        assert state.previous_logits_TLE is not None
        order_E = -torch.arange(self.shape.experts).float()
        before_TE = state.previous_logits_TLE[:, state.layer + ahead]
        return torch.where(before_TE.isnan(), order_E.expand_as(before_TE), before_TE)
