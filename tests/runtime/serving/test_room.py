"""What has no room among the keys and values of a batch is told, or waits; nothing of it ends the server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.runtime import load_offloaded
from tests.runtime.serving.serving import served

ROOM = 256
ENDLESS = '{"eos_token_id": -1}'


def test_requests_that_fill_the_cache_alone_and_together(reference_tokenizer: Any) -> None:
    with (
        load_offloaded(REFERENCE, dtype="fp32", slots=768) as offloaded,
        served(offloaded, reference_tokenizer, batching=True, kv_tokens=ROOM) as server,
    ):

        def ask(words: int, tokens: int = 900) -> httpx2.Response:
            body = {"prompt": "river " * words, "max_tokens": tokens, "generation_config": ENDLESS}
            return server.post("/v1/completions", body)

        for words in (90, 126):
            assert ask(words).json()["usage"]["total_tokens"] == ROOM
        for words in (128, 300):
            refused = ask(words, 1)
            assert refused.status_code == 400
            assert f"by its --kv-tokens this server takes {ROOM - 1} at most" in refused.json()["error"]["message"]
        alone = [ask(words).json()["choices"] for words in (100, 110)]
        with ThreadPoolExecutor(6) as clients:
            together = [answer.json()["choices"] for answer in clients.map(ask, [100, 110] * 3)]
        assert together == alone * 3
        assert httpx2.get(f"{server.address}/health").status_code == 200
