"""vLLM's own server: a page for Prometheus that says what its workers' experts do."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from engines import REFERENCE
from expertcast_vllm.endpoint import PATH, Workers
from one_run import QUIET
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

SECONDS = 120


def test_workers_stand_side_by_side() -> None:
    page = '# TYPE a counter\n# HELP a Some.\na_total{layer="1"} 2.0\n'
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Workers([page, page.replace("2.0", "3.0")]))
    (family,) = text_string_to_metric_families(generate_latest(registry).decode())
    assert {tuple(sorted(each.labels.items())): each.value for each in family.samples} == {
        (("layer", "1"), ("worker", "0")): 2,
        (("layer", "1"), ("worker", "1")): 3,
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with closing(socket.socket()) as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    environment = {
        **os.environ, **QUIET, "VLLM_PLUGINS": "expertcast", "EXPERTCAST_VLLM": json.dumps({"slots": 100}),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", REFERENCE, "--enforce-eager",
        "--max-model-len", "512", "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "reference",
    ]  # fmt: skip
    with log.open("w") as file, subprocess.Popen(command, env=environment, stdout=file, stderr=file) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, log)
            yield url
        finally:
            process.terminate()
            process.wait(SECONDS)


def test_the_page_counts_what_a_request_took(server: str) -> None:
    def counters() -> dict[str, float]:
        with urlopen(server + PATH) as answer:
            page = answer.read().decode()
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                assert sample.labels["worker"] == "0"
                totals[sample.name] = totals.get(sample.name, 0) + sample.value
        return totals

    before = counters()
    body = json.dumps({"model": "reference", "prompt": "The sea was", "max_tokens": 8, "temperature": 0}).encode()
    with urlopen(Request(server + "/v1/completions", body, {"Content-Type": "application/json"})) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 8
    after = counters()
    steps = after["expertcast_layer_steps_total"] - before["expertcast_layer_steps_total"]
    assert steps >= 8 * 12
    needed = after["expertcast_expert_requests_total"]
    assert needed == after["expertcast_expert_hits_total"] + after["expertcast_expert_misses_total"] > 0
    assert after["expertcast_slots"] == 100
    assert after["expertcast_slots_held"] == 100
    assert after["expertcast_info"] == 1


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            urlopen(url + "/health").close()
            return
        except URLError:
            time.sleep(0.5)
    raise AssertionError(log.read_text())
