"""The command line: its shape is frozen, its errors are one line, and every command works on real folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertcast.cli import build_parser, main

COMMANDS = {
    "demo": {"--tokens", "--steps"},
    "collect": {"--data", "--tokens", "--out", "--window", "--batch-size", "--dtype", "--device"},
    "train": {"--predictor", "--out", "--ahead", "--set", "--tokens", "--data", "--log", "--seed", "--window",
              "--batch-size", "--dtype", "--device"},
    "eval": {"--predictor", "--split", "--ahead", "--report", "--curve", "--model", "--data", "--quality-tokens",
             "--dtype", "--device"},
    "generate": {"--prompt", "--predictor", "--mode", "--slots", "--bandwidth", "--new-tokens", "--dtype", "--device"},
    "inspect": set(),
}  # fmt: skip


def test_command_line_is_frozen() -> None:
    subparsers = next(action for action in build_parser()._actions if action.dest == "command")
    found = {
        name: {flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
        - {"--help", "--json", "--threads"}
        for name, parser in subparsers.choices.items()  # type: ignore[union-attr]
    }
    assert found == COMMANDS


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must fail with status 2 and one line; return the line."""
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("expertcast: ")
    return lines[0]


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some text\n")
    out = str(tmp_path / "out")
    assert "COMMAND" in fails(capsys)
    assert "'0'" in fails(capsys, "collect", "reference", "--data", str(text), "--tokens", "0", "--out", out)
    assert "no/model" in fails(capsys, "inspect", "no/model")
    assert "missing.txt" in fails(
        capsys, "collect", "reference", "--data", "missing.txt", "--tokens", "9", "--out", out
    )
    assert "--data" in fails(capsys, "train", "reference", "--predictor", "linear", "--out", out)
    assert "unknown predictor 'nope'" in fails(capsys, "train", "reference", "--predictor", "nope", "--out", out)
    assert "no/traces" in fails(capsys, "eval", "no/traces", "--predictor", "linear")
    assert "slots" in fails(capsys, "generate", "reference", "--prompt", "x", "--slots", "1", "--new-tokens", "1")
    assert not Path(out).exists()


def test_collect_train_eval_generate_inspect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    traces, checkpoint, report = (str(tmp_path / name) for name in ("traces", "ckpt", "report"))
    result = tmp_path / "result.json"
    assert main(["collect", "reference", "--data", "reference", "--tokens", "6000", "--out", traces]) == 0
    assert main(["train", traces, "--predictor", "linear", "--out", checkpoint, "--ahead", "1", "2"]) == 0
    assert (
        main(["eval", traces, "--predictor", "quasi_hidden", checkpoint, "--report", report, "--json", str(result)])
        == 0
    )
    scored = json.loads(result.read_text())
    assert scored["split"] == "test"
    assert set(scored["recall_at_k"]) == {"quasi_hidden", "linear"}
    assert (Path(report) / "index.html").is_file()
    command = ["generate", "reference", "--prompt", "It is a truth", "--predictor", checkpoint, "--new-tokens", "4"]
    assert main([*command, "--json", str(result)]) == 0
    exact = json.loads(result.read_text())
    assert main([*command[:4], "--new-tokens", "4", "--json", str(result)]) == 0
    assert json.loads(result.read_text())["tokens"] == exact["tokens"]
    for target in ("reference", traces, checkpoint):
        capsys.readouterr()
        assert main(["inspect", target]) == 0
        assert capsys.readouterr().out.strip()
