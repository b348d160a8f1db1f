"""The server gives OpenAI's client the answers of transformers' server with the resident model."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
import torch
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast import load_offloaded, offload
from expertcast.checkpoints.bundled import REFERENCE
from tests.families.models import tiny_model
from tests.runtime.conftest import PROMPTS
from tests.runtime.serving.names import FAMILIES, query_name
from tests.runtime.serving.serving import (
    ASKS,
    NAME,
    TOKENS,
    WAIT_S,
    Ask,
    Running,
    chatting,
    completed,
    completed_in_parts,
    served,
    transformers_served,
    until,
)

ACCEPTED = {
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;"
    "q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2":
        "application/openmetrics-text; version=1.0.0",
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1": "application/openmetrics-text; version=1.0.0",
    "text/plain;version=0.0.4": "text/plain; version=0.0.4",
}  # fmt: skip
"""Accept headers of Prometheus 3, Prometheus 2 and older ones."""


@pytest.fixture(scope="module")
def tokenizer(reference_tokenizer: Any) -> Any:
    return chatting(reference_tokenizer)


PAIRS = [(ASKS[place % len(ASKS)], PROMPTS[place % len(PROMPTS)]) for place in range(6)]
"""Every kind of request with every prompt."""


@pytest.fixture(scope="module")
def expected(reference_fp32: PreTrainedModel, tokenizer: Any) -> dict[tuple[str, str], tuple[Any, ...]]:
    with transformers_served(reference_fp32, tokenizer) as resident:
        client = resident.client()
        return {(ask.__name__, prompt): ask(client, prompt, temperature=0) for ask, prompt in PAIRS}


@pytest.fixture(scope="module", params=[False, True], ids=["one by one", "batched"])
def running(request: pytest.FixtureRequest, tokenizer: Any) -> Iterator[Running]:
    with (
        load_offloaded(REFERENCE, dtype="fp32", slots=96, predictor="next_norm", forecasts="always") as offloaded,
        served(offloaded, tokenizer, batching=request.param) as server,
    ):
        yield server


def test_as_transformers_with_the_resident_model(
    running: Running, expected: dict[tuple[str, str], tuple[Any, ...]]
) -> None:
    client = running.client()
    assert all(texts[0] for texts in expected.values())
    for ask, prompt in PAIRS:
        assert ask(client, prompt, temperature=0) == expected[ask.__name__, prompt], (ask.__name__, prompt)


def test_several_at_once(running: Running, expected: dict[tuple[str, str], tuple[Any, ...]]) -> None:
    def ask(pair: tuple[Ask, str]) -> None:
        asked, prompt = pair
        assert asked(running.client(), prompt, temperature=0) == expected[asked.__name__, prompt]

    with ThreadPoolExecutor(8) as clients:
        list(clients.map(ask, PAIRS))
    until(lambda: running.counted("http_requests_in_flight") == 0)


def test_models_and_health(running: Running) -> None:
    client = running.client()
    (model,) = client.models.list()
    assert client.models.retrieve(NAME) == model
    assert model.id == NAME
    assert running.get("/v1/models/other").status_code == running.get("/v1/models/").status_code == 404
    assert running.get("/health").json() == {"status": "ok"}


def test_the_page_counts_what_was_answered(running: Running) -> None:
    answered = running.counted("http_requests_total", route="/v1/completions", status="200")
    tokens = running.counted("generated_tokens_total")
    completed(running.client(), PROMPTS[0], temperature=0)
    until(lambda: running.counted("http_requests_in_flight") == 0)
    page = running.get("/metrics").text
    assert f'expertcast_http_requests_total{{route="/v1/completions",status="200"}} {answered + 1}' in page
    assert f"expertcast_generated_tokens_total {tokens + TOKENS}" in page


@pytest.mark.parametrize(("accept", "kind"), ACCEPTED.items())
def test_the_page_as_prometheus_asks_for_it(running: Running, accept: str, kind: str) -> None:
    """Parsed by Prometheus' own client; its OpenMetrics parser is strict."""
    completed(running.client(), PROMPTS[0], temperature=0)
    until(lambda: running.counted("http_requests_in_flight") == 0)
    answer = running.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"].startswith(kind)
    assert answer.headers["content-encoding"] == "gzip"
    read = openmetrics if kind.startswith("application/") else plain
    values = {sample.name: sample.value for family in read(answer.text) for sample in family.samples}
    assert {query_name(spec) for spec in FAMILIES if "tokens" in spec.name and not spec.labels} <= {*values}
    assert values["expertcast_generated_tokens_total"] == running.counted("generated_tokens_total") > 0


