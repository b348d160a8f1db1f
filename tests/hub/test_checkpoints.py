"""Checkpoints through a hub, by the real commands: sent, found by name and revision, and described."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from transformers import Qwen3MoeConfig

from expertcast.checkpoints.bundled import BUNDLED
from tests.families.models import tiny_model
from tests.hub.conftest import upload
from tests.hub.fake_hub import FakeHub, Repo
from tests.hub.worker import Done, Worker
from tests.sealed import edit_json


def kept(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint, but for its card, which names where it lies."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


def right(done: Done) -> Done:
    """What must have worked."""
    assert done.status == 0, done.err
    return done


def snippet(card: str) -> str:
    """The first block of Python in a card."""
    found = re.search(r"^```python\n(.*?)^```", card, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_card_says_what_metrics_and_config_do(hub: FakeHub, work: Path) -> None:
    text = hub.tree("model", "me/linear")["README.md"].decode()
    metrics = json.loads((work / "linear" / "metrics.json").read_text())
    data = ModelCard(text).data
    assert (data.library_name, data.license, data.base_model) == ("expertcast", "apache-2.0", None)
    traces = json.loads((work / "traces" / "trace.json").read_text())
    assert f"{traces['splits']['test']:,} tokens of documents" in text
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert rows[0] == ["layer", "linear", "frequency", "previous_token", "chance"]
    scores = [metrics["recall_at_k"]["linear"], *metrics["baselines"].values()]
    for place, layer in enumerate(metrics["targets"]):
        assert rows[3 + place] == [str(layer), *(f"{each['per_layer'][place]:.3f}" for each in scores), "0.062"]
    facts = json.loads(text[text.index("```json") :].removeprefix("```json").partition("```")[0])
    assert facts["command"] == "expertcast train traces --predictor linear --out linear"
    assert "collect reference --data few.parquet" in facts["data"]["command"]
    assert traces["settings"]["text"] == facts["data"]["text"]


def test_no_file_names_a_folder_of_this_machine(worker: Worker, work: Path) -> None:
    """Given by absolute paths: the model, its text, traces, default vectors and checkpoints."""
    model = work / "models" / "mine"
    shutil.copytree(BUNDLED, model)
    data, traces, out = (str(work / name) for name in ("few.parquet", "local", "local-ckpt"))
    right(worker.run("collect", str(model), "--data", data, "--tokens", "700", f"--out={traces}"))
    given = f"--default-vectors={work / 'traces'}"
    right(worker.run("train", traces, "--predictor", "linear", "--out", out, given))
    for folder in (Path(traces), Path(out)):
        files = (path for path in folder.rglob("*") if path.is_file() and path != Path(out) / "README.md")
        assert [path for path in files if str(work).encode() in path.read_bytes()] == []
    card = (Path(out) / "README.md").read_text()
    assert "expertcast train local --predictor linear --out local-ckpt --default-vectors=traces" in card
    assert "expertcast collect mine --data few.parquet --tokens 700 --out=local" in card
    assert ModelCard(card).data.base_model is None


def test_the_cards_snippet_runs(hub: FakeHub, worker: Worker) -> None:
    code = snippet(hub.tree("model", "me/linear")["README.md"].decode())
    done = right(worker.code(code.replace('predictor="linear"', 'predictor="me/linear"')))
    text, rate = done.out.strip().rsplit("\n", 1)
    assert text.startswith("It is a truth universally acknowledged")
    assert 0 < float(rate) < 1


def test_by_name_it_is_the_same_checkpoint(hub: FakeHub, worker: Worker, work: Path) -> None:
    command = [
        "generate",
        "reference",
        "--prompt",
        "It is",
        "--new-tokens",
        "3",
        "--slots",
        "64",
        "--forecasts",
        "always",
    ]
    for name, given in (("here", "./linear"), ("there", "me/linear@main")):
        right(worker.run(*command, "--predictor", given, "--json", f"{name}.json"))
    here, there = (json.loads((work / f"{name}.json").read_text()) for name in ("here", "there"))
    counts = ("hits", "misses", "prefetched", "bytes_moved")
    assert [here["stats"][key] for key in counts] == [there["stats"][key] for key in counts]
    assert here["tokens"] == there["tokens"]
    assert here["stats"]["prefetched"] > 0
    right(worker.run("eval", "traces", "--predictor", "me/linear", "--json", "there.json"))
    scored = json.loads((work / "there.json").read_text())
    kept = json.loads((work / "linear" / "metrics.json").read_text())
    assert scored["recall_at_k"]["linear"] == kept["recall_at_k"]["linear"]


def test_a_configuration_in_a_file_names_it_and_its_recall_is_known(hub: FakeHub, worker: Worker, work: Path) -> None:
    code = (
        "import expertcast\n"
        "expertcast.OffloadConfig(predictor='me/linear', mode='hybrid', min_recall=0.8).save('offload.json')\n"
        "from expertcast.checkpoints.checkpoint import PredictorCheckpoint\n"
        "from expertcast.runtime.forecasters import recall_per_layer\n"
        "recall = recall_per_layer(PredictorCheckpoint.open('me/linear'))\n"
        "print(sum(recall.values()) / len(recall))"
    )
    validation = json.loads((work / "linear" / "metrics.json").read_text())["validation"]
    assert float(right(worker.code(code)).out) == pytest.approx(validation["recall_at_k"]["linear"]["mean"])
    right(worker.run("generate", "reference", "--prompt", "It", "--new-tokens", "1", "--config", "offload.json"))


def test_a_revision_is_another_checkpoint(hub: FakeHub, worker: Worker) -> None:
    right(worker.run("train", "traces", "--predictor", "frequency", "--out", "second"))
    upload(worker, "second", "me/linear", branch="second")
    assert set(hub.repos["model", "me/linear"].branches) == {"main", "second"}
    commit = hub.repos["model", "me/linear"].branches["second"]
    code = (
        "from expertcast.checkpoints.checkpoint import PredictorCheckpoint as P\n"
        f"print(P.open('me/linear').name, P.open('me/linear@second').name, P.open('me/linear@{commit}').name,\n"
        "      P.open('me/linear', revision='second').name)"
    )
    assert right(worker.code(code)).out.split() == ["linear", "frequency", "frequency", "frequency"]
    upload(worker, "second", "me/linear")
    assert right(worker.code(code)).out.split() == ["frequency"] * 4


def test_a_folder_of_that_name_comes_first(hub: FakeHub, worker: Worker, work: Path) -> None:
    right(worker.run("train", "traces", "--predictor", "frequency", "--out", "local/linear"))
    before = len(hub.requests)
    code = "from expertcast.checkpoints.checkpoint import load_predictor\nprint(load_predictor('local/linear').name)"
    assert right(worker.code(code)).out == "frequency\n"
    assert "revision='x'" in worker.code(code.replace("r')", "r', revision='x')")).err
    assert len(hub.requests) == before


def test_a_folder_made_by_the_hubs_own_command(hub: FakeHub, worker: Worker, work: Path) -> None:
    code = "from huggingface_hub import snapshot_download as d\nd('me/linear', local_dir='pulled')"
    right(worker.code(code))
    own = kept(work / "linear")
    assert {name: (work / "pulled" / name).read_bytes() for name in own} == own
    right(worker.run("inspect", "pulled", "--verify"))


@pytest.fixture
def model(hub: FakeHub, tmp_path: Path, reference_tokenizer: Any) -> str:
    """me/moe, whose two branches hold models with other numbers of layers."""
    repo = hub.repos["model", "me/moe"] = Repo(private=False)
    made = tiny_model("qwen3_moe")
    assert isinstance(made.config, Qwen3MoeConfig)
    for branch, layers in (("main", 3), ("older", 2)):
        made.model.layers = made.model.layers[:layers]
        made.config.num_hidden_layers = layers
        made.save_pretrained(tmp_path / branch)
        reference_tokenizer.save_pretrained(tmp_path / branch)
        files = {path.name: path.read_bytes() for path in (tmp_path / branch).iterdir()}
        repo.commit(branch, files, branch)
    return "me/moe"


def test_a_revision_is_another_model(model: str, worker: Worker, work: Path) -> None:
    found = []
    for number, given in enumerate(([], ["--revision", "older"])):
        right(worker.run("inspect", model, *given, "--json", "inspected.json"))
        out = f"of-{number}"
        text = ["--data", "few.parquet", "--tokens", "700"]
        right(worker.run("collect", model, *text, *given, "--out", out))
        right(worker.run("generate", model, "--prompt", "It", "--slots", "8", "--new-tokens", "1", *given))
        layers = json.loads((work / out / "trace.json").read_text())["shape"]["L"]
        found.append((json.loads((work / "inspected.json").read_text())["layers"], layers))
    assert found[0] == (found[0][0], found[0][0])
    assert found[1] == (2, 2) != found[0]
    assert "'me/moe'" in worker.run("inspect", model, "--revision", "newer").line


def test_a_report_asks_no_hub_for_a_tokenizer(hub: FakeHub, model: str, worker: Worker, work: Path) -> None:
    """One that lies in the cache is found, and for one that does not nothing is asked."""
    for name, found in ((model, True), ("me/elsewhere", False)):
        traces = shutil.copytree(work / "traces", work / f"of-{found}")
        edit_json(traces / "trace.json", lambda info, name=name: info.update(model=name))
        if found:
            code = f"from expertcast.data.models import load_tokenizer as load\nload({model!r})"
            right(worker.code(code))
        before = len(hub.requests)
        right(worker.run("eval", str(traces), "--predictor", "next_norm", "--report", f"report-{found}"))
        assert len(hub.requests) == before
        page = (work / f"report-{found}" / "index.html").read_text()
        page = html.unescape(page)
        assert (f"no tokenizer for '{name}' on this machine" in page) is not found
