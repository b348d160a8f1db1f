"""A server that is told to end in the middle of an answer: how long it takes, and what its client got."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai

from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json
from serving_sides.clients import WAIT_S
from serving_sides.servers import Running, end

PROMPT, NEW_TOKENS = "It is a truth", 900
"""What the bundled model writes behind it has no end within so many tokens."""
TOLD, CUT_OFF, WHOLE, HALF = "told", "cut off", "whole", "half"
_PARTS = 8
"""Parts of the answer that came before the server is told."""


def ended(server: Running, model: str) -> Json:
    """End a server while one client reads a long answer.

    Args:
        server: that nobody else asks.
        model: its name there.

    Returns:
        `seconds` from SIGTERM until its processes were gone, and whether they had to be `killed`; its exit `status`,
        below 0 the signal that ended it; and the client's `answer`: "told" by an error that it ends, "cut off" with the
        connection, "whole" to its last token, or "half" of one that looks whole.

    Raises:
        ExpertcastError: the answer was over before some parts had come.
    """
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(what_came, server.address, model, begun)
        while not begun.wait(0.01):
            if reading.done():
                found = f"{reading.result()}; {server.last_lines()}"
                raise ExpertcastError(f"{server.side.name}: a long answer was over before it had begun: {found}")
        start = time.perf_counter()
        killed = not end(server.process)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "killed": killed, "status": server.process.returncode, "answer": reading.result()}


def what_came(address: str, model: str, begun: threading.Event) -> str:
    """Read a long answer to wherever it ends.

    Args:
        address: of the server.
        model: its name there.
        begun: set once some parts have come.

    Returns:
        as `answer` of :func:`ended`.
    """
    parts, counted, reason = 0, 0, None
    try:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
            stream = client.completions.create(
                model=model, prompt=PROMPT, max_tokens=NEW_TOKENS, temperature=0, stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            for part in stream:
                counted = part.usage.completion_tokens if part.usage else counted
                if part.choices:
                    parts, reason = parts + 1, part.choices[0].finish_reason or reason
                if parts == _PARTS:
                    begun.set()
    except openai.APIConnectionError:
        return CUT_OFF
    except openai.APIError:
        return TOLD
    if counted == NEW_TOKENS:
        return WHOLE
    return HALF if reason in (None, "stop", "length") else TOLD
