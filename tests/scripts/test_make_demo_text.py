"""The bundled text holds free rows only, and its script gives the same bytes twice."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import make_demo_text  # noqa: E402

FREE = {"public domain", "CC0-1.0"}


def write_corpus(folder: Path, licences: list[str]) -> None:
    for split in ("train", "validation", "test"):
        columns = {
            "text": [f"{split} {i}" for i in range(len(licences))],
            "domain": ["code"] * len(licences),
            "source": [f"source {licence}" for licence in licences],
            "license": licences,
        }
        pq.write_table(pa.table(columns), folder / f"{split}.parquet")


def test_only_free_rows_are_copied(tmp_path: Path) -> None:
    write_corpus(tmp_path, ["PSF-2.0", "public domain", "PostgreSQL", "CC0-1.0"])
    outs = [tmp_path / "a", tmp_path / "b"]
    for out in outs:
        assert make_demo_text.main(["--corpus", str(tmp_path), "--out", str(out)]) == 0
    rows = pq.read_table(outs[0] / "text" / "test.parquet").to_pylist()
    assert [row["text"] for row in rows] == ["test 1", "test 3"]
    for name in ("text/test.parquet", "text/validation.parquet", "NOTICE.md"):
        assert (outs[0] / name).read_bytes() == (outs[1] / name).read_bytes()
    shipped, trained = (outs[0] / "NOTICE.md").read_text().split("## Data the model was trained on")
    assert "source PSF-2.0" not in shipped
    assert "source PSF-2.0" in trained


@pytest.mark.parametrize(("licences", "words"), [(["PSF-2.0"], "validation split has no row"), ([], "has no rows")])
def test_a_corpus_without_free_rows_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], licences: list[str], words: str
) -> None:
    write_corpus(tmp_path, licences)
    assert make_demo_text.main(["--corpus", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert "\n" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("split", ["validation", "test"])
def test_the_bundled_text_is_free_and_has_several_domains(split: str) -> None:
    rows = pq.read_table(ROOT / "checkpoints" / "reference" / "text" / f"{split}.parquet").to_pylist()
    assert {row["license"] for row in rows} <= FREE
    assert len({row["domain"] for row in rows}) >= 5
    assert sum(len(row["text"]) for row in rows) > 500_000
