"""Send a server odd requests, good ones among them, and check the answers to the good ones.

    python scripts/hostile_client.py --requests 5000 --seed 0 --json hostile.json

The server is `expertcast serve` over the bundled model, first one by one and then with continuous batching. Its
tokenizer has a token that the model lacks. Every fifth request is good. The others are good ones with some fields of
OpenAI's API, or unknown ones, replaced by odd values: of another type, out of range, nested, long, not Unicode;
with odd headers, methods, paths or bodies, and clients that leave early. All are drawn from the seed; 16 clients send
them. The exit status is 1 unless in both modes

    every good request has the text that it has alone,
    no answer has a status of 500 or more, or an error of the server in its stream,
    every refusal is one short line in OpenAI's format,
    /health is answered within a second throughout,
    memory has an end: at the peak, and from the first third of the requests on.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import expertcast

REFERENCE = Path(expertcast.__file__).parent / "checkpoints" / "reference"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
AT_ONCE, EVERY, START_S, WAIT_S = 16, 5, 300.0, 300.0
HEALTH_S = 1.0
SPAWN = multiprocessing.get_context("spawn")
PEAK, GROWTH = 1 << 30, 64 << 20
"""Bytes above the memory at the start, and bytes of growth behind the first third of the requests."""

CHAT = [{"role": "user", "content": "It is a truth"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "It is a truth", "max_tokens": 4},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 4},
    "/v1/responses": {"input": "It is a truth", "max_output_tokens": 4},
}
TEXTS = ("It is a truth universally acknowledged", "The river", "She had never seen a place")
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
FIELDS: dict[str, list[Any]] = {
    "model": ["reference", "other", "reference:x.gguf"],
    "prompt": ["a", [5, 6], [[5], [6]], ["a", "b"], [4096], ["a"] * 500],
    "messages": [
        CHAT,
        CHAT * 300,
        [{"role": "tool", "content": "a", "tool_call_id": "1"}],
        [{"role": "user"}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, *CHAT],
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "file:///"}}],
            }
        ],
    ],
    "input": [
        "a",
        CHAT,
        [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}],
        [{"type": "input_text", "text": "a"}],
        [
            *CHAT,
            {"type": "reasoning", "content": [{"text": "a"}]},
            {"type": "function_call_output", "call_id": "1", "output": "a"},
        ],
    ],
    "max_tokens": [1, 2, 900],
    "max_completion_tokens": [1, 2, 900],
    "max_output_tokens": [1, 2, 900],
    "temperature": [0, 0.5, 2, 1e-30],
    "top_p": [0, 0.5, 1],
    "seed": [0, -5, 2**63],
    "n": [1, 2, 10**6],
    "best_of": [1, 2, 10**6],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}],
    "stop": ["a", ["a", "e"], list("abcde"), "a" * 5000],
    "presence_penalty": [0, 1, -2],
    "frequency_penalty": [0, 1, 2],
    "logit_bias": [{"5": 100}, {"4096": 1}, {"5": -100, "6": 3.5}],
    "logprobs": [True, 3],
    "top_logprobs": [0, 3],
    "echo": [True],
    "suffix": ["!"],
    "tools": [[TOOL], [TOOL] * 200],
    "tool_choice": ["auto", "none", "required"],
    "parallel_tool_calls": [True, False],
    "instructions": ["Be brief."],
    "response_format": [{"type": "text"}, {"type": "json_object"}],
    "text": [{"format": {"type": "text"}}],
    "include": [["a"], []],
    "modalities": [["text"], ["audio"]],
    "reasoning": [{"effort": "low"}],
    "reasoning_effort": ["low"],
    "verbosity": ["low", "medium"],
    "truncation": ["auto", "disabled"],
    "background": [True],
    "previous_response_id": ["resp_1"],
    "conversation": ["c"],
    "user": ["me"],
    "metadata": [{"a": "b"}],
    "store": [True],
    "prediction": [{"type": "content", "content": "a"}],
    "chat_template_kwargs": [
        {"chat_template": "{{ 1 / 0 }}"},
        {"tokenize": False},
        {"enable_thinking": False},
        {"messages": 1},
    ],
    "generation_config": ['{"sequence_bias": [[[9], 5.0]]}', '{"no_repeat_ngram_size": 2}', '{"num_beams": 4}', "{"],
    "num_beams": [4],
    "num_return_sequences": [4],
    "suppress_tokens": [[5]],
    "forced_bos_token_id": [7],
    "top_k": [1],
    "nonsense": [1],
}
"""Fields of the API with values that are right for some route or model."""
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 10**400, 0.5, 1e308, float("nan"), float("inf"), "", "0", "a",
    "\ud800", "a\udfff", "\x00", "<|tool|>", "Use <|tool|> now", "\u202e\U0001f600" * 50, "{{ 7 * 7 }}",
    "{% for i in range(10**9) %}", "a truth " * 3000, "a truth " * 150_000, "x" * 700_000, " " * 300_000, [], [[]],
    [None], [0] * 5000, [5] * 300_000, ["a"] * 3000, [-1], [1e9], [True], {}, {"": None}, {"type": None},
    {"a": {"b": {"c": []}}}, [{}], [{"role": None}], [{"role": "user", "content": {}}],
]  # fmt: skip
"""Values that are odd for most fields."""
HEADERS: list[dict[str, str]] = [
    {}, {}, {}, {"X-Request-ID": "again"}, {"X-Request-ID": "again"}, {"X-Request-ID": "x" * 5000},
    {"X-Request-ID": "a b\xe9"},
    {"Content-Type": "text/plain"}, {"Content-Type": "application/json; charset=utf-16"}, {"Authorization": "Bearer x"},
    {"Content-Encoding": "gzip"}, {"Expect": "100-continue"}, {"Content-Type": "multipart/form-data; boundary=a"},
]  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """One request."""

    number: int
    route: str
    body: bytes
    good: bool
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    leaves_s: float = WAIT_S
    """Seconds after which the client leaves."""


@dataclass
class Found:
    """Results of one mode."""

    mode: str
    statuses: dict[str, int] = field(default_factory=dict)
    good: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest_health_s: float = 0.0
    megabytes: list[int] = field(default_factory=list)
    """At the start, at a third, at the peak, and at the end."""


def good(number: int) -> Asked:
    """Return one of twelve requests with greedy answers."""
    route, text = list(ROUTES)[number % 3], TEXTS[number // 3 % 3]
    own = (
        {"prompt": text}
        if number % 3 == 0
        else {"input": text}
        if number % 3 == 2
        else {"messages": [{"role": "user", "content": text}]}
    )
    body = {**ROUTES[route], **own, "temperature": 0, "stream": number // 9 % 2 == 1}
    return Asked(number, route, json.dumps(body).encode(), good=True)


def odd(number: int, random: Random) -> Asked:
    """Return a request with odd fields, and sometimes an odd form."""
    route = random.choice(list(ROUTES))
    body = {**ROUTES[route], "stream": random.random() < 0.4}
    for _ in range(random.choice([1, 1, 1, 2, 3, 6])):
        name = random.choice(list(body) if body and random.random() < 0.4 else list(FIELDS))
        body[name] = random.choice(FIELDS[name] if random.random() < 0.4 else ODD)
        if random.random() < 0.05:
            del body[name]
    if random.random() < 0.03:
        body = {name: body[name] for name in random.sample(list(body), len(body))}
    text = json.dumps(body, ensure_ascii=random.random() < 0.7).encode("utf-8", "surrogatepass")
    form = random.random()
    if form < 0.03:
        text = text[: random.randrange(len(text))]
    elif form < 0.05:
        text = random.choice(
            [b"", b"[]", b"null", b"[" * 100_000, b'{"prompt": "\xff"}', random.randbytes(300), b"a" * (6 << 20)]
        )
    method, headers = "POST", random.choice(HEADERS)
    if random.random() < 0.02:
        method, route = (
            random.choice(["GET", "PUT", "DELETE", "OPTIONS", "POST"]),
            random.choice([route, "/v1/models", "/v1/models/%C3", "/x", "/metrics", "/reset"]),
        )
    limits = [body.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if name in body]
    long = not limits or any(not isinstance(limit, int) or limit > 8 for limit in limits)
    leaves = random.choice([0.05, 0.3, 1.0]) if long or random.random() < 0.05 else WAIT_S
    return Asked(number, route, text, good=False, method=method, headers=headers, leaves_s=leaves)


def answer(address: tuple[str, int], asked: Asked) -> tuple[int, bytes]:
    """Send a request and return the answer's status and body; status 0 if the client left before its end."""
    connection = http.client.HTTPConnection(*address, timeout=asked.leaves_s)
    try:
        headers = {"Content-Type": "application/json", **asked.headers}
        connection.request(asked.method, asked.route, asked.body, headers)
        got = connection.getresponse()
        return got.status, got.read()
    except TimeoutError:
        return 0, b""
    finally:
        connection.close()


