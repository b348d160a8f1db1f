"""Clients of a server, and the figures from their answers.

Clients of OpenAI's library send requests at the same time, each the next one after its answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import openai
from openai import AsyncOpenAI

from benchmarks.serving_sides import BATCHED, EXACT, ON_DEMAND, ONE_BY_ONE, RESIDENT, place
from expertcast.predictors.messages import Json

WAIT_S = 300.0


class _CutOffError(Exception):
    """A stream ended before its text or its token count."""


@dataclass(frozen=True)
class Answer:
    """Answer to one request."""

    prompt: int
    text: str
    tokens: int
    first_s: float
    """Seconds from the request to the first text."""
    seconds: float
    """Seconds from the request to the last text."""


@dataclass(frozen=True)
class Load:
    """Answers to all requests of one load."""

    answers: list[Answer]
    lost: int
    """Number of failed requests."""
    seconds: float


def ask(address: str, model: str, prompts: list[str], *, clients: int, requests: int, new_tokens: int) -> Load:
    """Send prompts in turn, greedily and streamed.

    Args:
        address: URL of the server.
        model: its model's name.
        prompts: sent one after another, and again from the first.
        clients: simultaneous clients.
        requests: total number of requests.
        new_tokens: tokens per request.
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


OTHERS = ("resident", "on_demand", "one_by_one")
"""Sides to compare requests per second with."""
Loads = dict[tuple[str, int], dict[int, Json]]
"""Stored results by side and number of clients, then by round."""


def kept(load: Load, clients: int, before: tuple[float, float] | None, after: tuple[float, float] | None) -> Json:
    """Return the stored form of a load, with texts as hashes.

    Args:
        load: the load.
        clients: simultaneous clients.
        before: the server's hits and misses before the load; None for resident experts.
        after: the same after the load.
    """
    found = {"clients": clients, "seconds": load.seconds, "lost": load.lost, "hits": None, "misses": None}
    if before is not None and after is not None:
        found |= {"hits": after[0] - before[0], "misses": after[1] - before[1]}
    digests = [hashlib.sha256(answer.text.encode()).hexdigest()[:16] for answer in load.answers]
    answers = [{**asdict(answer), "text": text} for answer, text in zip(load.answers, digests, strict=True)]
    return {**found, "answers": answers}


def figures(result: Json) -> Json:
    """Compute `rows` and `ratios` from a result's runs.

    Args:
        result: its `runs` have one entry per side and round: `side`, `round`, and `loads` from :func:`kept`.
    """
    loads: Loads = {}
    for run in sorted(result["runs"], key=lambda run: (place(run["side"]), run["round"])):
        for load in run["loads"]:
            loads.setdefault((run["side"], load["clients"]), {})[run["round"]] = load
    keys = sorted(loads, key=lambda key: (place(key[0]), key[1]))
    ratios = [{"side": side, "clients": clients, **_ratios(side, clients, loads)} for side, clients in keys]
    return {
        "rows": [_row(*key, loads) for key in keys],
        "ratios": [row for row in ratios if any(row[name] for name in OTHERS)],
    }


def _row(side: str, clients: int, loads: Loads) -> Json:
    own = list(loads[side, clients].values())
    answers = [answer for load in own for answer in load["answers"]]
    first = [answer["first_s"] for answer in answers]
    longer = [answer for answer in answers if answer["tokens"] > 1]
    each = [(answer["seconds"] - answer["first_s"]) / (answer["tokens"] - 1) for answer in longer] or [0.0]
    expected = {  # a batched resident side need not agree with itself
        (answer["prompt"], answer["text"])
        for (name, _), by_round in loads.items()
        for load in by_round.values()
        for answer in load["answers"]
        if name == f"{side.rpartition(': ')[0]}: {RESIDENT}"
    }
    hits, misses = (sum(load[name] or 0 for load in own) for name in ("hits", "misses"))
    return {
        "side": side, "clients": clients, "rounds": len(own), "answers": len(answers),
        "lost": sum(load["lost"] for load in own),
        "same": sum((answer["prompt"], answer["text"]) in expected for answer in answers),
        "requests_per_s": statistics.median(map(_speed, own)),
        "first_s": statistics.median(first), "first_s_p95": _p95(first),
        "per_token_s": statistics.median(each), "per_token_s_p95": _p95(each),
        "hit_rate": hits / (hits + misses) if hits + misses else None,
    }  # fmt: skip


def _ratios(side: str, clients: int, loads: Loads) -> dict[str, list[float]]:
    """Return the ratios of a side's requests per second to other sides', by round."""
    server, _, kind = side.rpartition(": ")
    others = {
        "resident": f"{server}: {RESIDENT}" if kind != RESIDENT else "",
        "on_demand": f"{server}: {ON_DEMAND}" if kind == EXACT else "",
        "one_by_one": f"{ONE_BY_ONE}: {kind}" if server == BATCHED else "",
    }
    own, found = loads[side, clients], {}
    for name, other in others.items():
        theirs = loads.get((other, clients), {})
        found[name] = [_speed(own[number]) / _speed(theirs[number]) for number in own if number in theirs]
    return found


def _speed(load: Json) -> float:
    return len(load["answers"]) / float(load["seconds"])


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]
