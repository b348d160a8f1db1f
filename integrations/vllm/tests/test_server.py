"""vLLM's server with expertcast: answers to OpenAI's client, its end, and killed processes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

import openai
import psutil
import pytest
from engines import PROMPTS
from expertcast_vllm.endpoint import PATH, Workers
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from servers import NAME, Server, serve

VLLMS_OWN = "vllm_dist_"
"""Shared memory of vLLM's CPU workers, which vLLM leaves behind when one of them is killed."""
LARGE = 1 << 20
"""Larger files may contain experts."""
ASKED = {"model": NAME, "prompt": PROMPTS[0], "temperature": 0}
TWO = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")


def test_killed_processes(tmp_path: Path) -> None:
    stored = {"slots": 90, "store": "disk", "store_folder": str(tmp_path / "store")}
    nameless = {"slots": 90, "store": "disk"}
    answers, files = [], []
    for round_, (options, victim, held) in enumerate(
        [(stored, "Worker", False), (nameless, "EngineCore", True), (stored, "Worker", False)]
    ):
        folder = tmp_path / str(round_)
        folder.mkdir()
        # names of sockets must be short
        with TemporaryDirectory() as temporary, serve(folder, options, *TWO, temporary=temporary) as server:
            server.wait()
            client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)
            answers.append(client.completions.create(**ASKED, max_tokens=16).choices[0].text)
            shared = server.shared_files()
            assert all(_holds(worker, temporary) == held for worker in server.named("Worker"))
            files.append(sorted(each for each in (tmp_path / "store").rglob("*") if each.is_file()))
            if round_ == 2:
                server.stop()
            else:
                _kill_while_it_answers(server, client, victim)
                assert server.ended(), server.log()
            left = [Path(name).name for name in shared if Path(name).exists()]
            assert all(name.startswith(VLLMS_OWN) for name in left)
            kept = [each for each in Path(temporary).rglob("*") if each.is_file()]
            assert not [each for each in kept if "expert" in each.name or each.stat().st_size > LARGE]
    assert answers[0] == answers[1] == answers[2]
    assert files[0] == files[1] == files[2]  # killed processes leave no partial files, and restarts add none


def _holds(worker: psutil.Process, folder: str) -> bool:
    """Return whether the worker maps experts in the folder."""
    return any(each.path.startswith(folder) and each.size > LARGE for each in worker.memory_maps(grouped=False))


def _kill_while_it_answers(server: Server, client: openai.OpenAI, victim: str) -> None:
    stream = client.completions.create(**ASKED, max_tokens=400, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    server.named(victim)[0].kill()
    with pytest.raises(openai.OpenAIError):
        for _ in stream:
            pass


TOKENS = 24
"""Tokens per answer."""

SINGLE = ("--dtype", "float32")
"""Requests share steps at random, so this precision keeps greedy choices stable."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Servers without and with expertcast."""
    folders = tmp_path_factory.mktemp("resident"), tmp_path_factory.mktemp("offloaded")
    # vLLM kills its engine unless it is configured to wait
    with (
        serve(folders[0], None, *SINGLE) as resident,
        serve(folders[1], {"slots": 90}, *SINGLE, "--shutdown-timeout", "10") as offloaded,
    ):
        resident.wait()
        offloaded.wait()
        yield resident, offloaded


def _client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)


def _tokens(client: openai.OpenAI, prompt: str) -> list[int]:
    answer = client.completions.create(
        model=NAME, prompt=prompt, max_tokens=TOKENS, temperature=0, extra_body={"return_token_ids": True}
    )
    tokens: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
    return tokens


def test_several_clients_get_the_tokens_of_the_server_without(servers: tuple[Server, Server]) -> None:
    resident, offloaded = (_client(server) for server in servers)
    expected = [_tokens(resident, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(lambda prompt: _tokens(offloaded, prompt), PROMPTS)) == expected
    assert [_tokens(offloaded, prompt) for prompt in PROMPTS[:3]] == expected[:3]


def test_streams(servers: tuple[Server, Server]) -> None:
    texts = []
    for server in servers:
        pieces = _client(server).completions.create(
            model=NAME, prompt=PROMPTS[0], max_tokens=TOKENS, temperature=0, stream=True
        )
        parts = [piece.choices[0].text for piece in pieces if piece.choices]
        assert len(parts) > 1
        texts.append("".join(parts))
    assert texts[0] == texts[1]


def test_the_page_counts_what_a_request_took(servers: tuple[Server, Server]) -> None:
    _, offloaded = servers

    def counters() -> dict[str, float]:
        with urlopen(offloaded.url + PATH) as answer:
            page = answer.read().decode()
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                assert sample.labels["worker"] == "0"
                totals[sample.name] = totals.get(sample.name, 0) + sample.value
        return totals

    before = counters()
    assert len(_tokens(_client(offloaded), PROMPTS[1])) == TOKENS
    after = counters()
    steps = after["expertcast_layer_steps_total"] - before["expertcast_layer_steps_total"]
    assert steps >= TOKENS * 12
    needed = after["expertcast_expert_requests_total"]
    assert needed == after["expertcast_expert_hits_total"] + after["expertcast_expert_misses_total"] > 0
    assert after["expertcast_slots"] == after["expertcast_slots_held"] == 90
    assert after["expertcast_info"] == 1


def test_stopping_leaves_nothing_and_says_what_it_did(servers: tuple[Server, Server]) -> None:
    resident, offloaded = servers
    shared = offloaded.shared_files()
    offloaded.stop()
    assert "90 of 768 experts have a slot" in offloaded.log()
    assert "experts needed" in offloaded.log()
    assert not [name for name in shared if Path(name).exists()]
    assert "expertcast:" not in resident.log()


def test_workers_stand_side_by_side() -> None:
    page = '# TYPE a counter\n# HELP a Some.\na_total{layer="1"} 2.0\n'
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Workers([page, page.replace("2.0", "3.0")]))
    (family,) = text_string_to_metric_families(generate_latest(registry).decode())
    assert {tuple(sorted(each.labels.items())): each.value for each in family.samples} == {
        (("layer", "1"), ("worker", "0")): 2,
        (("layer", "1"), ("worker", "1")): 3,
    }
