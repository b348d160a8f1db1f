"""Clients that disconnect, servers that shut down, generations that fail: abandoned work stops, the rest goes on."""

from __future__ import annotations

import copy
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from transformers import PreTrainedModel

from expertcast import OffloadedModel, load_offloaded, offload
from expertcast.checkpoints.bundled import REFERENCE
from tests.families.models import tiny_model
from tests.runtime.conftest import PROMPT, assert_same, greedy
from tests.runtime.faults import INPUTS
from tests.runtime.serving.serving import NAME, WAIT_S, Running, chatting, served, until

LONG = {"prompt": PROMPT, "max_tokens": 900, "temperature": 0}
BOTH = pytest.mark.parametrize("batching", [False, True], ids=["one by one", "batched"])


@pytest.fixture(scope="module")
def offloaded() -> Iterator[OffloadedModel]:
    with load_offloaded(REFERENCE, dtype="fp32", slots=96) as made:
        yield made


def _begun(running: Running, offloaded: OffloadedModel) -> None:
    """Wait until a generation runs."""
    before = offloaded.stats.total.steps
    until(lambda: offloaded.stats.total.steps > before + 5 * len(offloaded.view))


def _quiet(running: Running, offloaded: OffloadedModel) -> None:
    """Wait until no request is in flight and no generation runs."""
    until(lambda: running.counted("http_requests_in_flight") == 0)
    steps = [-1, -2]

    def still() -> bool:
        steps.append(offloaded.stats.total.steps)
        return steps[-1] == steps[-2]

    until(still)


@BOTH
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_frees_its_work(
    batching: bool, stream: bool, offloaded: OffloadedModel, reference_tokenizer: Any
) -> None:
    with served(offloaded, reference_tokenizer, batching=batching) as running:
        with _asked(running, {**LONG, "stream": stream}):
            _begun(running, offloaded)
        _quiet(running, offloaded)
        assert running.counted("http_disconnects_total") == 1
        assert running.ended() == {("/v1/completions", "499"): 1}
        assert running.counted("generated_tokens_total") < 900
        assert running.post("/v1/completions", {**LONG, "max_tokens": 3}).status_code == 200


def _asked(running: Running, body: dict[str, Any]) -> socket.socket:
    """Open a connection with a request; closing it is a disconnect."""
    host, port = running.address.removeprefix("http://").split(":")
    connection, text = socket.create_connection((host, int(port)), WAIT_S), json.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
    return connection


def test_what_waits_for_its_turn_never_begins(offloaded: OffloadedModel, reference_tokenizer: Any) -> None:
    with served(offloaded, reference_tokenizer) as running:
        with running.client().completions.create(model=NAME, stream=True, **LONG) as first:
            next(iter(first))
            with pytest.raises(httpx2.TimeoutException):
                running.post("/v1/completions", LONG, timeout=0.2)
            until(lambda: running.counted("http_disconnects_total") == 1)
            steps = offloaded.stats.total.steps
            assert running.counted("generated_tokens_total") == 0  # the disconnected request
            until(lambda: offloaded.stats.total.steps > steps)  # the first request continues
        _quiet(running, offloaded)
        assert running.counted("http_disconnects_total") == 2


def _streams(client: openai.OpenAI) -> dict[str, Any]:
    """Begin a stream on each route."""
    chat: Any = [{"role": "user", "content": PROMPT}]
    return {
        "/v1/completions": client.completions.create(model=NAME, stream=True, **LONG),
        "/v1/chat/completions": client.chat.completions.create(
            model=NAME, messages=chat, stream=True, max_tokens=900, temperature=0
        ),
        "/v1/responses": client.responses.create(
            model=NAME, input=PROMPT, stream=True, max_output_tokens=900, temperature=0
        ),
    }


@BOTH
def test_streams_end_with_an_error_that_says_why(
    batching: bool, offloaded: OffloadedModel, reference_tokenizer: Any
) -> None:
    with served(offloaded, chatting(reference_tokenizer), batching=batching) as running:
        streams = _streams(running.client())
        next(iter(streams["/v1/completions"]))
        running.server.stop()
        for route in ("/v1/completions", "/v1/chat/completions"):
            with pytest.raises(openai.APIError, match="the server is shutting down") as caught:
                list(streams[route])
            assert caught.value.type == "server_error"
        assert [event.type for event in streams["/v1/responses"]][-2:] == ["error", "response.failed"]
    assert running.ended() == {(route, "503"): 1 for route in streams}


@BOTH
def test_the_server_ends_in_the_middle(batching: bool, offloaded: OffloadedModel, reference_tokenizer: Any) -> None:
    told = list[httpx2.Response]()
    with served(offloaded, reference_tokenizer, batching=batching) as running:
        stream = running.client().completions.create(model=NAME, stream=True, **LONG)
        next(iter(stream))
        waiting = threading.Thread(target=lambda: told.append(running.post("/v1/completions", LONG)))
        waiting.start()
        until(lambda: running.counted("http_requests_in_flight") == 2)
        running.server.stop()
        with pytest.raises(openai.APIError):
            list(stream)
        waiting.join(WAIT_S)
    assert [(answer.status_code, answer.json()["error"]["message"]) for answer in told] == [
        (503, "the server is shutting down")
    ]


