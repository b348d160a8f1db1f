"""A training that is killed and started again ends in the very bits of one that was left alone."""

from __future__ import annotations

import logging
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.cli import main
from expertcast.data.batch import TraceBatch
from expertcast.data.online import OnlineTraces
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset, TraceSource
from expertcast.predictors import ExpertcastError
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.training.fit import fit
from expertcast.training.loop import read_state, resume_folder, usable_state, write_state
from expertcast.training.scoring import FitOptions, Fitted
from tests.irregular import IRREGULAR, in_seconds, put
from tests.training.synthetic import Rows, random_batch, tiny_view

ROOT = Path(__file__).parents[2]
ESTIMATOR = EstimatorConfig(
    inputs=["quasi_hidden", "previous"], width=8, steps=36, step_tokens=64, passes=9, patience=20,
)  # fmt: skip
COMMAND = ["--predictor", "estimator", "--set", "width=8", "steps=60", "step_tokens=256", "passes=99"]


class KilledError(BaseException):
    """Stands for SIGKILL: no code catches it, so files stay as they are."""


class Fatal:
    """A source that ends the process once so many batches were drawn from its train split for training."""

    def __init__(self, source: TraceSource, batches: int) -> None:
        self._source, self._left = source, batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def batches(self, split: str, batch_size: int, **options: Any) -> Iterator[TraceBatch]:
        for batch in self._source.batches(split, batch_size, **options):
            if options.get("shuffle"):
                self._left -= 1
                if self._left < 0:
                    raise KilledError
            yield batch


class Signalled(Fatal):
    """A source that sends this process SIGTERM or SIGINT instead."""

    def __init__(self, source: TraceSource, batches: int, number: signal.Signals) -> None:
        super().__init__(source, batches)
        self._number = number

    def batches(self, split: str, batch_size: int, **options: Any) -> Iterator[TraceBatch]:
        try:
            yield from super().batches(split, batch_size, **options)
        except KilledError:
            os.kill(os.getpid(), self._number)
            raise AssertionError("the signal was not handled") from None


@pytest.fixture(scope="module")
def rows() -> Rows:
    view = tiny_view()
    return Rows(view, random_batch(view, 660).with_previous())


def options(folder: Path | None, logs: Path | None = None) -> FitOptions:
    return FitOptions(resume_folder=folder, log_folder=logs)


def tensors_of(fitted: Fitted) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in fitted.predictor.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    assert not different


def report_of(fitted: Fitted) -> dict[str, Any]:
    return {key: value for key, value in fitted.report.items() if key != "seconds"}


@pytest.fixture(scope="module")
def alone(rows: Rows) -> Fitted:
    return fit("estimator", rows, config=ESTIMATOR, options=options(None))


@pytest.mark.parametrize("kills", [(3, 9, 12, 5, 2), (17, 2, 13), (30, 6)])
def test_estimator(rows: Rows, alone: Fitted, kills: tuple[int, ...], tmp_path: Path) -> None:
    """Killed when a pass over the tokens ends, at a validation round, and at once."""
    for batches in kills:
        with pytest.raises(KilledError):
            fit("estimator", Fatal(rows, batches), config=ESTIMATOR, options=options(tmp_path))
    resumed = fit("estimator", rows, config=ESTIMATOR, options=options(tmp_path))
    assert_same(tensors_of(resumed), tensors_of(alone))
    assert report_of(resumed) == report_of(alone)


def test_time_and_the_pass_of_sums_are_kept(rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KilledError):
        fit("estimator", Fatal(rows, 30), config=ESTIMATOR, options=options(tmp_path))
    spent = {path.name: read_state(path)["seconds"] for path in tmp_path.glob("*.ckpt")}
    assert spent
    assert (tmp_path / "ridge1-0.ckpt").is_file()
    monkeypatch.setattr("expertcast.training.linear.train_batches", None)  # no second pass
    resumed = fit("estimator", rows, config=ESTIMATOR, options=options(tmp_path))
    assert resumed.report["seconds"] > sum(spent.values())
    monkeypatch.undo()
    (tmp_path / "ridge1-0.ckpt").write_bytes(b"damaged")
    assert_same(tensors_of(fit("estimator", rows, config=ESTIMATOR, options=options(tmp_path))), tensors_of(resumed))


def test_a_training_that_was_stopped_early_is_not_gone_on_with(rows: Rows, tmp_path: Path) -> None:
    """A round that gains nothing ends it: a killed process finds the checkpoint of that round."""
    config = replace(ESTIMATOR, learning_rate=1e-12, patience=2)
    whole = fit("estimator", rows, config=config, options=options(tmp_path))
    assert read_state(tmp_path / "ahead1.ckpt")["global_step"] == 9
    again = fit("estimator", Fatal(rows, 0), config=config, options=options(tmp_path))
    assert_same(tensors_of(again), tensors_of(whole))
    assert report_of(again) == report_of(whole)


