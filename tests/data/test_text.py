"""Reading documents: what is read, and the one line for what cannot be."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from expertcast.data.text import TXT_DOCUMENT_CHARS, Document, load_documents, token_ids
from expertcast.predictors.messages import ExpertcastError


def parquet(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_parquet_jsonl_and_folders_give_the_same_documents(tmp_path: Path) -> None:
    rows = [{"text": "one", "domain": "a"}, {"text": "  ", "domain": "a"}, {"text": "three", "domain": "b"}]
    file = parquet(tmp_path / "x.parquet", text=[r["text"] for r in rows], domain=[r["domain"] for r in rows])
    lines = tmp_path / "x.jsonl"
    lines.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    expected = [Document(0, "one", "a"), Document(2, "three", "b")]
    assert load_documents(str(file)) == load_documents([lines]) == expected
    file.unlink()
    assert load_documents(tmp_path) == expected


def test_several_files_number_documents_on(tmp_path: Path) -> None:
    first, second = parquet(tmp_path / "1.parquet", text=["a", "b"]), parquet(tmp_path / "2.parquet", text=["c"])
    assert load_documents([first, second]) == [Document(0, "a"), Document(1, "b"), Document(2, "c")]


def test_txt_joins_paragraphs_into_documents(tmp_path: Path) -> None:
    paragraphs = [f"{number} " * 300 for number in range(30)]
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(paragraphs))
    documents = load_documents(path)
    assert "\n\n".join(document.text for document in documents) == "\n\n".join(paragraphs)
    assert len(documents) > 3
    assert all(len(document.text) >= TXT_DOCUMENT_CHARS for document in documents[:-1])


@pytest.mark.parametrize("blank", ["\n", " ", "x"])
def test_txt_without_blank_lines_is_cut_by_size(tmp_path: Path, blank: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Cuts are at the end of a line, at white space, or within a word; one line reports them."""
    text = blank.join(f"{number:04}xxxxxxxx" for number in range(3000))
    path = tmp_path / "log.txt"
    path.write_text(text)
    documents = load_documents(path)
    assert ("" if blank == "x" else blank).join(document.text for document in documents) == text
    assert all(TXT_DOCUMENT_CHARS <= len(document.text) < 2 * TXT_DOCUMENT_CHARS for document in documents)
    assert len(documents) > 4
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{path}: one text, cut into {len(documents)} documents of about 4000 characters" in said


def test_hash_is_of_the_text_alone() -> None:
    text = "Caf\u00e9.\n\nAll happy families are alike."
    hashes = {Document(3, f"\n {text}\t", "prose").hash, Document(0, text).hash}
    assert hashes == {hashlib.sha256(text.encode()).hexdigest()[:16]}
    assert Document(0, text + ".").hash not in hashes


def test_max_chars_stops_reading(tmp_path: Path) -> None:
    file = parquet(tmp_path / "x.parquet", text=["x" * 10] * 50)
    assert len(load_documents(file, max_chars=95)) == 10


def test_rows_without_text_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"body": "one"}, {"text": 3}, {"body": None}, 1, {"body": "two"}]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_documents(path, column="body") == [Document(0, "one"), Document(4, "two")]
    assert capsys.readouterr().err == f"{path}: skipped 3 of 5 rows, which have no text\n"


