"""Corpus, tokenizer, and the order in which training windows are drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

COLUMNS = ("text", "domain", "source", "license")
END_OF_TEXT = "<|endoftext|>"
ENCODE_BATCH = 256
Rows = list[dict[str, str]]
Stream = npt.NDArray[np.uint16]


def read_rows(corpus: str, split: str) -> Rows:
    """Read one split of the corpus. Raises ValueError if it is missing, damaged or lacks a column."""
    path = Path(corpus) / f"{split}.parquet"
    if not path.is_file():
        raise ValueError(f"there is no {split}.parquet in {corpus}: --corpus names a folder that has one")
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from error
    if missing := [column for column in COLUMNS if column not in table.column_names]:
        raise ValueError(f"{path} lacks the column {missing[0]}: it needs {', '.join(COLUMNS)}")
    rows: Rows = table.select(list(COLUMNS)).to_pylist()
    if not rows:
        raise ValueError(f"{path} has no rows: give a corpus with text")
    if any(value is None for row in rows for value in row.values()):
        raise ValueError(f"{path} has empty cells: every row needs {', '.join(COLUMNS)}")
    return rows


def by_domain(rows: Rows) -> dict[str, list[str]]:
    """Group the texts by domain, domains in alphabetical order."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(row["domain"], []).append(row["text"])
    return dict(sorted(groups.items()))


def balanced_sample(rows: Rows, characters: int) -> list[str]:
    """Take evenly spread documents of each domain, about `characters` of each, or all there are."""
    sample = []
    for texts in by_domain(rows).values():
        sample += texts[:: max(1, round(sum(map(len, texts)) / characters))]
    return sample


def train_tokenizer(rows: Rows, *, vocab: int, characters: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE in which `<|endoftext|>` has id 0, on a sample balanced by domain."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(balanced_sample(rows, characters), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder. Raises ValueError if there is none that this script can use."""
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"there is no tokenizer.json in {folder}: name a folder this script has written")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.eos_token_id is None or len(tokenizer) > 2**16:
        raise ValueError(f"the tokenizer in {folder} needs an end-of-text token and at most 65536 tokens")
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Stream:
    """Encode documents to one stream of token ids, each document followed by end-of-text."""
    parts = []
    for start in range(0, len(texts), ENCODE_BATCH):
        for encoding in tokenizer.backend_tokenizer.encode_batch(texts[start : start + ENCODE_BATCH]):
            parts.append(np.array([*encoding.ids, tokenizer.eos_token_id], dtype=np.uint16))
    return np.concatenate(parts)


class WindowOrder:
    """The training windows, in an order that is a function of the seed and the position alone.

    Every epoch cuts the stream at another random offset and visits its windows in another random order,
    so a resumed run needs to know no more than the number of windows already seen.
    """

    def __init__(self, stream: Stream, window: int, seed: int) -> None:
        self.stream, self.window, self.seed = stream, window, seed
        self.per_epoch = len(stream) // window - 1
        if self.per_epoch < 1:
            raise ValueError(f"the corpus has {len(stream)} tokens: --window {window} needs {2 * window}")
        self._epoch = -1

    def batch(self, position: int, size: int) -> torch.Tensor:
        """Return windows `position` to `position + size` as ids_BT."""
        return torch.stack([self._window(index) for index in range(position, position + size)])

    def _window(self, index: int) -> torch.Tensor:
        epoch, place = divmod(index, self.per_epoch)
        if epoch != self._epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._offset = int(generator.integers(self.window))
            self._order, self._epoch = generator.permutation(self.per_epoch), epoch
        start = self._offset + int(self._order[place]) * self.window
        return torch.from_numpy(self.stream[start : start + self.window].astype(np.int64))
