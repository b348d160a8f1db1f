"""Write the bundled text: the freely licensed rows of the corpus's validation and test splits, and their notice.

python scripts/make_demo_text.py --corpus ../shared/corpus --out checkpoints/reference

OUT/text/validation.parquet test.parquet   columns text, domain, source, license
OUT/NOTICE.md                              sources and licences of this text and of the training data
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from reference_training.data import COLUMNS, Rows, read_rows
from reference_training.report import table

FREE_LICENCES = ("CC0-1.0", "public domain")
SPLITS = ("validation", "test")
TEXT_DIR = "text"
NOTICE_FILE = "NOTICE.md"


def free_rows(rows: Rows) -> Rows:
    """Keep the rows that anyone may copy without conditions, in their order."""
    return [row for row in rows if row["license"] in FREE_LICENCES]


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def parquet_bytes(rows: Rows) -> bytes:
    """Encode rows as parquet; the same rows and the same pyarrow give the same bytes."""
    columns = {name: pa.array([row[name] for row in rows], pa.string()) for name in COLUMNS}
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd", compression_level=19)
    return buffer.getvalue()


def source_table(rows: Rows) -> list[str]:
    """List domain, source and licence with their documents and bytes, as a Markdown table."""
    sizes: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for row in rows:
        sizes[row["domain"], row["source"], row["license"]].append(len(row["text"].encode()))
    lines = [[*kind, f"{len(sizes[kind]):,}", f"{sum(sizes[kind]):,}"] for kind in sorted(sizes)]
    written: list[str] = table(["domain", "source", "licence", "documents", "bytes"], lines)
    return written


def notice(text: Rows, training: Rows) -> str:
    """Write NOTICE.md from the rows that are shipped and the rows that are only trained on."""
    return "\n".join(
        [
            "# Notice",
            "",
            "## Text in this folder",
            "",
            f"`{TEXT_DIR}/validation.parquet` and `{TEXT_DIR}/test.parquet` hold rows of the corpus's validation and",
            "test splits, unchanged, and only rows that are in the public domain or under CC0-1.0. Each row names its",
            "source and licence. The model was not trained on them; its validation loss is measured on the whole",
            "validation split, of which this is a part.",
            "",
            *source_table(text),
            "",
            "## Data the model was trained on",
            "",
            "Not in this folder. The sources under PSF-2.0 (Copyright Python Software Foundation) and under the",
            "PostgreSQL licence (Copyright The PostgreSQL Global Development Group) were used for training only.",
            "",
            *source_table(training),
            "",
        ]
    )


def main(arguments: list[str]) -> int:
    """Run the command line; 0, or 2 with one line on stderr that says what was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", required=True, help="folder with train, validation and test parquet files")
    parser.add_argument("--out", required=True, type=Path, help="folder to write the text and its notice to")
    options = parser.parse_args(arguments)
    try:
        kept = {split: free_rows(read_rows(options.corpus, split)) for split in SPLITS}
        training = read_rows(options.corpus, "train")
        if empty := [split for split, rows in kept.items() if not rows]:
            raise ValueError(f"the {empty[0]} split has no row under {' or '.join(FREE_LICENCES)}")
    except ValueError as error:
        print(f"make_demo_text: {error}", file=sys.stderr)
        return 2
    for split, rows in kept.items():
        write_atomically(options.out / TEXT_DIR / f"{split}.parquet", parquet_bytes(rows))
    shipped = [row for rows in kept.values() for row in rows]
    write_atomically(options.out / NOTICE_FILE, notice(shipped, training).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
