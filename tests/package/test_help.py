"""`--help` of the commands: every name and every key that an option takes, from the registries."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys

import pytest

from expertcast.cli import COMMANDS, main
from expertcast.commands.frozen import FILE
from expertcast.predictors import Predictor, names, predictor_class
from expertcast.predictors.base import PREDICTORS
from expertcast.predictors.options import settable, written
from expertcast.runtime.drafts.names import draft_names
from expertcast.runtime.policies import EVICTION, MISS, PRE_EVICTION, PREFETCH, PRESETS, ROUTING
from expertcast.runtime.storage.codecs import CODECS


def help_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def entry(said: str, name: str) -> str:
    """What follows a name at the start of a line, up to the next name."""
    found = re.search(rf"^  {re.escape(name)}(?=\s)(.*?)(?=^  \w|^\w|\Z)", said, flags=re.MULTILINE | re.DOTALL)
    assert found, name
    return found[1]


def check(said: str, name: str, config: type, leave_out: str = "") -> None:
    text = entry(said, name)
    for field in settable(config):
        if field != leave_out:
            default = written(getattr(config(), field))
            described = rf"^    {field}={re.escape(default)}\s+\S"
            assert re.search(described, text, flags=re.MULTILINE), (name, field)


def test_train_shows_every_predictor_and_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = help_of(capsys, monkeypatch, "train")
    for name in names() + names("tokens"):
        check(said, name, predictor_class(name).config_class, leave_out="ahead")
    assert all(len(line) <= 100 or len(line.split()) == 1 for line in said.splitlines())
    assert "ridge strengths to choose from on validation" in " ".join(entry(said, "linear").split())


@pytest.mark.parametrize("command", ["generate", "bench", "simulate"])
def test_policies_presets_and_predictors(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = help_of(capsys, monkeypatch, command)
    for registry in (EVICTION, PREFETCH, MISS, ROUTING, PRE_EVICTION):
        for cls in registry.classes():
            text = said[said.index(f"\n{registry.kind.replace(' policy', '').replace('-', '_')}: ") :]
            check(text, cls.name, cls.config_class)
            assert ("[lossy]" in entry(text, cls.name)) == getattr(cls, "lossy", False), cls.name
    for name, preset in PRESETS.items():
        assert preset.source.split()[0] in entry(said, name)
    for name in names() + names("tokens"):
        assert entry(said, name).strip()


def test_commands_agree_about_the_codec(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("collect", "train", "eval", "generate", "serve"):
        said = " ".join(help_of(capsys, monkeypatch, command).split())
        assert "how experts are packed in --store-folder (default: as they are there, else raw)" in said, command
    packing = " ".join(help_of(capsys, monkeypatch, "store").split())
    assert "generate and the others take what the folder was packed with (default: bitsplit)" in packing


def test_drafts_and_codecs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said = help_of(capsys, monkeypatch, "generate")
    drafts = " ".join(said[said.index("\ndrafts:") :].split())
    assert ", ".join(draft_names()) in drafts
    for cls in CODECS.classes():
        check(said[said.index("\ncodecs:") :], cls.name, cls.config_class)


def test_what_is_registered_later_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class SameLogits(Predictor):
        """Takes this layer's logits for those of a later one. The rest is not shown."""

        name = "same_logits"

    monkeypatch.setitem(PREDICTORS._classes, SameLogits.name, SameLogits)
    said = help_of(capsys, monkeypatch, "eval")
    assert " ".join(entry(said, "same_logits").split()) == "takes this layer's logits for those of a later one"


def test_a_command_without_such_options_has_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "predictors" not in help_of(capsys, monkeypatch, "inspect")


def test_the_frozen_command_line_is_that_of_the_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    made = runpy.run_path(str(FILE.resolve().parents[3] / "scripts" / "freeze_command_line.py"))["frozen"]()
    assert made == FILE.read_text(), "run python scripts/freeze_command_line.py"


@pytest.mark.parametrize("words", [*([name, "--help"] for name in COMMANDS), ["generate", "reference", "--promt", "x"],
                                   ["bench", "reference", "--bandwidth", "pcie9"], ["train", "traces"]])  # fmt: skip
def test_help_and_refusals_do_not_wait_for_torch(words: list[str]) -> None:
    code = (
        f"import sys; from expertcast.cli import main\n"
        f"try: main({words!r})\n"
        f"except SystemExit as stop: print(stop.code, *({{'torch', 'transformers'}} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == ("0" if words[-1] == "--help" else "2")
    assert f"expertcast {words[0]}" in found.stdout + found.stderr
