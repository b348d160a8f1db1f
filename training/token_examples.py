"""Whole documents in order, as examples for `next_token`: what was known before each token, and what came from there.

T tokens of a chunk, B examples, N experts of all layers, A averages, D hidden size, R triggers, S tokens one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from expertcast.data.batch import TraceBatch
from expertcast.data.distributed import training_share
from expertcast.data.traces import TraceSource
from expertcast.predictors.next_token import NextToken
from expertcast.training.network_training import TrainingData
from expertcast.training.options import FitOptions

CHUNK_BYTES = 96 * 2**20
"""Size of a chunk's averages in memory: steps are drawn at random from one chunk after another."""
LEAST_CHUNK = 2048
"""Tokens of a chunk at least."""
BLOCK = 32
"""Tokens whose averages are computed together."""
LEAST_LATER = 8
"""Tokens that a mean over later ones must have to be learnt from."""
VALIDATION_STRIDE = 4
"""One in so many tokens of the validation split is scored: neighbours say nearly the same."""


@dataclass(slots=True)
class TokenExamples:
    """Examples at some tokens: the state before each, its residuals, and the routing from it on."""

    average_BAN: Tensor
    last_BN: Tensor
    """Router probabilities of the token before; zeros at a document's first."""
    residual_RBD: Tensor
    """Per trigger, standardised; the first is the last one of the token before, zeros at a document's first."""
    used_BSN: Tensor
    """1 where a token (the example's own and those after it) uses an expert."""
    known_BS: Tensor
    """False beyond the end of the document."""
    later_BN: Tensor
    """Mean use over the tokens after those S."""
    later_B: Tensor
    """False where they are too few."""

    def __len__(self) -> int:
        return len(self.later_B)

    def part(self, first: int, every: int) -> TokenExamples:
        """One in `every` examples, from `first` on."""
        rows = slice(first, None, every)
        return TokenExamples(
            average_BAN=self.average_BAN[rows],
            last_BN=self.last_BN[rows],
            residual_RBD=self.residual_RBD[:, rows],
            used_BSN=self.used_BSN[rows],
            known_BS=self.known_BS[rows],
            later_BN=self.later_BN[rows],
            later_B=self.later_B[rows],
        )


