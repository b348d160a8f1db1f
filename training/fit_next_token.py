"""Fitting `next_token` with Lightning: cross-entropy of every expert's use, at all tokens ahead together.

B examples, N experts of all layers, L layers, E routed experts, D hidden size, R triggers, S tokens one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import MeanMetric

from expertcast.data.distributed import sum_over_ranks, training_share
from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError, PredictorConfig
from expertcast.predictors.next_token import NextToken, NextTokenConfig
from expertcast.training.network_training import NetworkTraining, steps_of
from expertcast.training.options import NO_TRAINING, FitOptions, Fitted
from expertcast.training.scoring import device_of
from expertcast.training.token_examples import LEAST_CHUNK, TokenExamples, token_data
from expertcast.training.trainer import run

RARE = 1e-4
"""An expert's least frequency, where log-odds are taken."""


def fit_next_token(source: TraceSource, config: PredictorConfig, options: FitOptions) -> Fitted:
    """Frequencies and spreads in one pass, then the network; it is left at its best validation round."""
    assert isinstance(config, NextTokenConfig)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        predictor = NextToken(config, source.view.shape)
    predictor.to(device_of(source.view)).bind(source.view)
    _measure(predictor, source, options)
    module = TokenDistiller(predictor, steps_of(config, source, options))
    run(module, token_data(predictor, source, options), source, options, "next_token")
    return Fitted(predictor=predictor, report=module.finish())


def _measure(predictor: NextToken, source: TraceSource, options: FitOptions) -> None:
    """Set what a predictor knows of the train split as a whole: frequencies, mean and spread of the residuals."""
    shape, layers, device = predictor.shape, list(predictor.layers), predictor.usual_LE.device
    share = training_share()
    count_N = torch.zeros(shape.layers * shape.experts, dtype=torch.float64, device=device)
    sums_2RD = torch.zeros(2, len(layers), shape.hidden, dtype=torch.float64, device=device)
    tokens_1 = torch.zeros(1, dtype=torch.float64, device=device)
    for batch in source.batches("train", LEAST_CHUNK, max_tokens=options.tokens, share=share):
        count_N += predictor.membership(predictor.chosen(batch.logits_TLE.to(device).float())).sum(dim=0)
        residual_TRD = batch.residual_TLD[:, layers].to(device).double()
        sums_2RD += torch.stack([residual_TRD.sum(dim=0), residual_TRD.square().sum(dim=0)])
        tokens_1 += len(batch)
    sum_over_ranks(share, [count_N, sums_2RD, tokens_1])
    if not tokens_1:
        raise ExpertcastError(NO_TRAINING)
    mean_RD, square_RD = sums_2RD / tokens_1
    spread_RD = (square_RD - mean_RD.square()).clamp(min=0).sqrt()
    predictor.mean_RD.copy_(mean_RD)
    predictor.inverse_RD.copy_(torch.where(spread_RD > 0, 1 / spread_RD, 0.0))
    share_N = (count_N / tokens_1).clamp(RARE, 1 - RARE)
    predictor.usual_LE.copy_(share_N.view_as(predictor.usual_LE))
    predictor.network.usual_N.copy_(share_N.logit())


class TokenDistiller(NetworkTraining):
    """Trains the network of a `next_token`; each step divides its examples among the triggers.

    Logs `loss` per step, and per validation round `nats` (the mean over triggers).
    """

    watched = "nats"
    mode = "min"

    def __init__(self, predictor: NextToken, steps: int) -> None:
        """Train the network of `predictor`, whose frequencies and spreads are set, for `steps` optimiser steps."""
        super().__init__(predictor.network, predictor.config, steps)
        self._predictor = [predictor]  # in a list: only the network is trained, synchronised and moved
        self.nats = MeanMetric(nan_strategy="disable", sync_on_compute=False).set_dtype(torch.float64)

    def loss(self, examples: TokenExamples, trigger: int) -> Tensor:
        """Cross-entropy in nats per token and layer, mean over the tokens ahead, from one trigger."""
        start_BW = self._predictor[0].network.start(examples.average_BAN, examples.last_BN)
        logits_BSN = self.network(
            start_BW, examples.average_BAN, examples.last_BN, examples.residual_RBD[trigger], trigger
        )
        shape = self._predictor[0].shape
        ran = 0 if trigger == 0 else (self._predictor[0].layers[trigger] + 1) * shape.experts
        losses = [
            _cross_entropy(logits_BSN[:, step, skip:], examples.used_BSN[:, step, skip:], examples.known_BS[:, step])
            for step, skip in enumerate([ran] + [0] * (examples.used_BSN.shape[1] - 1))
        ]
        losses.append(_cross_entropy(logits_BSN[:, -1], examples.later_BN, examples.later_B))
        return torch.stack(losses).mean() * shape.experts

    def training_step(self, examples: TokenExamples, index: int) -> Tensor:
        """The loss of one step."""
        triggers = len(self._predictor[0].layers)
        losses = [self.loss(examples.part(trigger, triggers), trigger) for trigger in range(triggers)]
        loss = torch.stack(losses).mean()
        self.log("loss", loss, batch_size=len(examples))
        return loss

    def validation_step(self, examples: TokenExamples, index: int) -> None:
        """Score one batch of the round."""
        triggers = range(len(self._predictor[0].layers))
        nats = sum(float(self.loss(examples, trigger)) for trigger in triggers) / len(triggers)
        self.nats.update(nats, weight=len(examples))

    def on_validation_epoch_end(self) -> None:
        """End the round with its score."""
        nats = float(self.nats.compute())
        self.nats.reset()
        self.end_round(nats)

    def transfer_batch_to_device(
        self, batch: TokenExamples, device: torch.device, dataloader_idx: int
    ) -> TokenExamples:
        """Examples are made where the predictor is."""
        return batch


def _cross_entropy(logits_BN: Tensor, used_BN: Tensor, known_B: Tensor) -> Tensor:
    """Mean over experts and known examples; 0 where none is known."""
    nats_B = functional.binary_cross_entropy_with_logits(logits_BN, used_BN, reduction="none").mean(dim=1)
    return (nats_B * known_B).sum() / known_B.sum().clamp(min=1)
