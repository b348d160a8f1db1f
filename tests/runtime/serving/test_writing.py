"""A stream is cut where the whole text is, however it comes in parts."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from transformers.cli.serving.utils import ReasoningText

from expertcast.runtime.serving.parameters import CutStream, cut

TEXTS = st.text(alphabet="ab ", max_size=12)
STOPS = st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), min_size=1, max_size=3)


def _streamed(parts: list[Any], stops: list[str]) -> list[Any]:
    async def read() -> list[Any]:
        queue = asyncio.Queue[Any]()
        for part in [*parts, None]:
            queue.put_nowait(part)
        stream, items = CutStream(queue, stops), list[Any]()
        while (item := await stream.get()) is not None:
            items.append(item)
        return items

    return asyncio.run(read())


@given(parts=st.lists(TEXTS, max_size=6), stops=STOPS)
def test_parts_are_the_whole_up_to_its_first_stop(parts: list[str], stops: list[str]) -> None:
    assert "".join(_streamed(parts, stops)) == cut("".join(parts), stops)


def test_nothing_is_shown_that_may_begin_a_stop() -> None:
    async def read() -> None:
        queue = asyncio.Queue[Any]()
        stream = CutStream(queue, ["END"])
        queue.put_nowait("the E")
        assert await stream.get() == "the "
        queue.put_nowait("N")
        assert queue.qsize() == 1
        try:
            raise AssertionError(stream.get_nowait())
        except asyncio.QueueEmpty:
            queue.put_nowait("O")
        assert await stream.get() == "ENO"

    asyncio.run(read())


def test_what_is_no_text_passes_and_keeps_its_place() -> None:
    thought = ReasoningText("END of thought")
    assert _streamed(["a E", thought, "ND"], ["END"]) == ["a ", "E", thought, "ND"]
    assert _streamed(["a END", thought, "b"], ["END"]) == ["a ", thought]
