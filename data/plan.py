"""What will be run, decided before the model runs: documents, windows of tokens, and the split.

The plan is a function of (documents, tokenizer, tokens, window, seed) alone, so every rank of a distributed run and
every resumption of a killed one makes the same plan; its digest proves it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expertcast.checkpoints.provenance import fingerprints, provenance, without_folders
from expertcast.data.text import Document
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.view import MoEView

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SPLITS = ("train", "validation", "test")
ALL = "all"
"""Stands for the three of them together."""
HELD_OUT_SHARE = 0.1
"""Share of the tokens that each of validation and test aims for."""
MIN_DOCUMENTS = 3
MIN_DOCUMENTS_WANTED = 10
"""A small collection takes parts of so many documents rather than the whole of a few: splits need several."""
TOKENIZER_BATCH = 16

TokenIds: TypeAlias = npt.NDArray[np.int32]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How much of a text a model is run over, and in which portions: for collection and for online training alike."""

    tokens: int | None = None
    """Tokens of text to use, from documents in an order shuffled by seed (default: all there are)."""
    window: int = 256
    """Tokens per window; a window sees nothing before it."""
    batch_size: int | None = None
    """Windows per forward (default: 8; offloaded, as many as take about the memory of the slots)."""
    seed: int = 0
    """What the order of the documents is drawn from."""
    early_rank: int | None = 8
    """Rank of the stand-in for each expert that early attention runs on, 0 for default vectors; none leaves early
    attention out."""


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive tokens of one document, run through the model on their own."""

    document: int
    """`Document.index`."""
    start: int
    """Position of its first token in the document."""
    token_ids: TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDocument:
    """A document that is run: as much of it as is taken, and the split that it is in."""

    index: int
    """`Document.index`."""
    domain: str
    """Empty where the text names none."""
    tokens: int
    """How many are taken, from its beginning."""
    split: str
    """train, validation or test."""
    hash: str
    """`Document.hash`"""


class Documented:
    """Anything that is made from planned documents: a plan, traces, a running model."""

    documents: Sequence[PlannedDocument]
    """In the order they are run: train, then validation, then test."""

    def chosen(self, split: str) -> list[PlannedDocument]:
        """The documents of `train`, `validation`, `test` or `all`, in order.

        Raises:
            ExpertcastError: unknown split.
        """
        if split not in (*SPLITS, ALL):
            raise ExpertcastError(f"unknown split {split!r}: choose from {', '.join((*SPLITS, ALL))}")
        return [document for document in self.documents if split in (document.split, ALL)]

    def token_count(self, split: str = ALL) -> int:
        """Tokens of `train`, `validation`, `test` or `all`."""
        return sum(document.tokens for document in self.chosen(split))

    def learned_from(self) -> frozenset[str]:
        """Hashes of the documents that a predictor fitted from this learns or is chosen from: those of the splits train
        and validation."""
        return frozenset(document.hash for document in self.documents if document.split != "test")


@dataclass(frozen=True, kw_only=True)
class Plan(Documented):
    """What is run, window by window."""

    documents: tuple[PlannedDocument, ...]
    windows: dict[str, list[Window]]
    """Per split, in the order of the documents."""
    options: TextOptions
    digest: str
    """SHA-256 over every token id, document and split."""

    def windows_of(self, documents: Sequence[PlannedDocument], split: str = ALL) -> list[Window]:
        """The windows of some documents of this plan in the order they are run, those of one split or all."""
        own = {document.index for document in documents}
        splits = SPLITS if split == ALL else (split,)
        return [window for name in splits for window in self.windows[name] if window.document in own]

    def account(self, view: MoEView) -> Json:
        """:func:`account` of a run of the model."""
        return account(view, self.documents, window=self.options.window, seed=self.options.seed)


def account(view: MoEView, documents: Sequence[PlannedDocument], *, window: int, seed: int = 0) -> Json:
    """What traces say of where they come from: the model that is run, the text, the documents, the versions."""
    return {
        "model": without_folders(view.model_id),
        **fingerprints(view),
        "shape": view.shape.as_dict(),
        "window": window,
        "seed": seed,
        **counted(documents),
        **provenance(),
    }


def counted(documents: Iterable[PlannedDocument]) -> Json:
    """Some documents, and their tokens by split."""
    notes = [asdict(document) for document in documents]
    splits = {split: sum(note["tokens"] for note in notes if note["split"] == split) for split in SPLITS}
    return {"tokens": sum(splits.values()), "splits": splits, "documents": notes}


def make_plan(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    options: TextOptions | None = None,
    **fields: object,
) -> Plan:
    """Tokenise documents, in a shuffled order, until there are tokens enough; cut windows; split by document.

    The shuffle gives a small collection, and every prefix of it, the mix of domains of the whole text. The split goes
    by the documents' hashes: with few exceptions a document is in the same one in larger and smaller collections.

    Args:
        documents: the text, in any order; long documents, and the last one, are cut.
        tokenizer: of the model that will be run.
        options: how much of the text, and in which portions; none are the default :class:`TextOptions`.
        fields: fields of :class:`TextOptions` that are other than in `options`.

    Raises:
        ExpertcastError: fewer than three different documents (one for each split), or a bad `tokens` or `window`.
    """
    options = replace(options or TextOptions(), **fields)  # type: ignore[arg-type]
    tokens, window = options.tokens, options.window
    if window < 2:
        raise ExpertcastError(f"window={window}: give at least 2 tokens")
    if tokens is not None and tokens < 1:
        raise ExpertcastError(f"tokens={tokens}: give at least 1")
    order = list(documents)
    random.Random(options.seed).shuffle(order)
    taken = _tokenise(order, tokenizer, tokens, window)
    hashes = [document.hash for document, _ in taken]
    lengths = dict.fromkeys(hashes, 0)
    for own, (_, ids) in zip(hashes, taken, strict=True):
        lengths[own] += len(ids)
    if len(lengths) < MIN_DOCUMENTS:
        raise ExpertcastError(
            f"only {len(lengths)} document(s) that differ in {sum(lengths.values())} tokens, and train, validation and "
            f"test need one each: give at least {MIN_DOCUMENTS} documents, or more tokens"
        )
    splits = assign_splits(lengths)
    planned: list[PlannedDocument] = []
    windows: dict[str, list[Window]] = {split: [] for split in SPLITS}
    digest = hashlib.sha256(f"window {window}".encode())
    for split in SPLITS:
        for own, (document, ids) in zip(hashes, taken, strict=True):
            if splits[own] != split:
                continue
            note = PlannedDocument(index=document.index, domain=document.domain, tokens=len(ids), split=split, hash=own)
            planned.append(note)
            digest.update(f"{split} {document.index} {document.domain} {len(ids)}".encode() + ids.tobytes())
            windows[split] += [
                Window(document.index, start, ids[start : start + window]) for start in range(0, len(ids), window)
            ]
    return Plan(documents=tuple(planned), windows=windows, options=options, digest=digest.hexdigest())


def assign_splits(lengths: Mapping[str, int]) -> dict[str, str]:
    """A split for each document: the lowest hashes that fit into a tenth of the tokens are test, the highest are
    validation.

    Each gets at least one document, the shortest left if none fits; everything else is train.

    Args:
        lengths: tokens by hash, of the same text wherever it occurs together.
    """
    splits = dict.fromkeys(lengths, "train")
    quota = HELD_OUT_SHARE * sum(lengths.values())
    for split, left_over in (("test", 2), ("validation", 1)):
        free = sorted((own for own in lengths if splits[own] == "train"), reverse=split == "validation")
        held: list[str] = []
        total = 0
        for own in free[: len(free) - left_over]:
            if total + lengths[own] <= quota:
                held.append(own)
                total += lengths[own]
            elif total >= quota / 2:
                break  # short documents with other hashes would fill the rest: in another collection they are train
        splits |= dict.fromkeys(held or [min(free, key=lambda own: lengths[own])], split)
    return splits


def _tokenise(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, tokens: int | None, window: int
) -> list[tuple[Document, TokenIds]]:
    """Documents until there are `tokens`, each cut to a tenth of them when the text has enough others."""
    read: list[tuple[Document, TokenIds]] = []
    cap = None if tokens is None else max(window, -(-tokens // MIN_DOCUMENTS_WANTED))
    for begin in range(0, len(documents), TOKENIZER_BATCH):
        batch = documents[begin : begin + TOKENIZER_BATCH]
        encoded = tokenizer([d.text for d in batch], return_attention_mask=False, verbose=False)["input_ids"]
        read += [(document, np.asarray(ids, dtype=np.int32)) for document, ids in zip(batch, encoded, strict=True)]
        if tokens is not None and sum(len(ids[:cap]) for _, ids in read) >= tokens:
            read = [(document, ids[:cap]) for document, ids in read]
            break
    return list(first_tokens(read, tokens))


def first_tokens(parts: Iterable[tuple[T, TokenIds]], limit: int | None) -> Iterator[tuple[T, TokenIds]]:
    """The parts of a text that hold its first `limit` tokens (None: all); the last is cut, empty ones are left out."""
    for part, ids in parts:
        ids = ids[:limit]
        if len(ids):
            yield part, ids
        limit = None if limit is None else limit - len(ids)


# Windows as padded batches: B windows, S tokens of the longest


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBatch:
    """Windows padded on the right to the longest; the T real tokens in order."""

    input_ids_BS: Tensor
    mask_BS: Tensor
    token_T: Tensor
    document_T: Tensor
    position_T: Tensor

    def __len__(self) -> int:
        return int(self.token_T.shape[0])


def window_batches(windows: Sequence[Window], batch_size: int) -> Iterator[WindowBatch]:
    """Batches of `batch_size` windows, in order; the last one may be smaller."""
    for begin in range(0, len(windows), batch_size):
        yield pad_windows(windows[begin : begin + batch_size])


def pad_windows(windows: Sequence[Window]) -> WindowBatch:
    """Some windows as one batch."""
    longest = max(len(window.token_ids) for window in windows)
    ids_BS, mask_BS = (np.zeros((len(windows), longest), dtype=np.int64) for _ in range(2))
    for row, window in enumerate(windows):
        ids_BS[row, : len(window.token_ids)] = window.token_ids
        mask_BS[row, : len(window.token_ids)] = 1
    return WindowBatch(
        input_ids_BS=torch.from_numpy(ids_BS),
        mask_BS=torch.from_numpy(mask_BS),
        token_T=torch.from_numpy(np.concatenate([w.token_ids for w in windows]).astype(np.int64)),
        document_T=torch.from_numpy(np.repeat([w.document for w in windows], [len(w.token_ids) for w in windows])),
        position_T=torch.from_numpy(np.concatenate([w.start + np.arange(len(w.token_ids)) for w in windows])),
    )