def test_a_training_that_goes_on_begins_a_version_of_the_logs(rows: Rows, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with pytest.raises(KilledError):
        fit("estimator", Fatal(rows, 16), config=ESTIMATOR, options=options(tmp_path / "states", logs))
    fit("estimator", rows, config=ESTIMATOR, options=options(tmp_path / "states", logs))
    versions = sorted((logs / "maps1").iterdir())
    assert [path.name for path in versions] == ["version_0", "version_1"]
    assert all(EventAccumulator(str(path)).Reload().Tags()["scalars"] for path in versions)


@pytest.mark.slow
def test_a_running_model_as_the_source(
    reference_model: PreTrainedModel, reference_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each start makes its source anew, as another process would; the model is run again over what was drawn before."""

    def source() -> OnlineTraces:
        documents = load_documents("reference")
        return OnlineTraces(
            reference_model, reference_tokenizer, documents, tokens=4000, buffer_tokens=700, early_rank=None
        )

    config = EstimatorConfig(width=8, steps=30, step_tokens=256, passes=9, patience=20)
    whole = fit("estimator", source(), config=config, options=options(None))
    for batches in (11, 12):
        with pytest.raises(KilledError):
            fit("estimator", Fatal(source(), batches), config=config, options=options(tmp_path))
    with caplog.at_level(logging.WARNING):
        resumed = fit("estimator", source(), config=config, options=options(tmp_path))
    assert "resuming at step" in caplog.text
    assert_same(tensors_of(resumed), tensors_of(whole))
    assert report_of(resumed) == report_of(whole)


def test_a_state_of_something_else_is_not_used(rows: Rows, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, path = ESTIMATOR, tmp_path / "maps1.ckpt"

    def killed(config: EstimatorConfig, batches: int) -> int:
        caplog.clear()
        with caplog.at_level(logging.WARNING), pytest.raises(KilledError):
            fit("estimator", Fatal(rows, batches), config=config, options=options(tmp_path))
        return int(read_state(path)["global_step"])

    assert killed(config, 12) > killed(replace(config, weight_decay=1e-4), 5)
    assert "another configuration" in caplog.text
    path.write_bytes(path.read_bytes()[:-100])
    killed(config, 5)
    assert "is damaged" in caplog.text


def test_a_kill_during_a_write_leaves_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ahead1.ckpt"
    write_state(path, {"value": torch.ones(3), 3: [1.5], "fingerprint": "x", "global_step": 1})

    def killed(*_paths: object) -> None:
        raise KilledError

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KilledError):
        write_state(path, {"value": torch.zeros(3), "fingerprint": "x", "global_step": 2})
    state = usable_state(path, "x")
    assert state is not None
    assert (state["global_step"], state[3], state["value"].tolist()) == (1, [1.5], [1.0] * 3)


def test_a_damaged_state_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever byte changed, the training starts over and says so."""
    path = tmp_path / "ahead1.ckpt"
    state = {"score": -math.inf, "network": {"weight": torch.rand(3, 5), "count": torch.arange(4)}}
    write_state(path, {**state, "fingerprint": "x", "global_step": 3})
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 1 << random.randrange(8)
        path.write_bytes(changed)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert usable_state(path, "x") is None
        assert "is damaged, its digest differs: remove it: this training starts over" in caplog.text


@pytest.mark.parametrize("kind", IRREGULAR)
def test_what_is_no_file(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ahead1.ckpt"
    put(kind, path)
    with in_seconds(20), caplog.at_level(logging.WARNING):
        assert usable_state(path, "x") is None
        with pytest.raises(ExpertcastError, match=r"cannot read .*ahead1\.ckpt"):
            read_state(path)


def wait_for(path: Path, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 200
    while not path.exists():
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline, "nothing was written"
        time.sleep(0.002)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_program(rows: Rows, number: signal.Signals, tmp_path: Path) -> None:
    """Lightning ended it by SystemExit: without a status after SIGTERM, with 1 after SIGINT."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            fit("estimator", Signalled(rows, 20, number), config=ESTIMATOR, options=options(tmp_path))
        assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_command_interrupted(
    reference_traces: TraceDataset, number: signal.Signals, status: int, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "expertcast.cli", "train", str(reference_traces.folder), *COMMAND]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--out", str(out)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    wait_for(resume_folder(out) / "ahead1.ckpt", process)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == status
    assert said.splitlines()[-1] == "expertcast: interrupted; run the same command again to go on"
    assert "Traceback" not in said
    assert not out.exists()


def train_killed(arguments: list[str], path: Path, after_s: float) -> None:
    """Start the command and SIGKILL it some time after it has written its first state."""
    process = subprocess.Popen(
        [sys.executable, "-m", "expertcast.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(path, process)
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_command_killed_at_a_random_step(reference_traces: TraceDataset, tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    arguments = ["train", str(reference_traces.folder), *COMMAND]
    after_s = random.uniform(0.0, 0.7)
    train_killed([*arguments, "--out", str(killed)], resume_folder(killed) / "ahead1.ckpt", after_s)
    assert not killed.exists()
    step = read_state(resume_folder(killed) / "ahead1.ckpt").get("global_step", ESTIMATOR.steps)
    assert step >= 3
    assert main([*arguments, "--out", str(killed)]) == 0
    assert main([*arguments, "--out", str(whole)]) == 0
    one, other = (load_file(folder / "model.safetensors") for folder in (killed, whole))
    assert_same(one, other)
    assert not resume_folder(killed).exists()
    assert not resume_folder(whole).exists()
