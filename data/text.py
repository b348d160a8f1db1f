"""Load documents from a hub dataset, local files, or the bundled text (`reference`).

Local .parquet and .jsonl files have a column `text` (and optionally `domain`) and one document per row. A .txt file is
cut into documents of about `TXT_DOCUMENT_CHARS` characters.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from expertcast.checkpoints.bundled import BUNDLED, is_bundled
from expertcast.predictors.messages import ExpertcastError, Json, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT_COLUMN = "text"
DOMAIN_COLUMN = "domain"
SUFFIXES = (".parquet", ".jsonl", ".txt")
REFERENCE_FILES = ("text/validation.parquet", "text/test.parquet")
TXT_DOCUMENT_CHARS = 4000
PIECE_CHARS = 2**16
"""Characters that are tokenised together."""
MOST_CHARS = 10**9
"""Maximum number of characters in memory."""
CHARS_PER_TOKEN = 16
"""Characters per token, an upper bound that leaves some choice of documents."""
FEWEST_CHARS = 10**6
ROWS_WITHOUT = 100_000
"""Number of rows without text after which reading stops."""
PARQUET_BATCH = 1000
"""Rows per read."""
_ENDS = (re.compile(r"\n\s*\n"), re.compile(r"\n"), re.compile(r"\s"))
"""Places to cut a long text, in order of preference: blank lines, ends of lines, white space."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Document:
    """A document; windows never span two documents."""

    index: int
    """Row number over all files."""
    text: str
    domain: str = ""

    @property
    def hash(self) -> str:
        """First 64 bits of the SHA-256 of the stripped text, in hexadecimal; identifies the text in any source."""
        return text_hash(self.text)


def text_hash(text: str) -> str:
    """Return :attr:`Document.hash` of a text."""
    return hashlib.sha256(text.strip().encode()).hexdigest()[:16]


def load_documents(
    data: str | Path | Sequence[str | Path],
    *,
    column: str = TEXT_COLUMN,
    tokens: int | None = None,
    max_chars: int = MOST_CHARS,
) -> list[Document]:
    """Read documents from `reference`, files, folders of files, or hub datasets (split `train`).

    Rows without text are skipped, and their number is printed. Reading stops at `max_chars` characters.

    Args:
        data: one or several names.
        column: column with the text.
        tokens: tokens needed; a hub dataset is read only as far as they require (default: all of it).
        max_chars: maximum number of characters.

    Returns:
        Documents in the order of the files.

    Raises:
        ExpertcastError: a file is missing, unreadable or of unknown suffix, or there is no text.

    Example:
        >>> import expertcast
        >>> documents = expertcast.load_documents("reference")
        >>> documents[0].domain
        'math'
    """
    names = [data] if isinstance(data, (str, Path)) else list(data)
    if column != TEXT_COLUMN and all(str(name).endswith((".txt", BUNDLED.name)) for name in names):
        raise ExpertcastError(f"column {column!r} (--text-column) is of tables, and these are texts: leave it out")
    documents: list[Document] = []
    chars = 0
    for index, (text, domain) in enumerate(row for name in names for row in _rows(str(name), tokens, column)):
        if text.strip():
            documents.append(Document(index, text, domain))
            chars += len(text)
        if chars >= max_chars:
            break
    if not documents:
        raise ExpertcastError(f"no text in {', '.join(map(str, names))}: every document is empty")
    return documents


def bundled_ids(tokenizer: PreTrainedTokenizerBase, tokens: int, known: Collection[str] = ()) -> list[int]:
    """Return the first token ids of the bundled text.

    Args:
        tokenizer: tokenizer of a model.
        tokens: number of ids.
        known: hashes of documents to skip (:attr:`Document.hash`).

    Raises:
        ExpertcastError: the text is too short, or the tokenizer yields no tokens.
    """
    ids: list[int] = []
    for document in load_documents(BUNDLED):
        if document.hash not in known:
            ids += next(token_ids(tokenizer, [document.text], tokens))
        if len(ids) >= tokens:
            return ids[:tokens]
    if not ids:
        raise ExpertcastError("the model's tokenizer yields no tokens: put its files into the model's folder")
    raise ExpertcastError(f"the bundled text has {len(ids)} tokens, {tokens} are too many: use fewer")


