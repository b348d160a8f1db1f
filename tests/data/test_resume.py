"""A collection that is killed and run again is bit for bit the one that was left alone; damage between is noticed."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import PreTrainedModel

from expertcast.data import collect as collector
from expertcast.data import trace_format as layout
from expertcast.data.collect import collect
from expertcast.data.means import MeanOutputs
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.text import Document, load_documents
from expertcast.data.trace_writer import merged_progress
from expertcast.data.traces import TraceDataset
from expertcast.predictors.messages import ExpertcastError
from tests.data import small_traces
from tests.data.small_traces import content
from tests.families.models import tiny_model

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {"tokens": 3600, "window": 64, "batch_size": 4, "shard_bytes": 500 * 11_916}


@pytest.fixture(scope="module")
def text() -> list[Document]:
    return load_documents("reference")


def rows(folder: Path) -> pa.Table:
    files = json.loads((folder / layout.DATASET_STATE_FILE).read_text())["_data_files"]
    return pa.concat_tables(
        pa.ipc.open_stream(pa.memory_map(str(folder / file["filename"]))).read_all() for file in files
    ).combine_chunks()


def kill_after_shards(folder: Path, shards: int) -> None:
    """Start the collection in a process of its own and SIGKILL it once so many shards are written."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.data.collect_script", str(folder), json.dumps(SETTINGS)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 100
    while len(list(folder.glob("data-*.arrow"))) < shards:
        assert process.poll() is None, "the collection ended before it was killed"
        assert time.monotonic() < deadline, "the collection wrote no shards"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_killed_and_resumed_equals_uninterrupted(
    reference_model: PreTrainedModel, reference_tokenizer: Any, text: list[Document], tmp_path: Path
) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    kill_after_shards(killed, 2)
    with pytest.raises(ExpertcastError, match="not finished"):
        TraceDataset.open(killed)
    fitting_s = json.loads((killed / layout.TRACE_FILE).read_text())["collection_s"]
    committed_s = merged_progress(killed, [MeanOutputs(find_moe_layers(reference_model))])["seconds"]
    # what a kill between writing a shard and committing it leaves behind: it must not be counted
    done = sorted(killed.glob("data-*.arrow"))
    (killed / layout.shard_file(0, len(done) + 3)).write_bytes(done[0].read_bytes())
    (killed / (layout.shard_file(0, 99) + layout.PARTIAL)).write_bytes(b"half a shard")
    resumed = collect(reference_model, reference_tokenizer, text, killed, **SETTINGS)
    left_alone = collect(reference_model, reference_tokenizer, text, whole, **SETTINGS)
    assert rows(killed).equals(rows(whole))
    assert resumed.info["collection_s"] > fitting_s + committed_s > fitting_s > 0, "those before the kill count"
    assert rows(killed).num_rows == SETTINGS["tokens"]
    for field in dataclasses.fields(resumed.defaults):
        first, second = getattr(resumed.defaults, field.name), getattr(left_alone.defaults, field.name)
        assert torch.equal(torch.as_tensor(first), torch.as_tensor(second)), field.name
    assert sorted(p.name for p in killed.rglob("*")) == sorted(p.name for p in whole.rglob("*"))


def test_complete_traces_are_opened_not_made_again(
    reference_traces: TraceDataset, reference_model: PreTrainedModel, reference_tokenizer: Any, text: list[Document]
) -> None:
    shard = next(reference_traces.folder.glob("data-*.arrow"))
    before = shard.stat().st_mtime_ns
    again = collect(reference_model, reference_tokenizer, text, reference_traces.folder, tokens=12_000)
    assert again.token_count("all") == 12_000
    assert shard.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("changed", "expected"),
    [({"window": 128}, "begun with window=256, now it is 128"), ({"tokens": 9000}, "begun with tokens=12000"),
     ({"batch_size": 4}, "begun with batch_size=8"), ({"seed": 1}, "begun with text=")],
)  # fmt: skip
def test_other_settings_are_refused(
    reference_traces: TraceDataset, reference_model: PreTrainedModel, reference_tokenizer: Any,
    text: list[Document], changed: dict[str, Any], expected: str,
) -> None:  # fmt: skip
    settings = {"tokens": 12_000, **changed}
    with pytest.raises(ExpertcastError, match=expected):
        collect(reference_model, reference_tokenizer, text, reference_traces.folder, **settings)


def test_folders_that_are_not_ours_are_refused(
    reference_model: PreTrainedModel, reference_tokenizer: Any, text: list[Document], tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ExpertcastError, match="not empty and holds no traces of ours"):
        collect(reference_model, reference_tokenizer, text, tmp_path, tokens=3000)
    with pytest.raises(ExpertcastError, match="is a file"):
        collect(reference_model, reference_tokenizer, text, tmp_path / "thesis.tex", tokens=3000)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_estimate_is_printed_and_a_full_disk_refused(
    reference_model: PreTrainedModel, reference_tokenizer: Any, text: list[Document], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    usage = collector.shutil.disk_usage(tmp_path)._replace(free=10**6)
    monkeypatch.setattr(collector.shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ExpertcastError, match=r"need 35.7 MB more .* 1 MB are free: collect fewer tokens"):
        collect(reference_model, reference_tokenizer, text, tmp_path / "traces", tokens=3000)
    assert "3,000 tokens of 11,916 bytes, about 35.7 MB on disk" in capsys.readouterr().err


def begun(
    folder: Path, model: PreTrainedModel, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], TraceDataset]:
    """A collection that was stopped before its end; returns what goes on with it."""

    def go_on() -> TraceDataset:
        return collect(model, tokenizer, load_documents("reference"), folder, **small_traces.SETTINGS)

    with monkeypatch.context() as patch:
        patch.setattr("expertcast.data.collect._finish", lambda *_args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            go_on()
    return go_on


def test_damage_between_a_kill_and_going_on_is_noticed(
    reference_model: PreTrainedModel, reference_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    expected: list[Any],
) -> None:  # fmt: skip
    folder = tmp_path / "traces"
    go_on = begun(folder, reference_model, reference_tokenizer, monkeypatch)
    names = {path.name for path in folder.iterdir()}
    progress = folder / layout.PROGRESS_FOLDER / layout.progress_file(0)
    draw = random.Random(0)
    for path in (progress, folder / layout.shard_file(0, 1)):
        original = path.read_bytes()
        places = [draw.randrange(len(original)) for _ in range(6)]
        for content_now in [*(flipped(original, place) for place in places), original[:-9], b""]:
            path.write_bytes(content_now)
            with pytest.raises(ExpertcastError, match="delete the folder and collect again") as raised:
                go_on()
            assert "\n" not in str(raised.value)
            assert str(path) in str(raised.value)
            assert {path.name for path in folder.iterdir()} == names
        path.write_bytes(original)
    go_on()
    assert content(folder) == expected


def flipped(original: bytes, place: int) -> bytes:
    return original[:place] + bytes([original[place] ^ 4]) + original[place + 1 :]


def test_a_model_that_gives_nan_is_not_collected_from(reference_tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", torch.float32)
    model.get_input_embeddings().weight.data[200:] = float("nan")  # of no token that the probe gives
    with pytest.raises(ExpertcastError, match="gives NaN or infinity among its r"):
        collect(model, reference_tokenizer, load_documents("reference")[:40], tmp_path / "t", tokens=200, window=24)
