"""Clients as people have them: OpenAI's own, so many at once, each asking again as soon as it is answered."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import openai
from openai import AsyncOpenAI

WAIT_S = 300.0


class _CutOffError(Exception):
    """A stream ended without its text, or before it said how long it is."""


@dataclass(frozen=True)
class Answer:
    """What one request got."""

    prompt: int
    text: str
    tokens: int
    first_s: float
    """From asking to the first text."""
    seconds: float
    """From asking to the last."""

    @property
    def per_token_s(self) -> float:
        """Of the tokens after the first; 0 where there are none."""
        return (self.seconds - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True)
class Load:
    """What all requests of one load got."""

    answers: list[Answer]
    lost: int
    """Requests that failed."""
    seconds: float


def ask(address: str, model: str, prompts: list[str], *, clients: int, requests: int, new_tokens: int) -> Load:
    """Ask prompts in turn until so many requests are answered, greedily and streamed.

    Args:
        address: of the server.
        model: its name there.
        prompts: taken one after another, again from the first behind the last.
        clients: that ask at once.
        requests: in all.
        new_tokens: of each.
    """
    return asyncio.run(_load(address, model, prompts, clients, requests, new_tokens))


async def _load(address: str, model: str, prompts: list[str], clients: int, requests: int, tokens: int) -> Load:
    places, answers, lost = iter(range(requests)), list[Answer](), 0

    async def client() -> None:
        nonlocal lost
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as asking:
            for place in places:
                try:
                    answers.append(await _one(asking, model, prompts, place % len(prompts), tokens))
                except (openai.OpenAIError, _CutOffError):
                    lost += 1

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Load(answers, lost, time.perf_counter() - start)


async def _one(client: AsyncOpenAI, model: str, prompts: list[str], prompt: int, tokens: int) -> Answer:
    start, first, last, parts, counted = time.perf_counter(), 0.0, 0.0, list[str](), 0
    stream = await client.completions.create(
        model=model, prompt=prompts[prompt], max_tokens=tokens, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    async for part in stream:
        if part.usage is not None:
            counted = part.usage.completion_tokens
        if part.choices and part.choices[0].text:
            last = time.perf_counter() - start
            first = first or last
            parts.append(part.choices[0].text)
    if not parts or not counted:
        raise _CutOffError
    return Answer(prompt, "".join(parts), counted, first, last)
