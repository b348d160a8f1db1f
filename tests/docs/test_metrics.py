"""The pages as a reader of Markdown sees them; its metrics are those of the code."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from expertcast.runtime.serving.metrics import PREFIX
from tests.runtime.serving.names import FAMILIES, query_name

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "metrics.md").read_text()
SHOWN = {query_name(spec) for spec in FAMILIES}
SERIES = SHOWN | {
    query_name(spec) + suffix
    for spec in FAMILIES
    if spec.kind == "histogram"
    for suffix in ("_bucket", "_sum", "_count")
}


def _names(query: str) -> set[str]:
    return set(re.findall(rf"\b{PREFIX}\w+", query))


def test_the_table_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(expertcast_\w+)` \| (\w+) \| (.*?) ?\| (.*) \|$", PAGE, flags=re.MULTILINE)
    assert [(name, kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows] == [
        (query_name(spec), spec.kind, spec.labels, spec.help) for spec in FAMILIES
    ]


def test_queries_of_the_page_name_what_there_is() -> None:
    assert _names(PAGE) <= SERIES


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]


def tokens(text: str) -> Iterator[Token]:
    """All tokens of a page, those within paragraphs too."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        yield token
        yield from token.children or []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_code(page: Path) -> None:
    text = page.read_text()
    fences = [token for token in tokens(text) if token.type == "fence"]
    assert 2 * len(fences) == len(re.findall(r"^ {0,3}```", text, flags=re.MULTILINE))
    for fence in fences:
        if fence.info == "python":
            compile(fence.content, f"{page.name}:{fence.map}", "exec")
    assert not any("```" in token.content for token in tokens(text) if token.type == "text")


def test_links_of_the_readme_work_where_there_is_no_checkout() -> None:
    """On a package index: they are absolute, to what the checkout holds."""
    text = (ROOT / "README.md").read_text()
    url = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    raw = url.replace("https://github.com", "https://raw.githubusercontent.com")
    links = [
        token.attrGet("href") or token.attrGet("src") for token in tokens(text) if token.type in ("link_open", "image")
    ]
    assert len(links) > 10
    for link in map(str, links):
        assert link.startswith("https://"), link
        if link.startswith((url, raw)):
            path, _, anchor = re.sub(rf"^({url}/blob|{raw})/main/", "", link).partition("#")
            assert (ROOT / path).is_file(), link
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), flags=re.MULTILINE) if anchor else []
            assert not anchor or anchor in [re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in headings]
    left = [
        token.content for token in tokens(text) if token.type == "text" and re.search(r"\[[^\]]+\.md\]", token.content)
    ]
    assert left == []  # a reference without its address
