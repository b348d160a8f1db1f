"""A hub on the loopback, a process that knows no other, and a checkpoint and traces to send there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.hub.fake_hub import WRITER, FakeHub, served
from tests.hub.worker import Worker

TEXT = Path(__file__).resolve().parents[2] / "checkpoints" / "reference" / "text" / "test.parquet"
TOKENS = 700


def environment(hub: FakeHub, home: Path) -> dict[str, str]:
    """Of a process that knows this hub alone, with an empty cache below `home`."""
    return {
        "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def upload(worker: Worker, folder: str, repo: str, kind: str = "model", branch: str = "main") -> None:
    """Send a folder as `hf upload` does."""
    code = f"""from huggingface_hub import HfApi
api, where = HfApi(), {{"repo_id": {repo!r}, "repo_type": {kind!r}}}
api.repo_exists(**where) or api.create_repo(**where)
if {branch!r} != "main":
    api.create_branch(**where, branch={branch!r}, exist_ok=True)
api.upload_folder(**where, folder_path={folder!r}, revision={branch!r})"""
    done = worker.code(code, token=WRITER)
    assert done.status == 0, done.err


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the process runs, with `few.parquet` in it."""
    folder = tmp_path_factory.mktemp("hub")
    rows = pq.read_table(TEXT)
    pq.write_table(rows.take(list(range(0, len(rows), len(rows) // 8))), folder / "few.parquet")
    return folder


@pytest.fixture(scope="session")
def running(work: Path) -> Iterator[tuple[FakeHub, Worker]]:
    """The hub and the process; `traces` and `linear` lie in its folder, and on the hub as me/traces and me/linear."""
    with served() as hub:
        worker = Worker(work, environment(hub, work / "home"))
        for command in (
            ["collect", "reference", "--data", "few.parquet", "--tokens", str(TOKENS), "--out", "traces"],
            ["train", "traces", "--predictor", "linear", "--out", "linear"],
        ):
            done = worker.run(*command)
            assert done.status == 0, done.err
        upload(worker, "linear", "me/linear")
        upload(worker, "traces", "me/traces", "dataset")
        yield hub, worker
        worker.close()


@pytest.fixture
def hub(running: tuple[FakeHub, Worker]) -> Iterator[FakeHub]:
    """The hub; what a test does to its repositories and faults is undone."""
    hub = running[0]
    before = {key: (repo.private, dict(repo.commits), dict(repo.branches)) for key, repo in hub.repos.items()}
    yield hub
    hub.cut_after, hub.changed = None, set()
    for key in set(hub.repos) - set(before):
        del hub.repos[key]
    for key, (private, commits, branches) in before.items():
        hub.repos[key].private, hub.repos[key].commits, hub.repos[key].branches = private, commits, branches


@pytest.fixture
def worker(running: tuple[FakeHub, Worker]) -> Worker:
    """The process."""
    return running[1]
