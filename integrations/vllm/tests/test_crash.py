"""A process of the server is killed in the middle of an answer: the client gets an error, nothing is left behind, and
the next start works."""

from pathlib import Path
from tempfile import TemporaryDirectory

import openai
import psutil
import pytest
from engines import PROMPTS
from servers import NAME, Server, serve

VLLMS_OWN = "vllm_dist_"
"""Memory that vLLM's workers reduce in on the CPU: it leaves that behind itself when one of them is killed."""
LARGE = 1 << 20
"""Bytes: what may be experts."""
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
        # sockets' names may not be long
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
    assert files[0] == files[1] == files[2]  # what was killed left no pieces, and what starts next adds none


def _holds(worker: psutil.Process, folder: str) -> bool:
    """Whether it has experts mapped that lie in the folder."""
    return any(each.path.startswith(folder) and each.size > LARGE for each in worker.memory_maps(grouped=False))


def _kill_while_it_answers(server: Server, client: openai.OpenAI, victim: str) -> None:
    stream = client.completions.create(**ASKED, max_tokens=400, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    server.named(victim)[0].kill()
    with pytest.raises(openai.OpenAIError):
        for _ in stream:
            pass
