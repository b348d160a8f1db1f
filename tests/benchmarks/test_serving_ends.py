"""Ends of servers: the answer of a client that reads a long text, and leftover processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest
from benchmarks.serving_clients import read_long_answer
from benchmarks.serving_sides import end

PART = 'data: {{"id": "1", "object": "text_completion", "created": 1, "model": "m", "choices": [{}]}}\n\n'
TEXT, LAST = (PART.format(f'{{"index": 0, "text": " a", "finish_reason": {reason}}}') for reason in ("null", '"stop"'))
ALL = PART.format("")[:-3] + ', "usage": {"prompt_tokens": 1, "completion_tokens": 900, "total_tokens": 901}}\n\n'
DONE = "data: [DONE]\n\n"


@contextmanager
def streaming(text: str, promised: int) -> Iterator[str]:
    """Run a server that streams these bytes and promises more; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Content-Length", str(len(text) + promised))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


@pytest.mark.parametrize(("text", "promised", "expected"), [
    (TEXT * 9 + LAST + ALL + DONE, 0, "whole"),
    (TEXT * 9 + LAST + DONE, 0, "half"),
    (TEXT * 9, 0, "half"),
    (TEXT * 9, 1, "cut off"),
    (TEXT * 9 + 'data: {"error": "the server is shutting down"}\n\n', 0, "told"),
    (TEXT * 9 + LAST.replace("stop", "abort") + DONE, 0, "told"),
])  # fmt: skip
def test_half_an_answer_is_known(text: str, promised: int, expected: str) -> None:
    begun = threading.Event()
    with streaming(text, promised) as address:
        assert read_long_answer(address, "m", begun) == expected
    assert begun.is_set()


TREE = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({status}) if {goes} else None)
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"])
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize("goes", [True, False], ids=["its child stays", "it stays"])
def test_servers_that_do_not_go_are_killed_with_their_children(goes: bool) -> None:
    words = [sys.executable, "-c", TREE.format(status=3, goes=goes)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        (child,) = psutil.Process(process.pid).children()
        assert not end(process, seconds=1.0)
        assert process.returncode == (3 if goes else -9)
        child.wait(10)
