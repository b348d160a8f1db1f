"""Fitting `next_token` with Lightning: cross-entropy of every expert's use, at all tokens ahead together.

T tokens, B examples, N experts of all layers, L layers, E routed experts, D hidden size, V known token ids, W width,
S tokens one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import MeanMetric

from expertcast.data.distributed import Share, sum_over_ranks, training_share
from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError, PredictorConfig
from expertcast.predictors.next_token import NextToken, NextTokenConfig
from expertcast.predictors.progress import tokens_read
from expertcast.training.network_training import NetworkTraining, steps_of
from expertcast.training.options import NO_TRAINING, FitOptions, Fitted, train_tokens
from expertcast.training.scoring import device_of
from expertcast.training.token_examples import LEAST_CHUNK, TokenExamples, token_data, token_ids
from expertcast.training.trainer import run

RARE = 1e-4
"""An expert's least frequency, where log-odds are taken."""
UNNAMED = 3
"""One example in so many is learnt from without its token's id: a forecast may be asked for before that is known."""
FEWER = 4
"""Rows of later tokens are learnt from one example in so many each: there is less to learn, and the head is most of the
work."""


def fit_next_token(source: TraceSource, config: PredictorConfig, options: FitOptions) -> Fitted:
    """Frequencies, spreads and ids in one pass, then the network; it is left at its best validation round."""
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
    """Set what a predictor knows of the train split as a whole: frequencies of experts, mean and spread of residuals,
    and which token ids are the most frequent."""
    shape, device = predictor.shape, predictor.usual_LE.device
    share = training_share()
    count_N = torch.zeros(shape.layers * shape.experts, dtype=torch.float64, device=device)
    sums_2D = torch.zeros(2, shape.hidden, dtype=torch.float64, device=device)
    tokens_1 = torch.zeros(1, dtype=torch.float64, device=device)
    count_XCE = torch.zeros(1, *predictor.count_VCE.shape[1:], device=device)
    batches = source.batches("train", LEAST_CHUNK, max_tokens=options.tokens, share=share)
    what, own = f"{NextToken.name}: counting", train_tokens(source, options) // share.world
    for batch in tokens_read(batches, what, own, shown=options.progress):
        ids_TJ = predictor.chosen(batch.logits_TLE.to(device).float())
        count_N += torch.bincount(ids_TJ.flatten(), minlength=len(count_N))
        residual_TD = batch.residual_TLD[:, -1].to(device).double()
        sums_2D += torch.stack([residual_TD.sum(dim=0), residual_TD.square().sum(dim=0)])
        tokens_1 += len(batch)
        first_TI = ids_TJ[:, : count_XCE.shape[1] * shape.top_k]
        count_XCE = _counted(count_XCE, token_ids(batch).to(device), first_TI)
    count_XCE = _of_one_length(share, count_XCE)
    sum_over_ranks(share, [count_N, sums_2D, tokens_1, count_XCE])
    if not tokens_1:
        raise ExpertcastError(NO_TRAINING)
    mean_D, square_D = sums_2D / tokens_1
    spread_D = (square_D - mean_D.square()).clamp(min=0).sqrt()
    predictor.mean_D.copy_(mean_D)
    predictor.inverse_D.copy_(torch.where(spread_D > 0, 1 / spread_D, 0.0))
    share_N = (count_N / tokens_1).clamp(RARE, 1 - RARE)
    predictor.usual_LE.copy_(share_N.view_as(predictor.usual_LE))
    with torch.no_grad():
        predictor.network.bias_RN.copy_(share_N.logit().expand_as(predictor.network.bias_RN))
    seen_X = (count_XCE[:, 0].sum(dim=1) / shape.top_k).round()
    frequent_V = seen_X.argsort(descending=True, stable=True)[: len(predictor.ids_V)]
    known_V = frequent_V[seen_X[frequent_V] > 0].sort().values
    predictor.know(known_V)
    predictor.count_VCE[: len(known_V)] = count_XCE[known_V]
    predictor.count_V[: len(known_V)] = seen_X[known_V]


