"""What a request's text is written with that transformers does not know: OpenAI's penalties, and stops that are cut."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.cli.serving.utils import ReasoningText


class Penalties(LogitsProcessor):  # type: ignore[misc]
    """Takes from the logit of every token that was generated: `presence` once, and `frequency` each time.

    Args:
        presence, frequency: as OpenAI's parameters.
        prompt_tokens: tokens before the generated ones.
    """

    supports_continuous_batching = False

    def __init__(self, presence: float, frequency: float, prompt_tokens: int) -> None:
        self._presence, self._frequency, self._prompt_tokens = presence, frequency, prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Of tokens `[B, T]` and logits `[B, V]`, the logits less the penalties."""
        new_BT = input_ids[:, self._prompt_tokens :]
        counts_BV = torch.zeros_like(scores).scatter_add_(1, new_BT, torch.ones_like(new_BT, dtype=scores.dtype))
        return scores - self._frequency * counts_BV - self._presence * (counts_BV > 0)


def cut(text: str, stops: Sequence[str]) -> str:
    """A text up to the first of its stops."""
    return text[: min((at for at in map(text.find, stops) if at >= 0), default=len(text))]


class CutStream:
    """A stream of transformers' server up to the first stop, which never shows, not in parts either.

    Args:
        queue: of what the streamer puts in: texts, other things between them, and an end.
        stops: none of them empty.
    """

    def __init__(self, queue: asyncio.Queue[Any], stops: Sequence[str]) -> None:
        self._queue, self._stops = queue, stops
        self._ready = deque[Any]()
        self._held = ""
        self._over = False

    async def get(self) -> Any:
        """The next item."""
        while not self._ready:
            self._take(await self._queue.get())
        return self._ready.popleft()

    def get_nowait(self) -> Any:
        """The next item.

        Raises:
            asyncio.QueueEmpty: there is none yet.
        """
        while not self._ready:
            self._take(self._queue.get_nowait())
        return self._ready.popleft()

    def _take(self, item: Any) -> None:
        if isinstance(item, str) and not isinstance(item, ReasoningText):
            if self._over:
                return
            self._held += item
            text = cut(self._held, self._stops)
            self._over = text != self._held
            shown = len(text) if self._over else len(text) - self._beginning(text)
            self._show(text[:shown])
            self._held = "" if self._over else text[shown:]
        else:
            self._show(self._held)
            self._held = ""
            self._ready.append(item)

    def _show(self, text: str) -> None:
        if text:
            self._ready.append(text)

    def _beginning(self, text: str) -> int:
        """Characters at the end that may be the beginning of a stop."""
        longest = max(map(len, self._stops)) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
