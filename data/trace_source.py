"""What predictors are fitted from: rows of tokens, split by document."""

from __future__ import annotations

from collections.abc import Iterator

from expertcast.data.batch import TraceBatch
from expertcast.data.distributed import Share, documents_of, smallest_share
from expertcast.data.plan import Documented, PlannedDocument
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.predictors.quasi_hidden import DefaultVectors
from expertcast.predictors.stand_in import StandIn
from expertcast.predictors.view import MoEView


class TraceSource(Documented):
    """What predictors are fitted from: traces on disk, or a running model."""

    view: MoEView
    """The model's norms and routers."""
    defaults: DefaultVectors
    """Default vectors over the documents of the train split, or from elsewhere
    (:func:`expertcast.data.default_vectors.with_default_vectors`)."""
    defaults_learned_from: frozenset[str] | None = frozenset()
    """Hashes of the documents elsewhere that they come from; None where they are not known."""
    info: Json
    """Where the values come from: model, text, documents, versions."""

    @property
    def stand_in(self) -> StandIn | None:
        """What early attention ran on; None where it did not run."""
        raise NotImplementedError

    def learned_from(self) -> frozenset[str] | None:
        """As of anything that is made from documents, with those elsewhere that the default vectors come from."""
        own = super().learned_from()
        return None if own is None or self.defaults_learned_from is None else own | self.defaults_learned_from

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
        """Batches of `batch_size` tokens of a split.

        Without `shuffle` rows are in order of documents and positions, and the last batch may be smaller; a document
        may be cut between batches.

        Args:
            split: train, validation, test or all.
            batch_size: tokens per batch.
            shuffle: tokens in an order drawn from `seed`: over the whole split where it lies on disk, within the
                shuffle buffer where a model is run.
            seed: only looked at with `shuffle`.
            max_tokens: only the first so many tokens of the split (whole documents first, then a part of one).
            share: this rank's documents only, cut so that every rank gets equally many full batches.

        Raises:
            ExpertcastError: unknown split, `batch_size` under 1, or a share without one full batch.
        """
        if batch_size < 1:
            raise ExpertcastError(f"batch_size={batch_size}: give at least 1 token")
        own, tokens = self.chosen(split), self.token_count(split)
        if share is not None and share.world > 1:
            tokens = smallest_share(own, share.world)
            tokens = tokens if max_tokens is None else min(tokens, max_tokens // share.world)
            if tokens < batch_size:
                raise ExpertcastError(
                    f"a rank's share of {tokens} tokens of {split} holds no batch of {batch_size}: use more text, a "
                    "smaller batch or fewer ranks"
                )
            own, tokens = documents_of(own, share), tokens - tokens % batch_size
        elif max_tokens is not None:
            tokens = min(tokens, max_tokens)
        return self._batches(own, tokens, batch_size, seed if shuffle else None)

    def _batches(
        self, own: list[PlannedDocument], tokens: int, batch_size: int, seed: int | None
    ) -> Iterator[TraceBatch]:
        """The first `tokens` of neighbouring documents, shuffled where there is a seed."""
        raise NotImplementedError