def text_of(route: str, body: bytes) -> str:
    """Return the generated text of an answer, streamed or not."""
    parts = [part[6:] for part in body.decode().split("\n\n") if part.startswith("data: {")] or [body.decode()]
    texts = list[str]()
    for part in map(json.loads, parts):
        if part.get("type") == "response.output_text.delta":
            texts.append(part["delta"])
        elif "output" in part:
            texts += [each["text"] for item in part["output"] for each in item["content"]]
        for choice in part.get("choices", []):
            texts.append(
                choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
            )
    return "".join(texts)


def fault(asked: Asked, status: int, body: bytes, expected: str | None) -> str | None:
    """Return what is wrong with an answer, or None."""
    if asked.good:
        if status != 200 or text_of(asked.route, body) != expected:
            return f"{status} {body[:200]!r}, not {expected!r}"
    elif status >= 500 or b'"type": "server_error"' in body or b'"type":"response.failed"' in body:
        return f"{status} {body[-300:]!r}"
    elif status >= 400 and asked.method == "POST":
        message = json.loads(body)["error"]["message"]
        if "\n" in message or len(message) > 300:
            return f"{status} {body[:400]!r}"
    return None


@contextmanager
def server(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], tuple[str, int]]]:
    """Run the server inside this context; yield its process and address. Its lines go to `folder`/log."""
    log = folder / "log"
    words = [
        "serve",
        str(folder / "model"),
        "--served-name",
        "reference",
        "--port",
        "0",
        "--dtype",
        "fp32",
        "--slots",
        "192",
    ]
    with (
        log.open("wb") as lines,
        subprocess.Popen(
            [sys.executable, "-m", "expertcast.cli", *words, *options], stderr=lines, stdout=lines
        ) as process,
    ):
        try:
            end = time.monotonic() + START_S
            while (
                found := re.search(r"serving reference on http://([\d.]+):(\d+)", log.read_text(errors="replace"))
            ) is None:
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the server does not start:\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.1)
            yield process, (found[1], int(found[2]))
        finally:
            process.terminate()