def token_ids(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], limit: int | None = None
) -> Iterator[list[int]]:
    """Yield the token ids of each text, the first `limit` or more.

    A long text is tokenised in pieces, each ending before white space, since a tokenizer takes 170 bytes of memory per
    character. The piece with token number `limit` is the last one.
    """
    ends = [_piece_end(text, 0) for text in texts]
    first = tokenizer([text[:end] for text, end in zip(texts, ends, strict=True)], verbose=False)["input_ids"]
    for text, end, ids in zip(texts, ends, first, strict=True):
        while end < len(text) and (limit is None or len(ids) < limit):
            begin, end = end, _piece_end(text, end)
            ids += tokenizer(text[begin:end], verbose=False, add_special_tokens=False)["input_ids"]
        yield ids


def _piece_end(text: str, begin: int) -> int:
    """Return where the piece that starts at `begin` ends: before white space near its full length, if there is any."""
    end = begin + PIECE_CHARS
    found = None if end >= len(text) else _ENDS[-1].search(text, end, end + TXT_DOCUMENT_CHARS)
    return min(len(text), found.start() if found else end)


def _rows(name: str, tokens: int | None, column: str) -> Iterator[tuple[str, str]]:
    """Yield (text, domain) of the documents of one source; a hub dataset is read only as far as `tokens` require."""
    path = Path(name)
    if path == BUNDLED or is_bundled(name, *(f"*{suffix}" for suffix in SUFFIXES)):
        for bundled in REFERENCE_FILES:
            yield from _file_rows(BUNDLED / bundled, TEXT_COLUMN)
    elif path.is_dir():
        files = sorted(path for path in path.iterdir() if path.suffix in SUFFIXES and not path.name.startswith("."))
        if not files:
            raise ExpertcastError(f"folder {name} has no {', '.join(SUFFIXES)} file: use files or a hub dataset id")
        for file in files:
            yield from _file_rows(file, column)
    elif path.exists() or path.suffix in SUFFIXES or not _HUB_ID.fullmatch(name):
        yield from _file_rows(path, column)
    else:
        yield from _hub_rows(name, tokens, column)


def _file_rows(path: Path, column: str) -> Iterator[tuple[str, str]]:
    if not path.is_file():
        raise ExpertcastError(f"no file {path}: use a local {', '.join(SUFFIXES)} file or a hub dataset id")
    readers = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows, ".txt": _txt_rows}
    if path.suffix not in readers:
        raise ExpertcastError(f"{path}: unknown suffix {path.suffix!r}; convert it to {', '.join(SUFFIXES)}")
    return readers[path.suffix](path, column)


def _parquet_rows(path: Path, column: str) -> Iterator[tuple[str, str]]:
    from pyarrow.parquet import ParquetFile  # slow to import

    with _reading(path), ParquetFile(path) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise _no_text(str(path), column, names)
        columns = [name for name in (column, DOMAIN_COLUMN) if name in names]
        rows = (row for batch in file.iter_batches(PARQUET_BATCH, columns=columns) for row in batch.to_pylist())
        yield from _with_text(str(path), ((str(path), row) for row in rows), column)


