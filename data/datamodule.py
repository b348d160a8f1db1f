"""Lightning data modules: traces from disk, or from a running model; both give the same batches of tokens.

Under DDP each rank trains on its share of the documents, in equally many steps; validation is run in full on every
rank, so that all ranks decide alike (early stopping, choice of a temperature) without talking to each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel

from expertcast.data.batch import TraceBatch
from expertcast.data.distributed import Share, training_share
from expertcast.data.online import BUFFER_TOKENS, OnlineTraces
from expertcast.data.text import Document
from expertcast.data.traces import TraceSource
from expertcast.predictors.defaults import DefaultVectors
from expertcast.predictors.view import MoEView

TOKENS_PER_BATCH = 1024


class TraceDataModule(lightning.LightningDataModule):  # type: ignore[misc]
    """Batches of `tokens_per_batch` tokens: `train` shuffled anew every epoch, `validation` and `test` in order."""

    def __init__(
        self,
        source: TraceSource,
        *,
        tokens_per_batch: int = TOKENS_PER_BATCH,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            max_tokens: train on the first so many tokens of the train split only.
        """
        super().__init__()
        self.source = source
        self.tokens_per_batch, self.max_tokens, self.seed = tokens_per_batch, max_tokens, seed

    def train_dataloader(self) -> DataLoader[TraceBatch]:
        return self._loader("train", shuffle=True, max_tokens=self.max_tokens)

    def val_dataloader(self) -> DataLoader[TraceBatch]:
        return self._loader("validation")

    def test_dataloader(self) -> DataLoader[TraceBatch]:
        return self._loader("test")

    def _loader(self, split: str, *, shuffle: bool = False, max_tokens: int | None = None) -> DataLoader[TraceBatch]:
        rows = _Batches(self.source, split, self.tokens_per_batch, shuffle, self.seed, max_tokens)
        return DataLoader(rows, batch_size=None)


class OnlineDataModule(TraceDataModule):
    """Traces from a running model through a shuffle buffer, nothing stored. Is a :class:`TraceSource` itself."""

    source: OnlineTraces

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        documents: Sequence[Document],
        *,
        tokens: int | None = None,
        window: int = 256,
        batch_size: int = 8,
        buffer_tokens: int = BUFFER_TOKENS,
        tokens_per_batch: int = TOKENS_PER_BATCH,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        """Arguments as for :class:`OnlineTraces` (`batch_size` is windows per forward) and the base class."""
        source = OnlineTraces(
            model,
            tokenizer,
            documents,
            tokens=tokens,
            window=window,
            batch_size=batch_size,
            buffer_tokens=buffer_tokens,
            seed=seed,
        )
        super().__init__(source, tokens_per_batch=tokens_per_batch, max_tokens=max_tokens, seed=seed)

    @property
    def view(self) -> MoEView:
        return self.source.view

    @property
    def defaults(self) -> DefaultVectors:
        return self.source.defaults

    @property
    def info(self) -> dict[str, Any]:
        return self.source.info

    def token_count(self, split: str = "all") -> int:
        return self.source.token_count(split)

    def domains(self) -> dict[int, str]:
        return self.source.domains()

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
        """As :meth:`OnlineTraces.batches`."""
        return self.source.batches(split, batch_size, shuffle=shuffle, seed=seed, max_tokens=max_tokens, share=share)


class _Batches(IterableDataset[TraceBatch]):
    """One pass over a split per iteration; a shuffled split comes in another order each time."""

    def __init__(
        self, source: TraceSource, split: str, batch_size: int, shuffle: bool, seed: int, max_tokens: int | None
    ) -> None:
        self._source, self._split, self._batch_size = source, split, batch_size
        self._shuffle, self._seed, self._max_tokens = shuffle, seed, max_tokens
        self._epoch = 0

    def __iter__(self) -> Iterator[TraceBatch]:
        self._epoch += 1
        return self._source.batches(
            self._split,
            self._batch_size,
            shuffle=self._shuffle,
            seed=self._seed + self._epoch - 1,
            max_tokens=self._max_tokens,
            share=training_share() if self._split == "train" else None,
        )