def test_the_model_is_whole_behind_a_server_that_ended(reference_tokenizer: Any) -> None:
    model: PreTrainedModel = tiny_model("qwen3_moe")
    expected = greedy(model, INPUTS)
    with offload(model, slots=12) as offloaded:
        with served(offloaded, reference_tokenizer) as running:
            asking = threading.Thread(target=running.post, args=("/v1/completions", LONG))
            asking.start()
            _begun(running, offloaded)
        asking.join(WAIT_S)
        assert_same(greedy(offloaded, INPUTS), expected)
    assert_same(greedy(model, INPUTS), expected)


@BOTH
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_generation_that_fails_is_told_and_the_server_goes_on(
    batching: bool, stream: bool, offloaded: OffloadedModel, reference_tokenizer: Any
) -> None:
    def fail(*_args: object) -> None:
        raise RuntimeError("the disk is gone")

    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}
    with served(offloaded, reference_tokenizer, batching=batching) as running:
        expected = running.post("/v1/completions", body).json()["choices"]
        for _ in range(2):
            hook = offloaded.view[3].experts.register_forward_pre_hook(fail)
            failed = running.post("/v1/completions", {**body, "stream": stream})
            hook.remove()
            assert failed.status_code == 200 if stream else failed.status_code in (500, 503)
            assert '"type": "server_error"' in failed.text or '"type":"server_error"' in failed.text
            assert "the disk is gone" in failed.text
            assert running.get("/health").status_code == 200
            assert running.post("/v1/completions", body).json()["choices"] == expected


def test_batches_are_started_again_with_nothing_of_a_request(
    offloaded: OffloadedModel, reference_tokenizer: Any
) -> None:
    """Options of the first request, and of the model, that batches cannot do."""
    own = copy.deepcopy(offloaded.model.generation_config)
    plain = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    with served(offloaded, reference_tokenizer) as running:
        expected = running.post("/v1/completions", plain).json()["choices"]
    first = int(reference_tokenizer(expected[0]["text"])["input_ids"][0])
    try:
        offloaded.model.generation_config.no_repeat_ngram_size = 1
        with served(offloaded, reference_tokenizer, batching=True) as running:
            biased = running.post("/v1/completions", {**plain, "logit_bias": {str(first): -100}}).json()["choices"]
            assert biased != expected
            assert running.post("/v1/completions", plain).json()["choices"] == expected
            offloaded.model.generation_config.suppress_tokens = [first]
            assert running.post("/v1/completions", plain).json()["choices"] == biased
    finally:
        offloaded.model.generation_config = own


def test_a_name_that_comes_again(offloaded: OffloadedModel, reference_tokenizer: Any) -> None:
    """A client's id that a batch still has, for a request whose client has left."""
    name = {"x-request-id": "again"}
    with served(offloaded, reference_tokenizer, batching=True) as running:
        url = f"{running.address}/v1/completions"
        for stream in (True, False):
            if stream:
                with httpx2.stream("POST", url, json={**LONG, "stream": True}, headers=name, timeout=WAIT_S) as parts:
                    next(parts.iter_text())
            else:
                with pytest.raises(httpx2.TimeoutException):
                    running.post("/v1/completions", LONG, headers=name, timeout=0.2)
            answer = running.post("/v1/completions", {**LONG, "max_tokens": 3}, headers=name)
            assert (answer.status_code, answer.headers["x-request-id"]) == (200, "again")
        _quiet(running, offloaded)
        router = running.server.served.manager._cb.output_router
        assert (router.result_handlers, router.output_queue.qsize()) == ({}, 0)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
def test_a_model_without_a_chat_template(route: str, offloaded: OffloadedModel, reference_tokenizer: Any) -> None:
    with served(offloaded, reference_tokenizer) as running:
        answer = running.post(route, {"messages": [{"role": "user", "content": "a"}], "input": "a"})
        assert answer.status_code == 400
        assert "has no chat template" in answer.json()["error"]["message"]


def test_drafts_write_what_the_model_would(offloaded: OffloadedModel, reference_tokenizer: Any) -> None:
    def answers(model: OffloadedModel) -> list[str]:
        with served(model, chatting(reference_tokenizer)) as running:
            asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
            whole = running.post("/v1/completions", asked).json()["choices"][0]["text"]
            parts = running.client().completions.create(model=NAME, stream=True, **asked)
            return [whole, "".join(part.choices[0].text for part in parts)]

    plain = answers(offloaded)
    with load_offloaded(REFERENCE, dtype="fp32", slots=96, draft="int8") as drafting:
        assert answers(drafting) == plain
        assert drafting.drafting is not None
        assert drafting.stats.as_dict()["drafts"]["by_sequences"]
