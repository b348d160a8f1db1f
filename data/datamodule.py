"""The Lightning data module, over traces from disk or from a running model.

Under DDP each rank trains on its share of the documents, in equally many steps; validation is run in full on every
rank, so that all ranks decide alike (early stopping, choice of a temperature) without talking to each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import lightning
from torch.utils.data import DataLoader, IterableDataset

from expertcast.data.batch import TraceBatch
from expertcast.data.distributed import training_share
from expertcast.data.traces import TraceSource

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
            source: traces on disk, or a running model (:class:`expertcast.data.online.OnlineTraces`).
            tokens_per_batch: how many each batch holds.
            seed: what the order of the first epoch is drawn from.
            max_tokens: train on the first so many tokens of the train split only.
        """
        super().__init__()
        self.source = source
        self.tokens_per_batch, self.max_tokens, self.seed = tokens_per_batch, max_tokens, seed

    def train_dataloader(self) -> DataLoader[TraceBatch]:
        """The train split, in another order each time it is gone through; a rank's share of it."""
        return self._loader("train", shuffle=True, max_tokens=self.max_tokens)

    def val_dataloader(self) -> DataLoader[TraceBatch]:
        """The validation split, whole and in order."""
        return self._loader("validation")

    def test_dataloader(self) -> DataLoader[TraceBatch]:
        """The test split, whole and in order."""
        return self._loader("test")

    def _loader(self, split: str, *, shuffle: bool = False, max_tokens: int | None = None) -> DataLoader[TraceBatch]:
        rows = _Batches(self.source, split, self.tokens_per_batch, shuffle, self.seed, max_tokens)
        return DataLoader(rows, batch_size=None)


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
