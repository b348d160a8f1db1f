"""Names of repositories, and what the hub refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from expertcast.checkpoints.hub import HubName
from tests.hub.conftest import environment, upload
from tests.hub.fake_hub import READER, FakeHub, Repo
from tests.hub.test_checkpoints import right
from tests.hub.worker import Worker

OPEN = "from expertcast.checkpoints.checkpoint import load_predictor\nprint(load_predictor({!r}).name)"
WEIGHTS = "model.safetensors"


def test_a_repository_of_something_else_is_refused(hub: FakeHub, worker: Worker) -> None:
    repo = hub.repos["model", "me/taken"] = Repo(private=False)
    repo.commit("main", {"config.json": b'{"model_type": "llama"}', "notes.txt": b"mine"}, "mine")
    line = worker.run("eval", "traces", "--predictor", "me/taken").line
    assert "me/taken on the hub is not a predictor checkpoint" in line


def test_private_means_private(hub: FakeHub, worker: Worker) -> None:
    upload(worker, "linear", "me/own")
    hub.repos["model", "me/own"].private = True
    generate = ["generate", "reference", "--prompt", "It", "--new-tokens", "1", "--predictor", "me/own"]
    assert "for a private repository, log in with `hf auth login`" in worker.run(*generate).line
    right(worker.run(*generate, token=READER))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("me/nobody", "'me/nobody' is neither a local folder nor a visible model repository"),
        ("me/linear@nowhere", "me/linear has no revision 'nowhere'"),
        ("nobody", "unknown predictor 'nobody'"),
        ("out/of/folders", "unknown predictor 'out/of/folders'"),
    ],
)
def test_what_is_not_there(given: str, words: str, hub: FakeHub, worker: Worker) -> None:
    command = ["generate", "reference", "--prompt", "It", "--new-tokens", "1"]
    assert words in worker.run(*command, "--predictor", given).line
    assert words in worker.run("eval", "traces", "--predictor", given).line


def test_a_download_that_stops_goes_on(hub: FakeHub, worker: Worker, work: Path) -> None:
    shutil.rmtree(work / "home" / "hub")  # or the file would be taken from the hub's cache
    hub.cut_after = 300_000
    line = worker.run("eval", "traces", "--predictor", "me/linear").line
    assert "cannot get me/linear: " in line
    assert "try again, complete files are kept" in line
    hub.cut_after, begin = None, len(hub.requests)
    right(worker.run("eval", "traces", "--predictor", "me/linear"))
    asked = [request for request in hub.requests[begin:] if request.startswith("GET") and "/resolve/" in request]
    assert [request.rsplit("/", 1)[1] for request in asked] == [WEIGHTS], "what had come is not asked for again"


def test_a_file_that_was_changed_on_the_way_is_refused(hub: FakeHub, worker: Worker, work: Path) -> None:
    hub.repos["model", "me/changed"] = hub.repos["model", "me/linear"]
    hub.changed = {WEIGHTS}
    command = ["eval", "traces", "--predictor", "me/changed"]
    line = worker.run(*command).line
    assert line.startswith("expertcast: me/changed on the hub: ")
    assert f"{WEIGHTS} was changed after it was written; remove " in line
    hub.changed = set()
    assert "was changed" in worker.run(*command).line, "the hub's cache has it"
    shutil.rmtree(line.split("; remove ")[1].split(" to download")[0])
    right(worker.run(*command))


def test_without_the_hub_its_cache_serves(hub: FakeHub, worker: Worker) -> None:
    right(worker.code(OPEN.format("me/linear")))
    with hub.away():
        assert right(worker.code(OPEN.format("me/linear"))).out == "linear\n"
        assert f"nor in the hub's cache, and {hub.url} is" in worker.run("eval", "traces", "--predictor", "me/new").line


def test_offline_its_cache_serves(hub: FakeHub, worker: Worker, work: Path) -> None:
    right(worker.code(OPEN.format("me/linear")))
    code = "from expertcast.data.traces import TraceDataset\nprint(TraceDataset.open('me/traces').info['id'])"
    known, before = right(worker.code(code)).out, len(hub.requests)
    offline = Worker(work, {**environment(hub, work / "home"), "HF_HUB_OFFLINE": "1"})
    try:
        assert right(offline.code(OPEN.format("me/linear"))).out == "linear\n"
        assert right(offline.code(code)).out == known
        assert "HF_HUB_OFFLINE is set" in offline.run("eval", "traces", "--predictor", "me/new").line
    finally:
        offline.close()
    assert len(hub.requests) == before


@pytest.mark.parametrize(
    ("given", "repo", "revision"),
    [
        ("user/repo", "user/repo", None),
        (Path("user/repo@main"), "user/repo", "main"),
        ("u-1/r_2.x@refs/pr/3", "u-1/r_2.x", "refs/pr/3"),
        (f"user/repo@{'a' * 40}", "user/repo", "a" * 40),
    ],
)
def test_names(given: str | Path, repo: str, revision: str | None) -> None:
    name = HubName.of(given)
    assert name == HubName(repo, revision)
    assert str(name) == str(given)


@pytest.mark.parametrize(
    "given",
    ["", "repo", "a/b/c", "/a/b", "./repo", "../repo", "~/repo", "user/", "user/repo@", "user/repo@a b", "user/re po",
     "user/repo@a@b", "user/-repo", "user/a--b", "user/" + "r" * 97, "user\0/repo"],
)  # fmt: skip
def test_no_names(given: str) -> None:
    assert HubName.of(given) is None
