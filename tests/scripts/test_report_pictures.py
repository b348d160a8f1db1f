"""The script of the docs' pictures: a missing browser is one line, what it writes is small, and all of it is shown."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import report_pictures  # noqa: E402


def test_missing_browser_is_one_line_and_nothing_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_pictures.main(["--work", str(tmp_path / "work"), "--browser", "no-such-browser"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no browser no-such-browser: install chromium" in line
    assert not (tmp_path / "work").exists()


def test_pictures_are_small_and_keep_what_they_show(tmp_path: Path) -> None:
    image = Image.new("RGB", (300, 200), (255, 255, 255))
    image.paste((1, 114, 178), (10, 10, 40, 40))
    joined = report_pictures.side_by_side([image, image])
    assert joined.size == (2 * 300 + report_pictures.GAP, 200)
    report_pictures.write(joined, tmp_path / "docs" / "p.png")
    back = Image.open(tmp_path / "docs" / "p.png").convert("RGB")
    assert list(back.getdata()) == list(joined.getdata())


def test_docs_show_every_picture_that_the_script_makes() -> None:
    made = {name for name in report_pictures.SHOTS if name.startswith("report")} | {"report-narrow", "sweep-hit-rate"}
    present = {path.stem: path.stat().st_size for path in (ROOT / "docs" / "pictures").iterdir()}
    assert set(present) == made
    assert max(present.values()) < 200_000
    shown = re.findall(r"!\[[^\]]+\]\(pictures/([\w-]+)\.png\)", (ROOT / "docs" / "report.md").read_text())
    assert set(shown) == made
