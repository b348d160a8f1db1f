"""Fit `next_token` on whole documents in order.

T tokens of a chunk, B examples, W windows of up to S tokens, N experts of all layers, J of them used by a token,
A averages, P components of an expert embedding, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import MeanMetric

from expertcast.data.batch import TraceBatch
from expertcast.data.processes import Share, sum_over_ranks, training_share
from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError, PredictorConfig
from expertcast.predictors.messages import with_token_progress
from expertcast.predictors.next_token import NextToken, NextTokenConfig
from expertcast.training.loop import NetworkTraining, TrainingData, run, steps_of
from expertcast.training.scoring import NO_TRAINING, FitOptions, Fitted, device_of, train_tokens

CHUNK_BYTES = 96 * 2**20
"""Memory for counts over a chunk's tokens; training steps draw from one chunk at a time."""
LEAST_CHUNK = 2048
"""Minimum number of tokens of a chunk."""
WINDOW = 64
"""Tokens per window. The learned embedding is applied to the averages at the start of each window, not at each token.
"""
LEAST_LATER = 8
"""Minimum number of later tokens for a training target of the last row."""
VALIDATION_STRIDE = 4
"""Validation scores every fourth window; neighbouring windows are similar."""


@dataclass(slots=True)
class TokenExamples:
    """Training examples: the tokens of some windows, with the state before each."""

    chunk: TokenChunk
    average_WAN: Tensor
    """Averages at the start of each window."""
    ids_WSJ: Tensor
    """Experts that the windows' tokens use; arbitrary for padding."""
    place_B: Tensor
    """Index of each example within the windows, W x S."""
    index_B: Tensor
    """Index of each example within the chunk."""

    def __len__(self) -> int:
        return len(self.index_B)

    def only(self, keep_B: Tensor) -> TokenExamples:
        """Return the examples for which `keep_B` is true."""
        return replace(self, place_B=self.place_B[keep_B], index_B=self.index_B[keep_B])

    def text(self) -> Tensor:
        """Return the averages [B, A * P] before each example, under the current expert embeddings."""
        predictor = self.chunk.predictor
        expert_NP = predictor.network.expert_NP
        windows, tokens, _ = self.ids_WSJ.shape
        stands_WSP = predictor.network.stand_ins(self.ids_WSJ.flatten(0, 1)).view(windows, tokens, -1)
        text_WSAP = predictor.averages_before(self.average_WAN.float() @ expert_NP, stands_WSP)
        return text_WSAP.flatten(0, 1)[self.place_B].flatten(1)

    @property
    def residual_BD(self) -> Tensor:
        """Standardised residual of the previous token at the last layer; zeros at the start of a document."""
        return self.chunk.residual_TD[self.index_B]

    @property
    def row_B(self) -> Tensor:
        """Network rows of the tokens' ids."""
        return self.chunk.row_T[self.index_B]

    def known(self, row: int) -> Tensor:
        """Return whether the `row`-th token after each example [B] is in the same document and in the chunk."""
        return self.index_B + row < self.chunk.end_T[self.index_B]

    def used(self, row: int, of_B: Tensor) -> Tensor:
        """Return [b, N]: 1 for experts used by the `row`-th token after each example of the subset `of_B`."""
        return self.chunk.membership(self.index_B[of_B] + row)