def _counted(count_XCE: Tensor, token_T: Tensor, first_TI: Tensor) -> Tensor:
    """Counts per token id X, with those of some more tokens, which used the experts `first_TI` of the first layers."""
    count_XCE = _longer(count_XCE, int(token_T.max()) + 1)
    per_token = count_XCE[0].numel()
    place_TI = token_T[:, None] * per_token + first_TI
    count_XCE.view(-1).index_add_(0, place_TI.flatten(), count_XCE.new_ones(place_TI.numel()))
    return count_XCE


def _longer(count_XCE: Tensor, length: int) -> Tensor:
    """Counts of at least so many ids."""
    if len(count_XCE) >= length:
        return count_XCE
    return torch.cat([count_XCE, count_XCE.new_zeros(length - len(count_XCE), *count_XCE.shape[1:])])


def _of_one_length(share: Share, count_XCE: Tensor) -> Tensor:
    """Counts as long as the longest rank's: each says its length in a place of its own."""
    length_R = count_XCE.new_zeros(share.world)
    length_R[share.rank] = len(count_XCE)
    sum_over_ranks(share, [length_R])
    return _longer(count_XCE, int(length_R.max()))


class TokenDistiller(NetworkTraining):
    """Trains the network of a `next_token`.

    Logs `loss` per step, and per validation round `nats` (the mean with the token's id known and without).
    """

    watched = "nats"
    mode = "min"

    def __init__(self, predictor: NextToken, steps: int) -> None:
        """Train the network of `predictor`, whose frequencies, spreads and ids are set, for `steps` optimiser steps."""
        super().__init__(predictor.network, predictor.config, steps)
        self._predictor = [predictor]  # in a list: only the network is trained, synchronised and moved
        self.nats = MeanMetric(nan_strategy="disable", sync_on_compute=False).set_dtype(torch.float64)

    def loss(self, examples: TokenExamples, row_B: Tensor) -> Tensor:
        """Cross-entropy in nats per token and layer, a mean over the rows of a forecast in which the first one counts
        FEWER times; `row_B` stands for the ids."""
        predictor = self._predictor[0]
        network = predictor.network
        z_BW = network.first(examples.text(), examples.residual_BD, row_B)
        everything_B = torch.arange(len(examples), device=row_B.device)
        loss = _cross_entropy(network.row(z_BW, 0), examples.used(0, everything_B))
        steps = predictor.config.tokens
        for row in range(1, steps + 1):
            part_B = everything_B[row % FEWER :: FEWER]
            if row < steps:
                part_B = part_B[examples.known(row)[part_B]]
                used_BN = examples.used(row, part_B)
            else:
                used_BN, enough_B = examples.chunk.later(examples.index_B[part_B])
                part_B, used_BN = part_B[enough_B], used_BN[enough_B]
            if len(part_B):
                loss = loss + _cross_entropy(network.row(z_BW[part_B], row), used_BN) / FEWER
        return loss / (1 + steps / FEWER) * predictor.shape.experts

    def training_step(self, examples: TokenExamples, index: int) -> Tensor:
        """The loss of one step."""
        unknown = self._predictor[0].config.known_ids
        row_B = examples.row_B.clone()
        row_B[index % UNNAMED :: UNNAMED] = unknown
        loss = self.loss(examples, row_B)
        self.log("loss", loss, batch_size=len(examples))
        return loss

    def validation_step(self, examples: TokenExamples, index: int) -> None:
        """Score one batch of the round."""
        row_B = examples.row_B
        unknown_B = torch.full_like(row_B, self._predictor[0].config.known_ids)
        nats = sum(float(self.loss(examples, given_B)) for given_B in (row_B, unknown_B)) / 2
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


def _cross_entropy(logits_BN: Tensor, used_BN: Tensor) -> Tensor:
    """Mean over experts and examples."""
    return functional.binary_cross_entropy_with_logits(logits_BN, used_BN)
