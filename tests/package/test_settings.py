"""Options of predictors (`--set`) and of policies, as texts on the command line: every field of every one of them."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from expertcast.cli import main
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, names, predictor_class
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.predictors.options import field_docs, parse_settings, settable, written
from expertcast.runtime.policies import EVICTION, MISS, PRE_EVICTION, PREFETCH, ROUTING, TopK
from expertcast.runtime.policies.prefetch import TopKConfig

KINDS = {
    "--policy": EVICTION, "--prefetch": PREFETCH, "--miss": MISS, "--routing": ROUTING, "--pre-eviction": PRE_EVICTION,
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One field of one configuration, and the words that set it on the command line."""

    words: tuple[str, ...]
    """Everything but the value."""
    cls: type
    name: str

    def __str__(self) -> str:
        return f"{self.cls.__name__}.{self.name}"

    def argv(self, text: str) -> list[str]:
        return [*self.words[:-1], self.words[-1] + text]

    def hint(self) -> object:
        return typing.get_type_hints(self.cls)[self.name]


def _fields() -> Iterator[Setting]:
    for predictor in names():
        cls = predictor_class(predictor).config_class
        for name in settable(cls):
            if name != "ahead":
                command = ("train", "no/traces", "--out", "no/folder", "--predictor", predictor, "--set")
                yield Setting((*command, f"{name}="), cls, name)
    for flag, registry in KINDS.items():
        for policy, cls in ((policy.name, policy.config_class) for policy in registry.classes()):
            for name in settable(cls):
                command = ("simulate", "no/traces", "--predictor", "next_norm", flag)
                yield Setting((*command, f"{policy}:{name}="), cls, name)


FIELDS = list(_fields())


def line(capsys: pytest.CaptureFixture[str], argv: Sequence[str]) -> str:
    """The one line with which a command fails."""
    assert main(argv) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def bad_values(hint: object) -> list[str]:
    """Texts that are not values of a type; every field of texts has a choice of them."""
    if hint is float:
        return ["much", "nan", "inf", "-inf", "", "1/2", "none"]
    if hint is int:
        return ["many", "1.5", "", "1,2"]
    if hint is bool:
        return ["maybe", ""]
    if hint is str:
        return ["no-such-choice", ""]
    if hint == int | None:
        return ["many", "0.5"]
    element = typing.get_args(hint)[0]
    return ["nope", "1/x" if element is not str else "full/nope", "nan", ","]


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_bad_value_is_one_line(capsys: pytest.CaptureFixture[str], field: Setting) -> None:
    for text in bad_values(field.hint()):
        said = line(capsys, field.argv(text))
        assert field.name in said, said
        assert "no/traces" not in said, said


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_good_value_is_read_as_the_default_is(capsys: pytest.CaptureFixture[str], field: Setting) -> None:
    default = getattr(field.cls(), field.name)
    text = written(default)
    assert "no/traces" in line(capsys, field.argv(text))  # all options were taken; what they are for is missing
    if isinstance(default, (tuple, list)):
        assert "no/traces" in line(capsys, field.argv(text.replace("/", ",")))
    read = parse_settings([f"{field.name}={text}"], field.cls, "this")
    assert read == field.cls()
    assert type(getattr(read, field.name)) is type(default)


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_every_field_says_what_it_is(field: Setting) -> None:
    assert len(field_docs(field.cls)[field.name]) > 10 or field.name == "weight_decay"


def test_unknown_options_name_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "no/traces", "--out", "no/folder", "--predictor"]
    said = line(capsys, [*train, "linear", "--set", "strength=1"])
    assert said == (
        "expertcast: --set: predictor 'linear' has no option 'strength=1': options are stand_in_rank, inputs, "
        "strengths, learning_rate, weight_decay, step_tokens, steps, passes, patience, written name=value"
    )
    assert "it has no options" in line(capsys, [*train, "frequency", "--set", "a=1"])
    assert "no option 'strengths'" in line(capsys, [*train, "linear", "--set", "strengths"])
    assert "no option 'ahead=2'" in line(capsys, [*train, "linear", "--set", "ahead=2"])
    assert "--set width=1: none of linear, next_norm" in line(
        capsys, [*train, "linear", "next_norm", "--set", "width=1"]
    )
    assert "no option 'member_configs=1'" in line(capsys, [*train, "hybrid", "--set", "member_configs=1"])
    said = line(capsys, ["simulate", "no/traces", "--policy", "lrfu:far=1"])
    assert said.endswith("eviction policy 'lrfu' has no option 'far=1': options are half_life, written name=value")


def test_settings_arrive_in_the_checkpoint(tiny_traces: TraceDataset, tmp_path: Path) -> None:
    out = tmp_path / "linear"
    command = ["train", str(tiny_traces.folder), "--predictor", "linear", "--out", str(out)]
    for text, expected in (("0.001", [0.001]), ("1e-3,0.01", [0.001, 0.01])):
        assert main([*command, "--set", f"strengths={text}"]) == 0
        assert json.loads((out / "config.json").read_text())["predictor_config"]["strengths"] == expected


def test_lists() -> None:
    """Commas part the values of a list, and the options of a policy too."""
    choose = MISS.choose
    assert choose("cascade:levels=full/int4,minor=0.1") == choose("cascade:levels=full,int4,minor=0.1")
    assert choose("cascade:levels=full,int4,minor=0.1").config.levels == ("full", "int4")


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """A field of every type, without checks of its own."""

    whole: int = 1
    number: float = 1.0
    switch: bool = False
    text: str = ""
    least: Annotated[int, Field(ge=1)] | None = None
    several: tuple[int, ...] = (1,)
    pair: tuple[float, float] = (1.0, 2.0)
    choice: Literal["a", "b"] = "a"
    shares: Annotated[Sequence[float], Field(min_length=1)] = (1.0,)
    size: str | int | None = None


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("whole=-3", -3), ("number=2e-3", 0.002), ("switch=True", True), ("text=a/b", "a/b"), ("least=none", None),
        ("least=4", 4), ("several=", ()), ("several=7", (7,)), ("pair=1/2", (1.0, 2.0)), ("choice=b", "b"),
        ("shares=0.5,1", [0.5, 1.0]), ("size=2GB", "2GB"),
    ],
)  # fmt: skip
def test_types(word: str, expected: object) -> None:
    found = getattr(parse_settings([word], Kinds, "it"), word.partition("=")[0])
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("whole=x", "it: whole='x': must be a valid integer, unable to parse string as an integer"),
        ("number=1,5", "it: number='1,5': must be a valid number"),
        ("switch=2", "it: switch='2': must be a valid boolean"),
        ("least=0", "it: least='0': must be greater than or equal to 1"),
        ("choice=c", "it: choice='c': must be 'a' or 'b'"),
        ("several=1/x", "it: several=['1', 'x']: must be a valid integer"),
        ("pair=1", "it: pair=['1']: Field required"),
        ("shares=", "it: shares=[]: Value should have at least 1 item"),
    ],
)
def test_types_refuse(word: str, message: str) -> None:
    with pytest.raises(ExpertcastError) as refused:
        parse_settings([word], Kinds, "it")
    assert str(refused.value).startswith(message)


def test_numbers_are_finite_from_python_too() -> None:
    with pytest.raises(ExpertcastError, match=r"strengths=.*: must be a finite number"):
        EstimatorConfig(strengths=(1.0, float("nan")))
    with pytest.raises(ExpertcastError, match="overfetch=inf"):
        PREFETCH.choose(TopKConfig(overfetch=float("inf")))
    assert TopK.config_class is TopKConfig