def _jsonl_rows(path: Path, column: str) -> Iterator[tuple[str, str]]:
    """Parse line by line. `datasets` takes 2.4 times as long (0.49 s against 0.20 s for 59 MB) and 180 MB more memory,
    reports a bad row by its offset in a 10 MB block, and accepts a list as a document."""
    try:
        with path.open("rb") as lines:
            places = ((f"{path}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip())
            rows = ((where, _json_object(where, line)) for where, line in places)
            yield from _with_text(str(path), rows, column)
    except OSError as error:
        raise ExpertcastError(f"cannot read {path}: {error.strerror}") from error


def _json_object(where: str, line: bytes) -> Json:
    """Parse one line, with or without a byte order mark; a number, string or null yields an empty object."""
    try:
        row = json.loads(line.removeprefix(codecs.BOM_UTF8).decode())
    except UnicodeDecodeError:
        raise ExpertcastError(f"{where}: not UTF-8 text; convert the file") from None
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else first_line(error)
        raise ExpertcastError(f"{where}: not a JSON object ({reason}); write one per line") from None
    if isinstance(row, list):
        raise ExpertcastError(f"{where}: a JSON array; write its objects without brackets and commas, one per line")
    return row if isinstance(row, dict) else {}


def _txt_rows(path: Path, column: str) -> Iterator[tuple[str, str]]:
    with _reading(path):
        text = path.read_text(encoding="utf-8").removeprefix("\ufeff")
    documents = cut_text(text)
    if len(documents) > 1:
        how = f"{len(documents)} documents of about {TXT_DOCUMENT_CHARS} characters"
        print(f"{path}: one text, cut into {how} (at blank lines if possible)", file=sys.stderr)
    yield from ((document, "") for document in documents)


def cut_text(text: str) -> list[str]:
    """Cut a long text into documents of at least 4000 and fewer than 8000 characters.

    A cut is at the first blank line after 4000 characters, or else at the end of a line, at white space, or within a
    word. The last document may be shorter.
    """
    documents, begin, chars = list[str](), 0, TXT_DOCUMENT_CHARS
    while len(text) - begin > chars:
        first, last = begin + chars, begin + 2 * chars
        ends = _ENDS if last < len(text) else _ENDS[:1]
        found = next(filter(None, (end.search(text, first, last) for end in ends)), None)
        if found is None and last >= len(text):
            break
        documents.append(text[begin : found.start() if found else first])
        begin = found.end() if found else first
    return [*documents, text[begin:]] if begin < len(text) or not documents else documents


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert errors of reading to one line."""
    try:
        yield
    except ExpertcastError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ExpertcastError(f"cannot read {path}: {first_line(error)}") from error


def _hub_rows(name: str, tokens: int | None, column: str) -> Iterator[tuple[str, str]]:
    from datasets import load_dataset

    enough = math.inf if tokens is None else max(FEWEST_CHARS, CHARS_PER_TOKEN * tokens)
    chars = 0
    try:
        rows = ((name, row) for row in load_dataset(name, split="train", streaming=True))
        for text, domain in _with_text(name, rows, column):
            yield text, domain
            chars += len(text)
            if chars >= enough:
                print(f"{name}: read the first {chars:,} characters, for {tokens:,} tokens", file=sys.stderr)
                return
    except ExpertcastError:
        raise
    except Exception as error:  # the hub client raises many kinds; all mean that the data is unavailable
        raise ExpertcastError(f"neither a file nor a hub dataset: {name!r} ({first_line(error)})") from error


def _with_text(what: str, rows: Iterable[tuple[str, Json]], column: str) -> Iterator[tuple[str, str]]:
    """Yield (text, domain) of rows with their places; rows without text yield an empty text and are counted.

    Raises:
        ExpertcastError: no row has text, or a text is not valid Unicode.
    """
    count, without, names = 0, 0, set[str]()
    for count, (where, row) in enumerate(rows, start=1):
        text, names = row.get(column), names | row.keys()
        if not isinstance(text, str):
            text, without = "", without + 1
        if without == count == ROWS_WITHOUT:
            break
        yield text, _domain(where, text, row)
    if count and without == count:
        raise _no_text(what, column, sorted(names))
    if without:
        print(f"{what}: skipped {without:,} of {count:,} rows, which have no text", file=sys.stderr)


def _no_text(what: str, column: str, names: Iterable[str]) -> ExpertcastError:
    found = ", ".join(names) or "none"
    return ExpertcastError(f"{what} has no text in column {column!r} (columns: {found}): set --text-column")


def _domain(where: str, text: str, row: Json) -> str:
    domain = str(row.get(DOMAIN_COLUMN) or "")
    try:
        f"{text} {domain}".encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair: valid in JSON, but tokenizers reject it
        raise ExpertcastError(f"{where}: text is not valid Unicode ({error.reason}); remove it") from None
    return domain
