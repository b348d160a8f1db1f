"""vLLM's server with expertcast, asked by OpenAI's own client."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import openai
import pytest
from engines import PROMPTS
from expertcast_vllm.endpoint import PATH
from prometheus_client.parser import text_string_to_metric_families
from servers import NAME, Server, serve

TOKENS = 24
"""Of each answer."""

SINGLE = ("--dtype", "float32")
"""Who shares a step with whom is chance: precision that no greedy choice hangs on."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Without expertcast, and with it."""
    folders = tmp_path_factory.mktemp("resident"), tmp_path_factory.mktemp("offloaded")
    # vLLM kills its engine where it is not told to wait for it
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
