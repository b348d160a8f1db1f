"""Servers for tests: expertcast's and transformers', over the bundled model, on the loopback interface."""

from __future__ import annotations

import copy
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
from openai import OpenAI
from transformers import PreTrainedModel
from transformers.cli.serve import Serve
from transformers.cli.serving.model_manager import TimedModel

from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.serving.server import ModelServer, listen

NAME = "reference"
WAIT_S = 60.0
"""Timeout; only failing tests reach it."""
PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""TLS context for plain HTTP clients, shared because reading the system's certificates takes 30 ms per client."""
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


TOKENS = 8
Answer = tuple[str, Any, Any]
Ask = Callable[..., Answer]
"""Requests an answer to a prompt: its text, its finish reason and its number of tokens, or None."""


def completed(client: OpenAI, prompt: Any, **asked: Any) -> Answer:
    answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=TOKENS, **asked)
    assert answer.usage is not None
    return answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.total_tokens


def completed_in_parts(client: OpenAI, prompt: Any, **asked: Any) -> Answer:
    parts = list(client.completions.create(model=NAME, prompt=prompt, max_tokens=TOKENS, stream=True, **asked))
    return "".join(part.choices[0].text for part in parts), parts[-1].choices[0].finish_reason, None


def answered(client: OpenAI, prompt: str, **asked: Any) -> Answer:
    messages: Any = [{"role": "user", "content": prompt}]
    answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=TOKENS, **asked)
    return answer.choices[0].message.content or "", answer.choices[0].finish_reason, None


def answered_in_parts(client: OpenAI, prompt: str, **asked: Any) -> Answer:
    messages: Any = [{"role": "user", "content": prompt}]
    parts = client.chat.completions.create(model=NAME, messages=messages, max_tokens=TOKENS, stream=True, **asked)
    return "".join(part.choices[0].delta.content or "" for part in parts), None, None


def responded(client: OpenAI, prompt: str, **asked: Any) -> Answer:
    answer = client.responses.create(model=NAME, input=prompt, max_output_tokens=TOKENS, stream=False, **asked)
    return answer.output_text, None, None


def responded_in_parts(client: OpenAI, prompt: str, **asked: Any) -> Answer:
    events = client.responses.create(model=NAME, input=prompt, max_output_tokens=TOKENS, stream=True, **asked)
    return "".join(event.delta for event in events if event.type == "response.output_text.delta"), None, None


COMPLETED: tuple[Ask, ...] = (completed, completed_in_parts)
ANSWERED: tuple[Ask, ...] = (answered, answered_in_parts)
ASKS: tuple[Ask, ...] = (*COMPLETED, *ANSWERED, responded, responded_in_parts)


def chatting(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer with a chat template."""
    copied = copy.deepcopy(tokenizer)
    copied.chat_template = TEMPLATE
    return copied


class Running:
    """A running server and its address."""

    def __init__(self, address: str, server: ModelServer | None = None, *, batching: bool = False) -> None:
        self.address, self._server, self.batching = address, server, batching

    @property
    def server(self) -> ModelServer:
        assert self._server is not None
        return self._server

    def counted(self, name: str, **labels: str) -> float:
        """Return a sample of the request metrics."""
        return self.server.requests.counts.registry.get_sample_value(f"expertcast_{name}", labels) or 0.0

    def ended(self) -> dict[tuple[str, str], float]:
        """Return finished requests by route and status."""
        (family,) = self.server.requests.counts.ended.collect()
        return {(sample.labels["route"], sample.labels["status"]): sample.value for sample in family.samples}

    def client(self) -> OpenAI:
        """Return a client of OpenAI's library."""
        plain = httpx2.Client(verify=PLAIN)
        return OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=WAIT_S, http_client=plain)

    def post(self, route: str, body: Any, timeout: float = WAIT_S, **asked: Any) -> httpx2.Response:
        """Send a plain HTTP request; JSON also with half of a surrogate pair, or with NaN."""
        headers = {"content-type": "application/json", **asked.pop("headers", {})}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx2.post(
            f"{self.address}{route}", content=content, headers=headers, timeout=timeout, verify=PLAIN, **asked
        )

    def get(self, route: str, **asked: Any) -> httpx2.Response:
        return httpx2.get(f"{self.address}{route}", verify=PLAIN, **asked)


@contextmanager
def served(
    offloaded: OffloadedModel, tokenizer: Any, *, batching: bool = False, kv_tokens: int = 4096, **asked: Any
) -> Iterator[Running]:  # fmt: skip
    """Run expertcast's server inside this context."""
    server = ModelServer(offloaded, tokenizer, NAME, continuous_batching=batching, kv_tokens=kv_tokens, **asked)
    ready, addresses = threading.Event(), list[str]()

    def told(address: str) -> None:
        addresses.append(address)
        ready.set()

    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, args=(listening, told))
        thread.start()
        try:
            assert ready.wait(WAIT_S)
            yield Running(addresses[0], server, batching=batching)
        finally:
            server.stop()
            thread.join(WAIT_S)
            assert not thread.is_alive()
            server.close()


@contextmanager
def transformers_served(model: PreTrainedModel, tokenizer: Any) -> Iterator[Running]:
    """Run transformers' server over a resident model inside this context."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    serve = Serve(host="127.0.0.1", port=port, non_blocking=True, log_level="error", device="cpu")
    try:
        serve._model_manager.loaded_models[f"{NAME}@main"] = TimedModel(model, -1, tokenizer)
        address = f"http://127.0.0.1:{port}"
        until(lambda: _answers(address))
        yield Running(address)
    finally:
        serve.kill_server()


def until(true: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def _answers(address: str) -> bool:
    try:
        return httpx2.get(f"{address}/health", verify=PLAIN).status_code == 200
    except httpx2.HTTPError:
        return False