class TokenChunk:
    """Consecutive tokens of a split; a document that began in the chunk `before` goes on where that left it."""

    _left: tuple[Tensor, Tensor, Tensor]
    """What the last token leaves for the next chunk: averages, router probabilities, its last trigger's residual."""

    def __init__(self, predictor: NextToken, batch: TraceBatch, before: TokenChunk | None = None) -> None:
        self._predictor = predictor
        device = predictor.usual_LE.device
        logits_TLE = batch.logits_TLE.to(device).float()
        self.document_T = batch.document_T.to(device)
        self.ids_TLK = predictor.chosen(logits_TLE)
        self.member_TN = predictor.membership(self.ids_TLK)
        zero_1N = torch.zeros_like(self.member_TN[:1])
        self._count_TN = torch.cat([zero_1N, self.member_TN.cumsum(dim=0)])
        self._begins, self._end_T = self._spans()
        front_AN, front_N, front_D = None, None, None
        if before is not None and before.document_T[-1] == self.document_T[0]:
            front_AN, front_N, front_D = before._left
        self._average_TAN, left_AN = self._averages(front_AN)
        probability_TN = logits_TLE.softmax(dim=-1).flatten(1).half()
        residual_TRD = torch.stack(
            [
                predictor.standardised(batch.residual_TLD[:, layer].to(device), trigger)
                for trigger, layer in enumerate(predictor.layers)
            ],
            dim=1,
        )
        self._left = (left_AN, probability_TN[-1].clone(), residual_TRD[-1, 0].clone())
        self._last_TN = self._shifted(probability_TN, front_N)
        residual_TRD[:, 0] = self._shifted(residual_TRD[:, 0], front_D)
        self._residual_RTD = residual_TRD.transpose(0, 1)

    def __len__(self) -> int:
        return len(self.document_T)

    def examples(self, index_B: Tensor) -> TokenExamples:
        """The examples at tokens `index_B` of the chunk."""
        config = self._predictor.config
        end_B = self._end_T[index_B]
        coming_BS = index_B[:, None] + torch.arange(config.tokens, device=index_B.device)
        begin_B = torch.minimum(index_B + config.tokens, end_B)
        stop_B = torch.minimum(begin_B + config.later_tokens, end_B)
        count_B = stop_B - begin_B
        total_BN = self._count_TN[stop_B] - self._count_TN[begin_B]
        return TokenExamples(
            average_BAN=self._average_TAN[index_B].float(),
            last_BN=self._last_TN[index_B].float(),
            residual_RBD=self._residual_RTD[:, index_B],
            used_BSN=self.member_TN[coming_BS.clamp(max=len(self) - 1)],
            known_BS=coming_BS < end_B[:, None],
            later_BN=total_BN / count_B.clamp(min=1)[:, None],
            later_B=count_B >= LEAST_LATER,
        )

    def _spans(self) -> tuple[list[int], Tensor]:
        """First token of each document here, and for each token [T] the end of its document."""
        changes_T = (self.document_T[1:] != self.document_T[:-1]).nonzero().flatten() + 1
        begins = [0, *changes_T.tolist()]
        ends = torch.tensor([*begins[1:], len(self)], device=self.document_T.device)
        lengths = ends - torch.tensor(begins, device=ends.device)
        return begins, ends.repeat_interleave(lengths)

    def _averages(self, front_AN: Tensor | None) -> tuple[Tensor, Tensor]:
        """The averages [T, A, N] that each token finds, and those [A, N] that the last one leaves."""
        predictor = self._predictor
        keep_A1 = predictor.keep_A[:, None]
        parts = []
        average_AN = predictor.start(1).average_BAN[0] if front_AN is None else front_AN
        for begin in self._begins:
            if begin:
                average_AN = predictor.start(1).average_BAN[0]
            for member_TN in torch.split(self.member_TN[begin : int(self._end_T[begin])], BLOCK):
                before_TAN = predictor.averages_before(average_AN, member_TN)
                average_AN = before_TAN[-1] * keep_A1 + (1 - keep_A1) * member_TN[-1]
                parts.append(before_TAN.half())
        return torch.cat(parts), average_AN

    def _shifted(self, rows: Tensor, front: Tensor | None) -> Tensor:
        """Each token's row is that of the token before it; zeros at a document's first."""
        shifted = rows.roll(1, dims=0)
        shifted[self._begins] = 0
        if front is not None:
            shifted[0] = front
        return shifted


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
    shape, config = predictor.shape, predictor.config
    size = max(LEAST_CHUNK, CHUNK_BYTES // (2 * shape.layers * shape.experts * len(config.memories)))
    if share is not None and share.world > 1:
        size = LEAST_CHUNK  # ranks get equally many full chunks: small ones leave few tokens over
    before: TokenChunk | None = None
    for batch in source.batches(split, size, max_tokens=max_tokens, share=share):
        before = TokenChunk(predictor, batch, before)
        yield before


def token_data(predictor: NextToken, source: TraceSource, options: FitOptions) -> TrainingData[TokenExamples]:
    """Examples of the train split, in an order drawn anew in every pass within each chunk; some of validation's."""
    size = predictor.config.step_tokens

    def passing(epoch: int, generator: torch.Generator) -> Iterator[TokenExamples]:
        for chunk in token_chunks(predictor, source, "train", max_tokens=options.tokens):
            order_T = torch.randperm(len(chunk), generator=generator).to(chunk.document_T.device)
            for index_B in torch.split(order_T, size):
                if len(index_B) == size or len(chunk) < size:
                    yield chunk.examples(index_B)

    def validation() -> Iterator[TokenExamples]:
        for chunk in token_chunks(predictor, source, "validation", max_tokens=options.validation_tokens):
            every_T = torch.arange(0, len(chunk), VALIDATION_STRIDE, device=chunk.document_T.device)
            for index_B in torch.split(every_T, size):
                yield chunk.examples(index_B)

    return TrainingData(passing, validation, options.seed)
