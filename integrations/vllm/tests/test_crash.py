"""A process of the server is killed in the middle of an answer: the client gets an error, nothing is left behind."""

from pathlib import Path

import openai
import pytest
from engines import PROMPTS
from servers import NAME, Server, serve

VLLMS_OWN = "vllm_dist_"
"""Memory that vLLM's workers reduce in on the CPU: it leaves that behind itself when one of them is killed."""
TWO = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")


def test_killed_processes(tmp_path: Path) -> None:
    store = tmp_path / "store"
    options = {"slots": 90, "store": "disk", "store_folder": str(store)}
    answers, files = [], []
    for round_, victim in enumerate(("Worker", "EngineCore")):
        folder = tmp_path / str(round_)
        folder.mkdir()
        with serve(folder, options, *TWO) as server:
            client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)
            asked = {"model": NAME, "prompt": PROMPTS[0], "temperature": 0}
            answers.append(client.completions.create(**asked, max_tokens=16).choices[0].text)
            shared = server.shared_files()
            files.append(sorted(each.relative_to(store) for each in store.rglob("*") if each.is_file()))
            _kill_while_it_answers(server, client, asked, victim)
            assert server.ended(), server.log()
            left = [Path(name).name for name in shared if Path(name).exists()]
            assert all(name.startswith(VLLMS_OWN) for name in left)
    assert answers[0] == answers[1]
    assert files[0] == files[1]  # what was killed left no pieces, and what starts next adds none


def _kill_while_it_answers(server: Server, client: openai.OpenAI, asked: dict[str, object], victim: str) -> None:
    stream = client.completions.create(**asked, max_tokens=400, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    server.named(victim)[0].kill()
    with pytest.raises(openai.OpenAIError):
        for _ in stream:
            pass
