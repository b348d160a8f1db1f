"""Whole documents in order, as examples for `next_token`: what was known before each token, and what came from there.

T tokens of a chunk, B examples, W windows of up to S tokens, N experts of all layers, J of them used by a token,
A averages, P numbers that stand for an expert, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expertcast.data.batch import TraceBatch
from expertcast.data.distributed import training_share
from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError
from expertcast.predictors.next_token import NextToken
from expertcast.training.network_training import TrainingData
from expertcast.training.options import FitOptions

CHUNK_BYTES = 96 * 2**20
"""Size of what is counted over a chunk's tokens: steps are drawn at random from one chunk after another."""
LEAST_CHUNK = 2048
"""Tokens of a chunk at least."""
WINDOW = 64
"""Tokens whose averages are computed together: a learned map is applied to what they begin with, not to each one's."""
LEAST_LATER = 8
"""Tokens that a mean over later ones must have to be learnt from."""
VALIDATION_STRIDE = 4
"""One in so many windows of the validation split is scored: neighbours say nearly the same."""


@dataclass(slots=True)
class TokenExamples:
    """The tokens of some windows: what was known before each, and where in the chunk it stands."""

    chunk: TokenChunk
    average_WAN: Tensor
    """Averages that each window begins with."""
    ids_WSJ: Tensor
    """Experts that its tokens use; those of padding are of no account."""
    place_B: Tensor
    """Of each example within the windows, W x S."""
    index_B: Tensor
    """Of each example within the chunk."""

    def __len__(self) -> int:
        return len(self.index_B)

    def only(self, keep_B: Tensor) -> TokenExamples:
        """Those of the examples for which `keep_B` is true."""
        return replace(self, place_B=self.place_B[keep_B], index_B=self.index_B[keep_B])

    def text(self) -> Tensor:
        """The averages [B, A * P] that each example finds, by the predictor's present map."""
        predictor = self.chunk.predictor
        expert_NP = predictor.network.expert_NP
        windows, tokens, _ = self.ids_WSJ.shape
        stands_WSP = predictor.network.stand_ins(self.ids_WSJ.flatten(0, 1)).view(windows, tokens, -1)
        text_WSAP = predictor.averages_before(self.average_WAN.float() @ expert_NP, stands_WSP)
        return text_WSAP.flatten(0, 1)[self.place_B].flatten(1)

    @property
    def residual_BD(self) -> Tensor:
        """The token before's residual at the last layer, standardised; zeros at a document's first."""
        return self.chunk.residual_TD[self.index_B]

    @property
    def row_B(self) -> Tensor:
        """Rows of the tokens' own ids."""
        return self.chunk.row_T[self.index_B]

    def known(self, row: int) -> Tensor:
        """Examples [B] whose `row`-th token after them is of the same document, and in the chunk."""
        return self.index_B + row < self.chunk.end_T[self.index_B]

    def used(self, row: int, of_B: Tensor) -> Tensor:
        """1 where the `row`-th token after some of the examples (their numbers) uses an expert, [b, N]."""
        return self.chunk.membership(self.index_B[of_B] + row)


class TokenChunk:
    """Consecutive tokens of a split; a document that began in the chunk `before` goes on where that left it.

    Raises:
        ExpertcastError: the source does not know its tokens' ids.
    """

    _left: tuple[Tensor, Tensor]
    """What the last token leaves for the next chunk: averages [A, N] and its residual."""

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
        """W, how many the chunk is cut into."""
        return len(self._windows)

    def examples(self, window_W: Tensor) -> TokenExamples:
        """The examples of some of the windows."""
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
        """1 for the experts that these tokens use, else 0: [B, N]."""
        shape = self.predictor.shape
        member_BN = torch.zeros(len(index_B), shape.layers * shape.experts, device=index_B.device)
        return member_BN.scatter_(1, self.ids_TJ[index_B], 1.0)

    def later(self, index_B: Tensor) -> tuple[Tensor, Tensor]:
        """Mean use [B, N] over the tokens after the first S from each token on, and whether they are enough [B]."""
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
        """First token of each document here, and for each token [T] the end of its document."""
        changes_T = (self.document_T[1:] != self.document_T[:-1]).nonzero().flatten() + 1
        begins = [0, *changes_T.tolist()]
        ends = torch.tensor([*begins[1:], len(self)], device=self.document_T.device)
        lengths = ends - torch.tensor(begins, device=ends.device)
        return begins, ends.repeat_interleave(lengths)

    def _cut(self, front_AN: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The windows [W, 2] as first token and end, the averages [W, A, N] that each begins with, and those [A, N]
        that the last token leaves."""
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
    """The ids [T] of a batch's tokens.

    Raises:
        ExpertcastError: they are not known.
    """
    if batch.token_T is None:
        raise ExpertcastError("these traces hold no token ids, which next_token reads: collect them again")
    return batch.token_T


def token_chunks(
    predictor: NextToken, source: TraceSource, split: str, *, max_tokens: int | None = None
) -> Iterator[TokenChunk]:
    """A split as chunks in order; of the train split this rank's documents.

    Args:
        predictor: for whose view and memories.
        source: where tokens come from.
        split: its name.
        max_tokens: at most so many.
    """
    share = training_share() if split == "train" else None
    shape = predictor.shape
    size = max(LEAST_CHUNK, CHUNK_BYTES // (4 * shape.layers * shape.experts))
    if share is not None and share.world > 1:
        size = LEAST_CHUNK  # ranks get equally many full chunks: small ones leave few tokens over
    before: TokenChunk | None = None
    for batch in source.batches(split, size, max_tokens=max_tokens, share=share):
        before = TokenChunk(predictor, batch, before)
        yield before


def token_data(predictor: NextToken, source: TraceSource, options: FitOptions) -> TrainingData[TokenExamples]:
    """Examples of the train split, windows in an order drawn anew in every pass within each chunk; some of validation.

    A step takes as many windows as hold the tokens that are configured: `windows_per_step`.
    """
    size = windows_per_step(predictor)

    def passing(epoch: int, generator: torch.Generator) -> Iterator[TokenExamples]:
        for chunk in token_chunks(predictor, source, "train", max_tokens=options.tokens):
            order_W = torch.randperm(chunk.windows, generator=generator).to(chunk.document_T.device)
            # no more than there would be without short documents: ranks, whose chunks are of one size, keep in step
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
    """Windows of a training step."""
    return max(1, predictor.config.step_tokens // WINDOW)
