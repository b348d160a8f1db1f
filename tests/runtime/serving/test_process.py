"""`expertcast serve` as a process: the README's command, signals during generations, many clients."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from benchmarks.serving import ask
from transformers import PreTrainedModel

from tests.pages import blocks_of, commands_of
from tests.runtime.conftest import PROMPTS
from tests.runtime.serving.serving import WAIT_S

LONG = {"prompt": "It is a truth", "max_tokens": 900, "temperature": 0}


@contextmanager
def process(*options: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """Start the command; yield the process, its address and its output lines."""
    words = [sys.executable, "-m", "expertcast.cli", "serve", "reference", "--port", "0", *options]
    lines, ready = list[str](), threading.Event()
    with subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:

        def read() -> None:
            assert running.stderr is not None
            for line in running.stderr:
                lines.append(line.rstrip())
                if line.startswith("serving "):
                    ready.set()
            ready.set()

        reading = threading.Thread(target=read)
        reading.start()
        try:
            assert ready.wait(WAIT_S)
            assert lines[-1].startswith("serving reference on http://127.0.0.1:"), lines
            yield running, lines[-1].rpartition(" ")[2], lines
        finally:
            if running.poll() is None:
                running.kill()
            running.wait()
            reading.join(WAIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("batching", [False, True], ids=["one by one", "batched"])
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_in_the_middle(stop: signal.Signals, batching: bool, tmp_path: Path) -> None:
    options = ["--slots", "192", *(["--continuous-batching"] if batching else [])]
    with process(*options, folder=tmp_path) as (running, address, lines):
        told = list[httpx2.Response]()
        waiting = threading.Thread(
            target=lambda: told.append(httpx2.post(f"{address}/v1/completions", json=LONG, timeout=WAIT_S))
        )
        with httpx2.stream("POST", f"{address}/v1/completions", json={**LONG, "stream": True}, timeout=WAIT_S) as parts:
            text = parts.iter_text()
            next(text)
            waiting.start()
            while "requests_in_flight 2.0" not in httpx2.get(f"{address}/metrics").text:
                pass
            running.send_signal(stop)
            rest = "".join(text)
        assert '{"error": {"message": "the server is shutting down"' in rest
        assert '"finish_reason"' not in rest
        waiting.join(WAIT_S)
        assert [answer.status_code for answer in told] == [503]
        assert running.wait(WAIT_S) == 0
    assert not any("Traceback" in line for line in lines), lines


@pytest.mark.slow
def test_an_address_that_is_taken(tmp_path: Path) -> None:
    with process(folder=tmp_path) as (_, address, _lines):
        words = [sys.executable, "-m", "expertcast.cli", "serve", "reference", "--port", address.rpartition(":")[2]]
        second = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert second.returncode == 2
    assert re.fullmatch(
        r"expertcast: cannot listen on 127.0.0.1:\d+: .*; use another --host or --port", second.stderr.strip()
    )


@pytest.mark.slow
def test_the_page_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page's commands and its client, with another model, predictor and port."""
    (request,) = (block for block in blocks_of("docs/serving.md", "bash") if block.startswith("curl "))
    (client,) = blocks_of("docs/serving.md", "python")
    (line,) = (line for line in commands_of("docs/serving.md") if line.startswith("serve MODEL"))
    words = line.removeprefix("serve ").replace("checkpoint", "next_norm").split()
    with process(*words[1:], folder=tmp_path) as (_, address, _lines):
        answer = httpx2.post(f"{address}/v1/completions", json={**LONG, "max_tokens": 5}, timeout=WAIT_S)
        assert answer.json()["usage"]["completion_tokens"] == 5
        request, client = (
            text.replace("MODEL", "reference").replace("http://127.0.0.1:8000", address) for text in (request, client)
        )
        text = json.loads(subprocess.check_output(request, shell=True))["choices"][0]["text"]
        exec(client, {})
        assert capsys.readouterr().out == text
        assert "expertcast_expert_hits_total" in httpx2.get(f"{address}/metrics").text


LOAD_S = float(os.environ.get("EXPERTCAST_LOAD_S", "60"))
CLIENTS, TOKENS = 16, 8
MOST_GROWTH = 8e6
"""Bytes behind the first third. In two minutes it was 0.4 MB one by one, 0.9 MB in batches; the keys and values of one
request are 0.1 MB, and if every request left its own behind, a minute of the slower way would leave 20 MB."""


@pytest.mark.slow
@pytest.mark.parametrize("batching", [False, True], ids=["one by one", "batched"])
def test_sixteen_clients(
    batching: bool, reference_fp32: PreTrainedModel, reference_tokenizer: Any, tmp_path: Path,
) -> None:  # fmt: skip
    expected = {_hash(prompt): _hash(_written(reference_fp32, reference_tokenizer, prompt)) for prompt in PROMPTS}
    asked = (PROMPTS * (3 * CLIENTS))[: 3 * CLIENTS]
    options = [
        "--dtype",
        "fp32",
        "--slots",
        "96",
        "--predictor",
        "next_norm",
        *(["--continuous-batching"] if batching else []),
    ]
    with process(*options, folder=tmp_path) as (running, address, _):
        answered, used = 0, list[int]()
        end = time.monotonic() + LOAD_S
        while len(used) < 4 or time.monotonic() < end:
            answers, _ = ask(address, "reference", asked, TOKENS, CLIENTS)
            assert len(answers) == len(asked)
            assert all(answer["text"] == expected[answer["prompt"]] for answer in answers)
            answered += len(answers)
            used.append(psutil.Process(running.pid).memory_full_info().uss)
        page = httpx2.get(f"{address}/metrics").text
        assert f'expertcast_http_requests_total{{route="/v1/completions",status="200"}} {answered}.0' in page
        assert f"expertcast_generated_tokens_total {answered * TOKENS}.0" in page
        assert "expertcast_http_requests_in_flight 0.0" in page
        assert used[-1] - used[len(used) // 3] < MOST_GROWTH


def _hash(text: str) -> str:
    """As the answers of the benchmark's clients have it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _written(model: PreTrainedModel, tokenizer: Any, prompt: str) -> str:
    inputs = tokenizer(prompt, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text