def test_unknown_routes_are_one_label(running: Running) -> None:
    before = running.counted("http_requests_total", route="other", status="404")
    for number in range(3):
        assert running.post(f"/v1/junk{number}", {}).status_code == 404
    until(lambda: running.counted("http_requests_total", route="other", status="404") == before + 3)
    page = running.get("/metrics").text
    assert f'expertcast_http_requests_total{{route="other",status="404"}} {before + 3}' in page
    assert "junk" not in page


@pytest.mark.parametrize("route", ["/load_model", "/reset", "/v1/audio/transcriptions"])
def test_nobody_unloads_the_model(running: Running, route: str) -> None:
    assert running.post(route, {"model": "other"}).status_code == 404


def test_a_client_gets_its_id_back(running: Running) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 2}
    for name in ("mine", "a-1:b.c", "two words", "x" * 65, "caf\xe9", 'a"b', ""):
        answer = running.post("/v1/completions", body, headers={"x-request-id": name.encode("latin-1")})
        assert (answer.headers["x-request-id"] == name) == (name in ("mine", "a-1:b.c"))
        assert re.fullmatch(r"[\w.:-]{1,64}", answer.headers["x-request-id"])
        assert answer.json()["id"].startswith(f"{answer.headers['x-request-id']}-")


def test_prompts_in_every_form(running: Running, tokenizer: Any) -> None:
    """One prompt as a text, as tokens and in a list, streamed too; several in one request."""
    client = running.client()
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    expected = [completed(client, prompt, temperature=0) for prompt in PROMPTS]
    for prompt in (ids[0], [ids[0]], [PROMPTS[0]]):
        assert completed(client, prompt, temperature=0) == expected[0]
        assert completed_in_parts(client, prompt, temperature=0)[:2] == expected[0][:2]
    until(lambda: running.counted("http_requests_in_flight") == 0)
    for prompts in (PROMPTS, ids):
        before = running.counted("prompt_tokens_total"), running.counted("generated_tokens_total")
        answer = client.completions.create(model=NAME, prompt=prompts, max_tokens=TOKENS, temperature=0)
        assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
            (place, *each[:2]) for place, each in enumerate(expected)
        ]
        assert answer.usage is not None
        assert answer.usage.total_tokens == sum(each[2] for each in expected)
        until(lambda: running.counted("http_requests_in_flight") == 0)
        added = (
            running.counted("prompt_tokens_total") - before[0],
            running.counted("generated_tokens_total") - before[1],
        )
        assert added == (answer.usage.prompt_tokens, answer.usage.completion_tokens)


BODIES = {
    b"x": 400, b"[]": 400, b"": 400, b'{"prompt": "\xff"}': 400, b'{"prompt": "\xed\xa0\x80"}': 400,
    b'{"prompt": "\\ud800"}': 400, b'{"seed": ' + b"9" * 5000 + b"}": 400,
    b'{"user": ' + b"[" * 900 + b"]" * 900 + b"}": 400, b'{"user": ' + b"[" * 200000 + b"]" * 200000 + b"}": 400,
    b'{"prompt": "' + b"a" * (5 << 20) + b'"}': 413,
}  # fmt: skip


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(("body", "status"), BODIES.items(), ids=[str(body[:20]) for body in BODIES])
def test_bodies_that_are_refused(route: str, body: bytes, status: int, running: Running) -> None:
    answer = running.post(route, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)
    assert len(answer.json()["error"]["message"]) < 200