def resident(pid: int) -> int:
    """Return the memory of a process in MB."""
    return next(
        int(line.split()[1]) >> 10
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )


def run(folder: Path, mode: str, requests: int, seed: int) -> Found:
    """Send all requests to a server in one mode."""
    random, found = Random(seed), Found(mode)
    asked = [good(number // EVERY) if number % EVERY == 0 else odd(number, random) for number in range(requests)]
    lock = threading.Lock()
    with server(folder, *(["--continuous-batching"] if mode == "batched" else [])) as (process, address):
        alone = {}
        for each in map(good, range(18)):
            status, body = answer(address, each)
            alone[each.body] = text_of(each.route, body)
            if status != 200 or not alone[each.body]:
                raise SystemExit(f"a good request is not answered: {status} {body[:300]!r}")
        pipe, other = SPAWN.Pipe()
        watching = SPAWN.Process(target=watch, args=(address, process.pid, other))
        watching.start()
        pipe.recv()  # it has begun
        third, statuses = list[float](), Counter[str]()

        def ask(each: Asked) -> None:
            try:
                status, body = answer(address, each)
                wrong = fault(each, status, body, alone.get(each.body))
            except Exception as error:
                status, wrong = -1, f"{type(error).__name__}: {error}"
            with lock:
                statuses[f"{'good' if each.good else 'odd'} {status or 'left'}"] += 1
                found.good += each.good and wrong is None
                if wrong is not None:
                    found.wrong.append(f"request {each.number} {each.method} {each.route} {each.body[:300]!r}: {wrong}")
                if statuses.total() * 3 > requests and not third:
                    third.append(time.monotonic())

        with ThreadPoolExecutor(AT_ONCE) as clients:
            list(clients.map(ask, asked))
        found.statuses = dict(sorted(statuses.items()))
        time.sleep(2)
        pipe.send("end")
        found.slowest_health_s, bad, memory = pipe.recv()
        watching.join()
        found.wrong += [f"/health: status {status}" for status in bad]
        if process.poll() is not None:
            found.wrong.append(f"the server ended with status {process.returncode}")
    early = max(used for at, used in memory if at <= third[0])
    found.megabytes = [memory[0][1], early, max(used for _, used in memory), memory[-1][1]]
    log = (folder / "log").read_text(errors="replace")
    if "Traceback" in log:
        found.wrong.append(f"a traceback in the log: {log[log.index('Traceback') :][:1500]}")
    if found.slowest_health_s > HEALTH_S:
        found.wrong.append(f"/health took {found.slowest_health_s:.1f} s")
    if (found.megabytes[2] - found.megabytes[0]) << 20 > PEAK or (found.megabytes[3] - early) << 20 > GROWTH:
        found.wrong.append(f"memory in MB at the start, a third, the peak, the end: {found.megabytes}")
    return found


def watch(address: tuple[str, int], pid: int, pipe: Connection) -> None:
    """Request /health in a process of its own; send the slowest answer, bad statuses, and times with memory."""
    slowest, bad, memory = 0.0, list[int](), [(time.monotonic(), resident(pid))]
    pipe.send("begun")
    while not pipe.poll(0.05):
        begun = time.monotonic()
        status, _ = answer(address, Asked(0, "/health", b"", good=False, method="GET"))
        slowest = max(slowest, time.monotonic() - begun)
        bad += [status] if status != 200 else []
        memory.append((time.monotonic(), resident(pid)))
    pipe.send((slowest, bad, memory))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000, help="requests in each mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", choices=["single", "batched"], default=["single", "batched"])
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer  # late: the process that watches does not need it

    results = list[Found]()
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(REFERENCE, Path(name) / "model")
        tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
        tokenizer.add_tokens(["<|tool|>"])
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(Path(name) / "model")
        for mode in options.modes:
            results.append(run(Path(name), mode, options.requests, options.seed))
            found = results[-1]
            print(f"{mode}: {found.statuses}")
            print(f"{mode}: {found.good} good answers right, /health within {found.slowest_health_s:.2f} s")
            print(f"{mode}: memory in MB at the start, a third, the peak, the end: {found.megabytes}")
            print(*found.wrong[:20], sep="\n")
            if options.json:
                options.json.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    sys.exit(any(found.wrong for found in results))


if __name__ == "__main__":
    main()
