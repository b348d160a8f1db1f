"""The commands of README and guides run as they are written, on the bundled model and little text; under torchrun two
ranks share the work and one writes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from expertcast.checkpoints.checkpoint import PredictorCheckpoint
from expertcast.cli import main
from expertcast.data.traces import TraceDataset
from tests.pages import ROOT, commands_of

ROUTING = str(ROOT / "benchmarks" / "routing" / "gpt-oss-120b-k2.parquet")
PAGES = ["README.md", *(f"docs/{name}.md" for name in (
    "quickstart", "deciding", "storage", "policies", "drafts", "index", "report", "routing-traces",
))]  # fmt: skip
STAND_INS = {
    "Qwen/Qwen3-30B-A3B": "reference", "MODEL": "reference", "30000": "6000", "1024": "256",
    "qwen3-30b-a3b": "reference", "8": "2", "ROUTING.parquet": ROUTING,
}  # fmt: skip
FEW_TOKENS = ["--prompt-tokens", "8", "--new-tokens", "4", "--repetitions", "1", "--slots", "96"]
SMALLER = {"estimator": ["width=8"]}


def documented_commands() -> list[str]:
    """What stands behind `expertcast` in README and guides, each once, but for what needs a hub, serves or chats: other
    tests run these."""
    found = [line for page in PAGES for line in commands_of(page)]
    return [line for line in dict.fromkeys(found) if " user/" not in line and not line.startswith(("serve ", "chat "))]


def shortened(line: str) -> list[str]:
    """A command with what this machine has in place of names, over fewer tokens and steps."""
    command = [STAND_INS.get(word, word) for word in shlex.split(line)]
    if ROUTING in command:
        return command
    short = command + {"bench": FEW_TOKENS, "advise": FEW_TOKENS[:4]}.get(command[0], [])
    if command[0] == "train":
        predictor = command[command.index("--predictor") + 1]
        short += ["--set", "steps=8", "step_tokens=128", *SMALLER[predictor]]
    if command[0] == "simulate":
        short += ["--tokens", "300", *(["--quality-tokens", "40"] if "--model" in command else [])]
    return short


def write_texts(folder: Path) -> None:
    """The files that the commands read: several domains, small enough to run online."""
    rows = pq.read_table(ROOT / "checkpoints" / "reference" / "text" / "test.parquet")
    for first, name in enumerate(("my.parquet", "other.parquet")):
        pq.write_table(rows.take(list(range(first, len(rows), len(rows) // 10))), folder / name)


@pytest.mark.slow
def test_documented_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    lines = documented_commands()
    assert "collect MODEL --data my.parquet --tokens 30000 --out traces" in lines
    assert "bench MODEL --predictor checkpoint --mode on_demand exact --copy-over-compute 2" in lines  # a CPU shows it
    commands = [shortened(line) for line in lines]
    assert {command[0] for command in commands} == {
        "inspect", "collect", "train", "eval", "store", "generate", "advise", "bench", "simulate"
    }  # fmt: skip
    for command in commands:
        assert main(command) == 0, command
    assert (tmp_path / "report" / "index.html").is_file()
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert set(report["provenance"]["predictors"]) == set(report["evaluation"]["recall_at_k"])
    assert report["provenance"]["predictors"]["estimator"]["training"]["checkpoint"] == "checkpoint"
    assert all(len(each["text"]) == len(each["token_ids"]) for each in report["examples"]["passages"])
    assert (tmp_path / "sweep" / "hit_rate.png").is_file()
    for trained in ("maps1", "ahead1"):  # the linear maps, then the network
        assert list((tmp_path / "runs" / trained / "version_0").glob("events.out.tfevents*"))


def test_readme_names_make_targets_that_exist() -> None:
    targets = re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def two_ranks(*arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, "-m", "expertcast.cli", *arguments],
        capture_output=True, text=True, timeout=300, check=False, env=environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_collect_and_train_with_two_ranks(tmp_path: Path) -> None:
    traces, checkpoint, result = (str(tmp_path / name) for name in ("traces", "checkpoint", "result.json"))
    two_ranks("collect", "reference", "--data", "reference", "--tokens", "6000", "--out", traces)
    dataset = TraceDataset.open(traces)
    rows = list(dataset.batches("all", 1000))
    places = {(int(d), int(p)) for batch in rows for d, p in zip(batch.document_T, batch.position_T, strict=True)}
    assert len(places) == sum(map(len, rows)) == dataset.token_count("all")
    settings = ["steps=6", "step_tokens=128", "width=8"]
    text = two_ranks(
        "train", traces, "--predictor", "estimator", "--out", checkpoint, "--json", result, "--set", *settings
    )
    assert text.count("wrote ") == 1
    assert PredictorCheckpoint.open(checkpoint).config["training"]["ranks"] == 2
    assert json.loads(Path(result).read_text())["recall_at_k"]["estimator"]["mean"] > 0.5
