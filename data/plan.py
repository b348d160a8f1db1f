"""Plan of a model run: documents, windows of tokens, and splits.

The plan depends on documents, tokenizer, tokens, window and seed only. Every rank and every resumed run makes the same
plan, which its digest confirms.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from expertcast.checkpoints.provenance import fingerprints, provenance, without_folders
from expertcast.data.packed_experts import forms_noted
from expertcast.data.text import Document, token_ids
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.options import Validated
from expertcast.predictors.view import MoEView

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SPLITS = ("train", "validation", "test")
ALL = "all"
"""Name for all three splits together."""
HELD_OUT_SHARE = 0.1
"""Target share of the tokens in validation, and in test."""
MIN_DOCUMENTS = 3
MIN_DOCUMENTS_WANTED = 10
"""A small collection uses parts of this many documents instead of all of a few, because each split needs documents."""
TOKENIZER_BATCH = 16

TokenIds: TypeAlias = npt.NDArray[np.int32]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TextOptions(Validated):
    """Amount of text and batching, for collection and online training."""

    tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of text to use, from documents in an order shuffled by seed (default: all)."""
    window: Annotated[int, Field(ge=2)] = 256
    """Tokens per window; windows are independent sequences."""
    batch_size: Annotated[int, Field(ge=1)] | None = None
    """Windows per forward (default: 8; for an offloaded model, as many as fit into the memory for its `context`)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the order of the documents."""
    early_rank: Annotated[int, Field(ge=0)] | Literal["auto"] | None = "auto"
    """Rank of the stand-in for each expert in early attention; 0: default vectors; none: no early attention; auto: 32,
    or 8 if the hidden size is above 1024."""


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive tokens of one document, run through the model as an independent sequence."""

    document: int
    """`Document.index`."""
    start: int
    """Position of the first token in the document."""
    token_ids: TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDocument:
    """A document to run, with the number of its tokens and its split."""

    index: int
    """`Document.index`."""
    domain: str
    """Empty if unknown."""
    tokens: int
    """Number of tokens to run, from the beginning."""
    split: str
    """train, validation or test."""
    hash: str
    """`Document.hash`"""


class Documented:
    """Base of objects with planned documents: plans, traces, running models."""

    documents: Sequence[PlannedDocument]
    """In the order of the run: train, validation, test."""

    def chosen(self, split: str) -> list[PlannedDocument]:
        """Return the documents of `train`, `validation`, `test` or `all`, in order.

        Raises:
            ExpertcastError: the split is unknown.
        """
        if split not in (*SPLITS, ALL):
            raise ExpertcastError(f"unknown split {split!r}: choose from {', '.join((*SPLITS, ALL))}")
        return [document for document in self.documents if split in (document.split, ALL)]

    def token_count(self, split: str = ALL) -> int:
        """Return the number of tokens of `train`, `validation`, `test` or `all`."""
        return sum(document.tokens for document in self.chosen(split))

    def learned_from(self) -> frozenset[str]:
        """Return the hashes of train and validation documents, which a fit learns from or selects on."""
        return frozenset(document.hash for document in self.documents if document.split != "test")


@dataclass(frozen=True, kw_only=True)
class Plan(Documented):
    """Documents and windows of a run."""

    documents: tuple[PlannedDocument, ...]
    windows: dict[str, list[Window]]
    """By split, in the order of the documents."""
    options: TextOptions
    digest: str
    """SHA-256 over all token ids, documents and splits."""
    early_rank: int | None = None
    """Rank of the stand-in of early attention; None: no early attention."""

    def windows_of(self, documents: Sequence[PlannedDocument], split: str = ALL) -> list[Window]:
        """Return the windows of some documents in the order of the run, for one split or all."""
        own = {document.index for document in documents}
        splits = SPLITS if split == ALL else (split,)
        return [window for name in splits for window in self.windows[name] if window.document in own]

    @property
    def token_ids(self) -> TokenIds:
        """Token ids of all windows."""
        return np.concatenate([window.token_ids for windows in self.windows.values() for window in windows])

    def account(self, view: MoEView) -> Json:
        """Return :func:`account` of a run of the plan."""
        return account(view, self.documents, window=self.options.window, seed=self.options.seed)


def account(view: MoEView, documents: Sequence[PlannedDocument], *, window: int, seed: int = 0) -> Json:
    """Return the provenance of traces: model, text, documents and versions."""
    return {
        "model": without_folders(view.model_id),
        **fingerprints(view),
        "shape": view.shape.as_dict(),
        "experts": forms_noted(view),
        "window": window,
        "seed": seed,
        **counted(documents),
        **provenance(),
    }


def counted(documents: Iterable[PlannedDocument]) -> Json:
    """Return the documents as JSON values, with the number of tokens by split."""
    notes = [asdict(document) for document in documents]
    splits = {split: sum(note["tokens"] for note in notes if note["split"] == split) for split in SPLITS}
    return {"tokens": sum(splits.values()), "splits": splits, "documents": notes}


def make_plan(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    options: TextOptions | None = None,
    **fields: object,
) -> Plan:
    """Tokenise shuffled documents until there are enough tokens, cut windows, and assign splits by document.

    Because of the shuffle, every prefix of the documents has the mix of domains of the whole text. Splits depend on
    document hashes, so a document is nearly always in the same split in larger and smaller collections.

    Args:
        documents: the text in any order; long documents and the last one are cut.
        tokenizer: tokenizer of the model.
        options: amount of text and batching; default: :class:`TextOptions`.
        fields: fields of :class:`TextOptions` that replace those of `options`.

    Raises:
        ExpertcastError: there are fewer than three different documents, or `tokens` or `window` is invalid.
    """
    options = replace(options or TextOptions(), **fields)  # type: ignore[arg-type]
    tokens, window = options.tokens, options.window
    order = list(documents)
    random.Random(options.seed).shuffle(order)
    taken = _tokenise(order, tokenizer, tokens, window)
    hashes = [document.hash for document, _ in taken]
    lengths = dict.fromkeys(hashes, 0)
    for own, (_, ids) in zip(hashes, taken, strict=True):
        lengths[own] += len(ids)
    if len(lengths) < MIN_DOCUMENTS:
        raise ExpertcastError(
            f"only {len(lengths)} different document(s) in {sum(lengths.values())} tokens: train, validation and test "
            f"need one each, so use at least {MIN_DOCUMENTS} documents, or more tokens"
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
    """Assign a split to each document hash.

    The lowest hashes, up to a tenth of the tokens, are test; the highest, up to a tenth, are validation; the others are
    train. Test and validation have at least one document each, the shortest if none fits.

    Args:
        lengths: number of tokens by hash; documents with equal text count together.
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
                break  # filling up with short documents of other hashes would make splits depend on the collection
        splits |= dict.fromkeys(held or [min(free, key=lambda own: lengths[own])], split)
    return splits


