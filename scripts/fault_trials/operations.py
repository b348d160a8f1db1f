"""What opens an artefact, and what came of it when a file of it was damaged."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fault_trials.artefacts import (
    CONFIG,
    CONFIG_FILE,
    DATA,
    ESTIMATOR,
    FREE,
    NEXT_TOKEN,
    STORE,
    TRACES,
    Made,
    collect_words,
    generate_words,
    train_words,
)
from fault_trials.forked import Ended, Limits, run

RIGHT, EDITED, REFUSED = "right", "edited", "refused"
UNNAMED, TRACEBACK, CHANGED, HUNG = "unnamed", "traceback", "changed", "hung"
GOOD, BAD = (RIGHT, EDITED, REFUSED), (UNNAMED, TRACEBACK, CHANGED, HUNG)
CLASSES = (*GOOD, *BAD)

LIMITS = Limits(seconds=20.0, memory=2 << 30, by_mode=True)
_EXPECTED = ("command", "git_revision", "checkpoint", "folder")
"""Members of a result that say where and when."""

Operation = Callable[[Made, Path, Path], Any]
"""Of the undamaged artefacts, the damaged one and a folder to write in; gives what must be right."""


def _command(words: Callable[[Made, Path, Path], list[str]]) -> Operation:
    def operation(made: Made, target: Path, out: Path) -> Any:
        from expertcast.cli import main

        path = out / "result.json"
        status = main([*words(made, target, out), "--json", str(path)])
        if status:
            raise SystemExit(status)
        return json.loads(path.read_text())

    return operation


def _inspect(_: Made, target: Path, __: Path) -> list[str]:
    from expertcast.commands.inspect import Options

    verify = any(field.name == "verify" for field in dataclasses.fields(Options))
    return ["inspect", str(target), *(["--verify"] if verify else [])]


def _simulate(_: Made, target: Path, __: Path) -> list[str]:
    return ["simulate", str(target), "--policy", "lru", "--slots", "8", "--predictor", "router_input",
            "--processes", "1", "--layer-time", "0.001"]  # fmt: skip


def _open_traces(_: Made, target: Path, __: Path) -> Any:
    from expertcast.data.traces import TraceDataset
    from expertcast.predictors.artefacts import digest

    traces = TraceDataset.open(target)
    columns = "residual_TLD", "logits_TLE", "early_TLD", "document_T", "position_T"
    batches = [[getattr(batch, name) for name in columns] for batch in traces.batches("all", 100)]
    read = [digest(tensor.float().contiguous().numpy().tobytes()) for batch in batches for tensor in batch]
    splits = {split: traces.token_count(split) for split in ("train", "validation", "test")}
    return {"rows": read, "splits": splits, "defaults": _tensors(traces.defaults.as_tensors()), "stand_in":
            _tensors(traces.stand_in.state_dict()), "fingerprint": traces.view.fingerprint()}  # fmt: skip


def _open_checkpoint(_: Made, target: Path, __: Path) -> Any:
    from expertcast.checkpoints.checkpoint import PredictorCheckpoint

    predictor = PredictorCheckpoint.open(target).load()
    return {"config": predictor.config.as_dict(), "tensors": _tensors(predictor.state_dict())}


def _open_store(_: Made, target: Path, __: Path) -> Any:
    from expertcast.runtime.storage.expert_file import verify_store

    verify_store(target)


def _open_config(_: Made, target: Path, __: Path) -> Any:
    from expertcast.runtime.config import OffloadConfig

    return json.loads(json.dumps(OffloadConfig.load(target / CONFIG_FILE).as_dict()))


def _open_data(_: Made, target: Path, __: Path) -> Any:
    from expertcast.data.text import load_documents

    return [[document.text, document.hash] for document in load_documents(target)]


def _tensors(tensors: dict[str, Any]) -> dict[str, str]:
    from expertcast.predictors.artefacts import digest

    return {name: digest(tensor.float().contiguous().numpy().tobytes()) for name, tensor in tensors.items()}


def _eval_checkpoint(made: Made, target: Path, _: Path) -> list[str]:
    return ["eval", str(made[TRACES]), "--predictor", str(target)]


_PREDICTORS = ("quasi_hidden", "early_attention", "linear")
_CHECKPOINT: dict[str, tuple[int, Operation]] = {
    "open": (4, _open_checkpoint),
    "inspect": (3, _command(_inspect)),
    "eval": (2, _command(_eval_checkpoint)),
}
_SPECULATE = _command(lambda made, target, _: generate_words(made, "--predictor", str(target), "--mode", "speculate"))
OPERATIONS: dict[str, dict[str, tuple[int, Operation]]] = {
    TRACES: {
        "open": (3, _open_traces),
        "inspect": (3, _command(_inspect)),
        "eval": (3, _command(lambda _, target, __: ["eval", str(target), "--predictor", *_PREDICTORS])),
        "simulate": (2, _command(_simulate)),
        "train": (2, _command(lambda _, target, out: train_words(target, "linear", out / "trained"))),
    },
    ESTIMATOR: {**_CHECKPOINT, "generate": (1, _SPECULATE)},
    FREE: {**_CHECKPOINT, "generate": (1, _SPECULATE)},
    NEXT_TOKEN: {
        **_CHECKPOINT,
        "simulate": (1, _command(
            lambda made, target, _: [*_simulate(made, made[TRACES], target), "--policy", "forecast", "--next-token",
                                     str(target)])),
    },
    STORE: {
        "open": (2, _open_store),
        "generate": (2, _command(lambda made, target, _: generate_words(made, "--store-folder", str(target)))),
    },
    CONFIG: {
        "open": (2, _open_config),
        "generate": (2, _command(lambda made, target, _: generate_words(made, "--config", str(target / CONFIG_FILE)))),
    },
    DATA: {
        "open": (2, _open_data),
        "collect": (1, _command(lambda made, target, out: collect_words(made, out / "collected", target))),
    },
}  # fmt: skip
"""By artefact and name, with the weight that it is drawn by: the cheap ones more often."""


def perform(artefact: str, name: str, made: Made, target: Path, out: Path) -> tuple[Ended, Any]:
    """Run an operation in a fork; what it gave, None where it failed."""
    result = out / "given.json"

    def work() -> int:
        from expertcast.predictors import ExpertcastError

        try:
            given = OPERATIONS[artefact][name][1](made, target, out)
        except ExpertcastError as error:  # from a loader: as the command line says it
            print(f"expertcast: {error}", file=sys.stderr)
            return 2
        result.write_text(json.dumps(given))
        return 0

    ended = run(work, out, LIMITS)
    return ended, comparable(json.loads(result.read_text())) if result.is_file() else None


def outcome(ended: Ended, given: Any, right: Any, target: Path, edited: bool) -> tuple[str, str]:
    """The class of what came out, and a line about it.

    Args:
        ended: how the operation ended.
        given: what it gave.
        right: what it gives for undamaged files.
        target: the artefact: a refusal names it or a file in it.
        edited: whether another result is as right: the file may be edited by hand, or was sealed anew.
    """
    last = ended.err.strip().splitlines()[-1:] or [""]
    if ended.hung:
        return HUNG, " | ".join(line.strip() for line in ended.err.splitlines() if line.startswith("  File"))[:400]
    if ended.status == 0:
        if given == right:
            return RIGHT, ""
        return (EDITED, "") if edited else (CHANGED, difference(right, given))
    if ended.status != 2 or "Traceback (most recent call last)" in ended.err:
        frames = [line.strip() for line in ended.err.splitlines() if line.startswith("  File")]
        return TRACEBACK, f"status {ended.status}: {last[0]} <- {frames[-1] if frames else ''}"
    words = ended.err.split("expertcast: ")[-1].strip()
    if "\n" in words or not last[0].startswith("expertcast: "):
        return TRACEBACK, f"more than one line: {words[:300]}"
    if target.name not in words and not any(path.name in words for path in target.rglob("*")):
        return UNNAMED, words
    return REFUSED, words


def comparable(given: Any) -> Any:
    """A result without what says where and when, and what depends on how fast a link was."""
    if isinstance(given, dict):
        if "tokens" in given and "stats" in given:
            return {"tokens": given["tokens"], "text": given["text"]}
        return {name: comparable(value) for name, value in given.items() if not _varies(name)}
    return [comparable(value) for value in given] if isinstance(given, list) else given


def difference(right: Any, given: Any, place: str = "") -> str:
    """Where two results part, first."""
    if isinstance(right, dict) and isinstance(given, dict):
        for name in sorted(right.keys() | given.keys()):
            if right.get(name) != given.get(name):
                return difference(right.get(name), given.get(name), f"{place}.{name}")
    if isinstance(right, list) and isinstance(given, list) and len(right) == len(given):
        for number, (one, other) in enumerate(zip(right, given, strict=True)):
            if one != other:
                return difference(one, other, f"{place}[{number}]")
    return f"{place}: {str(right)[:60]} became {str(given)[:60]}"


def _varies(name: str) -> bool:
    return name in _EXPECTED or name == "ledger" or "seconds" in name or name.endswith(("_s", "_at"))