def test_a_page_in_a_browser_cannot_ask(running: Running) -> None:
    """It may send this type to any address without being asked itself."""
    answer = running.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"content-type": "text/plain"})
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("length", [True, False])
def test_a_client_that_sends_a_long_body_first_gets_the_answer(length: bool, running: Running) -> None:
    """It reads nothing before it has sent all. With or without a length."""
    connection = HTTPConnection(urlsplit(running.address).netloc, timeout=WAIT_S)
    body = [b"a" * (1 << 20)] * 32
    headers = {"content-type": "application/json", "connection": "close"}
    connection.request("POST", "/v1/completions", b"".join(body) if length else body, headers)
    assert connection.getresponse().status == 413
    connection.close()
    assert running.get("/health").status_code == 200


def test_a_long_text_blocks_nobody(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that takes as long as it likes: other requests that need no tokenizer are answered."""
    begun, go_on = threading.Event(), threading.Event()
    own = PreTrainedTokenizerBase.__call__

    def slow(tokenizer: Any, *args: Any, **options: Any) -> Any:
        begun.set()
        assert go_on.wait(WAIT_S)
        return own(tokenizer, *args, **options)

    with ThreadPoolExecutor(1) as clients:
        monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", slow)
        answer = clients.submit(running.post, "/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 2})
        assert begun.wait(WAIT_S)
        assert running.get("/health").json() == {"status": "ok"}
        assert running.get("/v1/models").status_code == 200
        go_on.set()
        assert answer.result().status_code == 200


def test_the_key(reference_tokenizer: Any) -> None:
    with (
        offload(tiny_model("qwen3_moe", torch.float32), slots=12) as offloaded,
        served(offloaded, reference_tokenizer, api_key="secret") as running,
    ):
        body = {"prompt": "a", "max_tokens": 1}
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer other"}, 401),
            ({"authorization": "Bearer secret"}, 200),
        ):
            assert running.post("/v1/completions", body, headers=headers).status_code == status
            assert running.get("/v1/models", headers=headers).status_code == status
            assert running.get("/metrics", headers=headers).status_code == status
            assert running.get("/health", headers=headers).status_code == 200


ROOM = 256
ENDLESS = {"0": -100}
"""Biases against the end of the text."""


def test_requests_end_where_reserved_memory_does(reference_tokenizer: Any) -> None:
    with (
        load_offloaded(REFERENCE, dtype="fp32", slots=192, context=ROOM) as offloaded,
        served(offloaded, reference_tokenizer) as server,
    ):

        def ask(words: int) -> httpx2.Response:
            body = {"prompt": "river " * words, "max_tokens": 900, "logit_bias": ENDLESS}
            return server.post("/v1/completions", body)

        assert ask(90).json()["usage"]["total_tokens"] == ROOM
        refused = ask(300)
        assert refused.status_code == 400
        assert f"--context of this server allows at most {ROOM - 1}" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_requests_that_fill_the_cache_alone_and_together(reference_tokenizer: Any) -> None:
    with (
        load_offloaded(REFERENCE, dtype="fp32", slots=768) as offloaded,
        served(offloaded, reference_tokenizer, batching=True, kv_tokens=ROOM) as server,
    ):

        def ask(words: int, tokens: int = 900) -> httpx2.Response:
            body = {"prompt": "river " * words, "max_tokens": tokens, "logit_bias": ENDLESS}
            return server.post("/v1/completions", body)

        for words in (90, 126):
            assert ask(words).json()["usage"]["total_tokens"] == ROOM
        for words in (128, 300):
            refused = ask(words, 1)
            assert refused.status_code == 400
            assert f"at most {ROOM - 1}" in refused.json()["error"]["message"]
        alone = [ask(words).json()["choices"] for words in (100, 110)]
        with ThreadPoolExecutor(4) as clients:
            together = [answer.json()["choices"] for answer in clients.map(ask, [100, 110] * 2)]
        assert together == alone * 2
        assert server.get("/health").status_code == 200