def _tokenise(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, tokens: int | None, window: int
) -> list[tuple[Document, TokenIds]]:
    """Tokenise documents until there are `tokens`, each cut to a tenth of them if there are enough documents."""
    read: list[tuple[Document, TokenIds]] = []
    cap = None if tokens is None else max(window, -(-tokens // MIN_DOCUMENTS_WANTED))
    for begin in range(0, len(documents), TOKENIZER_BATCH):
        batch = documents[begin : begin + TOKENIZER_BATCH]
        encoded = token_ids(tokenizer, [document.text for document in batch], tokens)
        read += [(document, np.asarray(ids, dtype=np.int32)) for document, ids in zip(batch, encoded, strict=True)]
        if tokens is not None and sum(len(ids[:cap]) for _, ids in read) >= tokens:
            read = [(document, ids[:cap]) for document, ids in read]
            break
    return list(first_tokens(read, tokens))


def first_tokens(parts: Iterable[tuple[T, TokenIds]], limit: int | None) -> Iterator[tuple[T, TokenIds]]:
    """Yield the parts with the first `limit` tokens (None: all); the last is cut, empty parts are skipped."""
    for part, ids in parts:
        ids = ids[:limit]
        if len(ids):
            yield part, ids
        limit = None if limit is None else limit - len(ids)


# Windows as padded batches: B windows, S tokens of the longest one


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBatch:
    """Windows padded on the right to the longest, and their T real tokens in order."""

    input_ids_BS: Tensor
    mask_BS: Tensor
    token_T: Tensor
    document_T: Tensor
    position_T: Tensor

    def __len__(self) -> int:
        return int(self.token_T.shape[0])


def window_batches(windows: Sequence[Window], batch_size: int) -> Iterator[WindowBatch]:
    """Yield batches of `batch_size` windows in order; the last may be smaller."""
    for begin in range(0, len(windows), batch_size):
        yield pad_windows(windows[begin : begin + batch_size])


def pad_windows(windows: Sequence[Window]) -> WindowBatch:
    """Pad windows to one batch."""
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
