"""Options of the plug-in, and refused options."""

import json
from pathlib import Path

import pytest
from expertcast_vllm.settings import KEY, VARIABLE, Settings

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.config import OffloadConfig


@pytest.mark.parametrize("value", ["", "0", "false", "False"])
def test_nobody_asks(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert Settings.of(None) is None
    assert Settings.of({}) is None
    assert Settings.of({"other": 1}) is None


def test_the_environment_asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    assert Settings.of(None) == Settings(offload=OffloadConfig())
    monkeypatch.setenv(VARIABLE, '{"slots": 12, "collect": "traces"}')
    settings = Settings.of(None)
    assert settings is not None
    assert (settings.offload.slots, settings.collect) == (12, "traces")
    OffloadConfig(memory="1GB", link="instant").save(tmp_path / "offload.json")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "offload.json"))
    assert Settings.of(None) == Settings(offload=OffloadConfig(memory="1GB", link="instant"))


def test_the_command_line_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"slots": 12}')
    settings = Settings.of({KEY: {"slots": 13}})
    assert settings is not None
    assert settings.offload.slots == 13
    assert Settings.of({KEY: False}) is None


def test_settings_survive_a_journey() -> None:
    settings = Settings.from_dict(
        {"memory": "2GB", "policies": {"eviction": "lru"}, "collect_tokens": 5, "collect_window": 7}
    )
    assert Settings.from_dict(json.loads(json.dumps(settings.as_dict()))) == settings


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slot": 5}, "unknown option 'slot'"),
        ({"mode": "speculate"}, "option 'mode'"),
        ({"draft": "int4"}, "option 'draft'"),
        ({"slots": 5, "memory": "1GB"}, "slots or memory, not both"),
        ({"policies": {"miss": "drop"}}, "lossy"),
        ({"collect": 3}, "collect=3"),
        ({"collect_tokens": 0}, "collect_tokens=0"),
    ],
)
def test_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ExpertcastError, match=words) as caught:
        Settings.from_dict(options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["slot", "draft"])
def test_only_what_works_is_proposed(option: str) -> None:
    with pytest.raises(ExpertcastError) as caught:
        Settings.from_dict({option: 5})
    names = str(caught.value).partition("choose from ")[2].split(", ")
    assert set(names) == set(Settings.from_dict({}).as_dict())


def test_what_is_no_object_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"slots": ')
    with pytest.raises(ExpertcastError, match=VARIABLE):
        Settings.of(None)