class TokenChunk:
    """Consecutive tokens of a split; a document continues from the chunk `before`.

    Raises:
        ExpertcastError: the source has no token ids.
    """

    _left: tuple[Tensor, Tensor]
    """State after the last token, for the next chunk: averages [A, N] and residual."""

    def __init__(self, predictor: NextToken, batch: TraceBatch, before: TokenChunk | None = None) -> None:
        self.predictor = predictor
        device = predictor.usual_LE.device
        self.document_T = batch.document_T.to(device)
        self.row_T = predictor.rows_of(token_ids(batch).to(device))
        self.logits_TLE = batch.logits_TLE
        self.ids_TJ = predictor.chosen(batch.logits_TLE.to(device).float())
        self.begins, self.end_T = self._spans()
        goes_on = before is not None and bool(before.document_T[-1] == self.document_T[0])
        front = before._left if goes_on and before is not None else None
        self._windows, self._average_WAN, left_AN = self._cut(None if front is None else front[0])
        residual_TD = predictor.standardised(batch.residual_TLD[:, -1].to(device))
        self._left = (left_AN, residual_TD[-1].clone())
        residual_TD = residual_TD.roll(1, dims=0)
        residual_TD[self.begins] = 0
        if front is not None:
            residual_TD[0] = front[1]
        self.residual_TD = residual_TD
        self._count_TN: Tensor | None = None

    def __len__(self) -> int:
        return len(self.document_T)

    @property
    def windows(self) -> int:
        """W, the number of windows."""
        return len(self._windows)

    def examples(self, window_W: Tensor) -> TokenExamples:
        """Return the examples of some windows."""
        span_W2 = self._windows[window_W]
        index_WS = span_W2[:, :1] + torch.arange(WINDOW, device=span_W2.device)
        place_B = (index_WS < span_W2[:, 1:]).flatten().nonzero().flatten()
        return TokenExamples(
            chunk=self,
            average_WAN=self._average_WAN[window_W],
            ids_WSJ=self.ids_TJ[index_WS.clamp(max=len(self) - 1)],
            place_B=place_B,
            index_B=index_WS.flatten()[place_B],
        )

    def membership(self, index_B: Tensor) -> Tensor:
        """Return [B, N]: 1 for the experts that these tokens use, else 0."""
        shape = self.predictor.shape
        member_BN = torch.zeros(len(index_B), shape.layers * shape.experts, device=index_B.device)
        return member_BN.scatter_(1, self.ids_TJ[index_B], 1.0)

    def later(self, index_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean use [B, N] by the tokens after the first S ones, and whether there are enough of them [B]."""
        if self._count_TN is None:
            member_TN = self.membership(torch.arange(len(self), device=index_B.device))
            self._count_TN = torch.cat([torch.zeros_like(member_TN[:1]), member_TN.cumsum(dim=0)])
        config, end_B = self.predictor.config, self.end_T[index_B]
        begin_B = torch.minimum(index_B + config.tokens, end_B)
        stop_B = torch.minimum(begin_B + config.later_tokens, end_B)
        count_B = stop_B - begin_B
        total_BN = self._count_TN[stop_B] - self._count_TN[begin_B]
        return total_BN / count_B.clamp(min=1)[:, None], count_B >= LEAST_LATER

    def _spans(self) -> tuple[list[int], Tensor]:
        """Return the first token of each document in the chunk, and for each token [T] the end of its document."""
        changes_T = (self.document_T[1:] != self.document_T[:-1]).nonzero().flatten() + 1
        begins = [0, *changes_T.tolist()]
        ends = torch.tensor([*begins[1:], len(self)], device=self.document_T.device)
        lengths = ends - torch.tensor(begins, device=ends.device)
        return begins, ends.repeat_interleave(lengths)

    def _cut(self, front_AN: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Cut the chunk into windows.

        Returns:
            First token and end of each window [W, 2], averages before each window [W, A, N], and averages after the
            last token [A, N].
        """
        predictor, device = self.predictor, self.document_T.device
        keep_A1 = predictor.keep_A[:, None]
        usual_AN = predictor.usual_LE.flatten().expand(len(keep_A1), -1)
        average_AN = usual_AN if front_AN is None else front_AN
        spans, averages = [], []
        for begin in self.begins:
            if begin:
                average_AN = usual_AN
            end = int(self.end_T[begin])
            for first in range(begin, end, WINDOW):
                stop = min(first + WINDOW, end)
                spans.append((first, stop))
                averages.append(average_AN.half())
                member_SN = self.membership(torch.arange(first, stop, device=device))
                age_S = torch.arange(stop - first - 1, -1, -1, device=device)
                share_AS = (1 - keep_A1) * keep_A1**age_S
                average_AN = average_AN * keep_A1 ** (stop - first) + share_AS @ member_SN
        return torch.tensor(spans, device=device), torch.stack(averages), average_AN


def token_ids(batch: TraceBatch) -> Tensor:
    """Return the token ids [T] of a batch.

    Raises:
        ExpertcastError: they are unknown.
    """
    if batch.token_T is None:
        raise ExpertcastError("these traces have no token ids, which next_token needs: collect them again")
    return batch.token_T


def token_chunks(
    predictor: NextToken, source: TraceSource, split: str, *, max_tokens: int | None = None
) -> Iterator[TokenChunk]:
    """Yield a split as chunks in order; for the train split, only this rank's documents.

    Args:
        predictor: bound predictor.
        source: traces, or a running model.
        split: name of the split.
        max_tokens: maximum number of tokens.
    """
    share = training_share() if split == "train" else None
    shape = predictor.shape
    size = max(LEAST_CHUNK, CHUNK_BYTES // (4 * shape.layers * shape.experts))
    if share is not None and share.world > 1:
        size = LEAST_CHUNK  # ranks use equally many full chunks, so small chunks waste fewer tokens
    before: TokenChunk | None = None
    for batch in source.batches(split, size, max_tokens=max_tokens, share=share):
        before = TokenChunk(predictor, batch, before)
        yield before


def token_data(predictor: NextToken, source: TraceSource, options: FitOptions) -> TrainingData[TokenExamples]:
    """Create examples: windows of the train split in random order within each chunk, and a part of validation."""
    size = windows_per_step(predictor)

    def passing(epoch: int, generator: torch.Generator) -> Iterator[TokenExamples]:
        for chunk in token_chunks(predictor, source, "train", max_tokens=options.tokens):
            order_W = torch.randperm(chunk.windows, generator=generator).to(chunk.document_T.device)
            # limit the steps to those of a chunk without short documents, so that ranks take equally many
            steps = max(1, len(chunk) // (size * WINDOW))
            for window_W in torch.split(order_W, size)[:steps]:
                yield chunk.examples(window_W)

    def validation() -> Iterator[TokenExamples]:
        for chunk in token_chunks(predictor, source, "validation", max_tokens=options.validation_tokens):
            every_W = torch.arange(0, chunk.windows, VALIDATION_STRIDE, device=chunk.document_T.device)
            for window_W in torch.split(every_W, size):
                yield chunk.examples(window_W)

    return TrainingData(passing, validation, options.seed)


def windows_per_step(predictor: NextToken) -> int:

    return max(1, predictor.config.step_tokens // WINDOW)


# Training: cross-entropy of every expert's use, for all rows together. V known token ids, W width

RARE = 1e-4
"""Minimum frequency of an expert, for finite log-odds."""
UNNAMED = 3
"""Every third example omits the token id, so that forecasts also work without it."""
FEWER = 4
"""Each row for later tokens uses every fourth example: its loss is less informative, and the head dominates the cost.
"""


def fit_next_token(source: TraceSource, config: PredictorConfig, options: FitOptions) -> Fitted:
    """Measure frequencies, spreads and ids in one pass, then train the network and restore its best round."""
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
    """Set the statistics of the train split: expert frequencies, mean and spread of residuals, frequent token ids."""
    shape, device = predictor.shape, predictor.usual_LE.device
    share = training_share()
    count_N = torch.zeros(shape.layers * shape.experts, dtype=torch.float64, device=device)
    sums_2D = torch.zeros(2, shape.hidden, dtype=torch.float64, device=device)
    tokens_1 = torch.zeros(1, dtype=torch.float64, device=device)
    count_XCE = torch.zeros(1, *predictor.count_VCE.shape[1:], device=device)
    batches = source.batches("train", LEAST_CHUNK, max_tokens=options.tokens, share=share)
    what, own = f"{NextToken.name}: counting", train_tokens(source, options) // share.world
    for batch in with_token_progress(batches, what, own, shown=options.progress):
        ids_TJ = predictor.chosen(batch.logits_TLE.to(device).float())
        count_N += torch.bincount(ids_TJ.flatten(), minlength=len(count_N))
        residual_TD = batch.residual_TLD[:, -1].to(device).double()
        sums_2D += torch.stack([residual_TD.sum(dim=0), residual_TD.square().sum(dim=0)])
        tokens_1 += len(batch)
        first_TI = ids_TJ[:, : count_XCE.shape[1] * shape.top_k]
        count_XCE = _add_counts(count_XCE, token_ids(batch).to(device), first_TI)
    count_XCE = _pad_to_longest_rank(share, count_XCE)
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
    predictor.set_known_ids(known_V)
    predictor.count_VCE[: len(known_V)] = count_XCE[known_V]
    predictor.count_V[: len(known_V)] = seen_X[known_V]


def _add_counts(count_XCE: Tensor, token_T: Tensor, first_TI: Tensor) -> Tensor:
    """Add the experts `first_TI` of the first layers, used by tokens `token_T`, to the counts per token id."""
    count_XCE = _padded(count_XCE, int(token_T.max()) + 1)
    per_token = count_XCE[0].numel()
    place_TI = token_T[:, None] * per_token + first_TI
    count_XCE.view(-1).index_add_(0, place_TI.flatten(), count_XCE.new_ones(place_TI.numel()))
    return count_XCE


def _padded(count_XCE: Tensor, length: int) -> Tensor:
    return functional.pad(count_XCE, (0, 0, 0, 0, 0, max(0, length - len(count_XCE))))


def _pad_to_longest_rank(share: Share, count_XCE: Tensor) -> Tensor:
    """Pad the counts to the length of the longest rank's."""
    length_R = count_XCE.new_zeros(share.world)
    length_R[share.rank] = len(count_XCE)
    sum_over_ranks(share, [length_R])
    return _padded(count_XCE, int(length_R.max()))


class TokenDistiller(NetworkTraining):
    """Trains the network of a `next_token` predictor whose statistics are set.

    Logs `loss` per step, and per validation round `nats` (the mean of scores with and without token ids).
    """

    watched = "nats"
    mode = "min"

    def __init__(self, predictor: NextToken, steps: int) -> None:
        super().__init__(predictor.network, predictor.config, steps)
        self._predictor = [predictor]  # a list hides it from nn.Module: only the network is trained and synchronised
        self.nats = MeanMetric(nan_strategy="disable", sync_on_compute=False).set_dtype(torch.float64)

    def loss(self, examples: TokenExamples, row_B: Tensor) -> Tensor:
        """Return the cross-entropy in nats per token and layer; the first row weighs `FEWER` times as much as others.

        Args:
            examples: tokens to forecast.
            row_B: network rows of their ids, or of an unknown id.
        """
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
        unknown = self._predictor[0].config.known_ids
        row_B = examples.row_B.clone()
        row_B[index % UNNAMED :: UNNAMED] = unknown
        loss = self.loss(examples, row_B)
        self.log("loss", loss, batch_size=len(examples))
        return loss

    def validation_step(self, examples: TokenExamples, index: int) -> None:
        row_B = examples.row_B
        unknown_B = torch.full_like(row_B, self._predictor[0].config.known_ids)
        nats = sum(float(self.loss(examples, given_B)) for given_B in (row_B, unknown_B)) / 2
        self.nats.update(nats, weight=len(examples))

    def on_validation_epoch_end(self) -> None:
        nats = float(self.nats.compute())
        self.nats.reset()
        self.end_round(nats)

    def transfer_batch_to_device(
        self, batch: TokenExamples, device: torch.device, dataloader_idx: int
    ) -> TokenExamples:
        """Return the batch: examples are already on the predictor's device."""
        return batch


def _cross_entropy(logits_BN: Tensor, used_BN: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits_BN, used_BN)