def test_no_more_of_a_hub_dataset_is_read_than_tokens_take(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = ({"text": "word " * 2000} for _ in itertools.count())
    monkeypatch.setattr("datasets.load_dataset", lambda *_args, **_kwargs: endless)
    assert len(load_documents("some/corpus", tokens=1000)) == 100
    assert len(load_documents("some/corpus", tokens=1_000_000)) == 1600
    nothing = ({"body": "word"} for _ in itertools.count())
    monkeypatch.setattr("datasets.load_dataset", lambda *_args, **_kwargs: nothing)
    with pytest.raises(ExpertcastError, match=r"some/corpus has no text in column 'text' \(columns: body\): set"):
        load_documents("some/corpus", tokens=1000)


def test_reference_text_has_domains_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    documents = load_documents("reference")
    assert len({document.domain for document in documents}) >= 3
    assert len({document.index for document in documents}) == len(documents)


def test_a_folder_named_reference_is_not_the_bundled_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reference").mkdir()
    assert len(load_documents("reference")) > 1
    (tmp_path / "reference" / "a.txt").write_text("mine")
    with pytest.raises(
        ExpertcastError, match=r"'reference' is the bundled model and also the folder /.*/reference: use ./referen"
    ):
        load_documents("reference")
    assert [document.text for document in load_documents("./reference")] == ["mine"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("missing.parquet", None, "no file"),
        ("./missing", None, "no file"),
        ("table.csv", "text\nhello", "unknown suffix '.csv'"),
        ("broken.parquet", "this is no parquet file", "cannot read"),
        ("broken.jsonl", '{"text": "a"}\n{oops', "line 2: not a JSON object"),
        ("column.jsonl", '{"body": "a"}', "no text in column 'text' (columns: body)"),
        ("deep.jsonl", "[" * 100_000, "line 1: not a JSON object"),
        ("number_too_long.jsonl", '{"text": ' + "1" * 5000 + "}", "line 1: not a JSON object"),
        ("surrogate.jsonl", '{"text": "\\ud800"}', "line 1: text is not valid Unicode"),
        ("domain.jsonl", '{"text": "a", "domain": "\\ud800"}', "line 1: text is not valid Unicode"),
        ("latin.jsonl", b'{"text": "caf\xe9"}', "line 1: not UTF-8 text"),
        ("list.jsonl", '[{"text": "a"}]', "line 1: a JSON array; write its objects"),
        ("word.jsonl", '"a"', "no text in column 'text'"),
        ("number.jsonl", '{"text": 3}', "no text in column 'text'"),
        ("empty.jsonl", "", "no text in"),
        ("blank.txt", " \n\n \n", "no text in"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, name: str, content: str | bytes | None, expected: str) -> None:
    path = f"{tmp_path}{os.sep}{name}"
    if content is not None:
        Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ExpertcastError) as raised:
        load_documents(path)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


def test_damaged_parquet_is_one_clear_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = parquet(tmp_path / "x.parquet", text=[f"document {number}" for number in range(1000)])
    content = whole.read_bytes()
    damaged = {"cut": content[: len(content) // 2], "changed": content[:100] + b"\xff" * 2000 + content[2100:]}
    for name, changed in damaged.items():
        whole.with_stem(name).write_bytes(changed)
        with pytest.raises(ExpertcastError, match=f"cannot read .*{name}.parquet: ") as raised:
            load_documents(whole.with_stem(name))
        assert "\n" not in str(raised.value)
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(ExpertcastError, match=r"cannot read .*latin.txt: 'utf-8' codec"):
        load_documents(tmp_path / "latin.txt")
    with pytest.raises(ExpertcastError, match="no text in"):
        load_documents(parquet(tmp_path / "none.parquet", text=pa.array([], pa.string())))
    assert capfd.readouterr() == ("", ""), "somebody else had something to say too"


def test_local_files_are_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes into anybody's cache, and a name may hold what `datasets` takes for a pattern."""
    cache = tmp_path / "cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    monkeypatch.setattr("datasets.config.HF_UPDATE_DOWNLOAD_COUNTS", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.load.get_session", lambda: pytest.fail("a local file was announced to a server"))
    for name in ("a[1].parquet", "b*.parquet", "-.parquet"):
        assert load_documents(parquet(tmp_path / name, text=[name])) == [Document(0, name)]
    (tmp_path / "c?.txt").write_text("text")
    assert load_documents(tmp_path / "c?.txt") == [Document(0, "text")]
    assert not cache.exists()


def test_parquet_without_text_column_names_its_columns(tmp_path: Path) -> None:
    with pytest.raises(ExpertcastError, match=r"^[^:]*x.parquet has no text in column 'text' \(columns: content, id\)"):
        load_documents(parquet(tmp_path / "x.parquet", content=["a"], id=[1]))


def test_unreachable_hub_dataset_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ExpertcastError, match="neither a file nor a hub dataset: 'nobody/nothing'") as raised:
        load_documents("nobody/nothing")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("suffix", "content"), [("txt", "one two"), ("jsonl", '{"text": "one two"}\n')])
def test_files_of_windows_and_macos(tmp_path: Path, suffix: str, content: str) -> None:
    """A byte order mark is no part of the text, nor is a file of macOS's attributes one of the folder's."""
    (tmp_path / f"a.{suffix}").write_text(content, encoding="utf-8-sig")
    (tmp_path / f"._a.{suffix}").write_bytes(b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X\xff")
    assert load_documents(tmp_path) == [Document(0, "one two")]


def test_a_long_text_is_tokenised_as_far_as_needed(monkeypatch: pytest.MonkeyPatch, reference_tokenizer: Any) -> None:
    """In pieces, whose ids are those of the whole."""
    monkeypatch.setattr("expertcast.data.text.PIECE_CHARS", 1000)
    seen = list[str]()

    def tokenizer(text: str | list[str], **options: Any) -> Any:
        seen.extend([text] if isinstance(text, str) else text)
        return reference_tokenizer(text, **options)

    texts = [" ".join(f"word{number}" for number in range(count)) for count in (3000, 5)]
    whole = reference_tokenizer(texts)["input_ids"]
    assert list(token_ids(tokenizer, texts)) == whole  # type: ignore[arg-type]
    assert max(map(len, seen)) < 2000
    seen.clear()
    ids = next(token_ids(tokenizer, texts[:1], 600))  # type: ignore[arg-type]
    assert ids == whole[0][: len(ids)]
    assert 600 <= len(ids) < 1500
    assert sum(map(len, seen)) < len(texts[0]) / 3


def test_folder_without_text_files(tmp_path: Path) -> None:
    with pytest.raises(ExpertcastError, match="has no"):
        load_documents(tmp_path)
