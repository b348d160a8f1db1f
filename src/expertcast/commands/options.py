"""Command line options from the fields of dataclasses: flag, type, default and help are the field's own."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

from expertcast.predictors.fields import field_docs

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")
N = TypeVar("N", int, float)


@dataclass(frozen=True, kw_only=True)
class Option:
    """What a field's name, type, default and docstring leave open of its option: `Annotated[int, Option(...)]`."""

    flag: str | None = None
    """Its flag, where that is not the field's name."""
    positional: bool = False
    """Whether it is given by its place, without a flag."""
    metavar: str | None = None
    """What stands for the value in the help."""
    choices: Sequence[str] | None = None
    """The only values."""
    read: Callable[[str], object] | None = None
    """Makes a value of one word, where the type does not."""
    help: str | None = None
    """What the option takes, behind what the field's docstring says."""


class Fields(dict[str, Option]):
    """What has to be said of the options of a nested dataclass; its other fields get none. Empty: all of them do."""


@dataclass(frozen=True, kw_only=True)
class _Hint:
    """A field's type without its annotations."""

    kind: object
    """Of a single value."""
    many: bool
    """Whether it takes several values."""
    options: tuple[object, ...]
    """What it is annotated with, the nearest first."""

    @classmethod
    def of(cls, hint: object) -> _Hint:
        many, options = False, list[object]()
        while True:
            origin, args = typing.get_origin(hint), typing.get_args(hint)
            if origin is Annotated:
                options += args[:0:-1]
            elif isinstance(origin, type) and issubclass(origin, Sequence):
                many = True
            elif origin not in (types.UnionType, typing.Union):
                return cls(kind=hint, many=many, options=tuple(options))
            hint = args[0]

    def fields(self) -> Fields | None:
        """Which fields of it get options, when it is a dataclass that is nested in another."""
        return next((option for option in self.options if isinstance(option, Fields)), None)

    def option(self) -> Option:
        """All that is said of the option; what stands nearer to the field goes first."""
        given = [option for option in self.options if isinstance(option, Option)]
        names = [field.name for field in dataclasses.fields(Option)]
        found = {name: next(filter(None, (getattr(option, name) for option in given)), None) for name in names}
        return Option(**{name: value for name, value in found.items() if value is not None})


def add_options(parser: argparse._ActionsContainer, cls: type[C], only: Mapping[str, Option] | None = None) -> None:
    """Give a parser an option per field; those of nested dataclasses are a group of their own in the help.

    Args:
        parser: of a command, or a group of its options.
        cls: the dataclass. Fields without a default must be given; a bool is a switch.
        only: the fields that get an option, and what their annotations do not say of it; all of them when not given.
    """
    docs = field_docs(cls)
    for field, hint in _hints(cls):
        if only is not None and field.name not in only:
            continue
        nested = hint.fields()
        if nested is not None:
            add_options(parser.add_argument_group(field.name, docs[field.name]), _dataclass(hint), nested or None)
        else:
            option = hint.option() if only is None else only[field.name]
            _add(parser, field, hint, option, docs[field.name])


def read_options(cls: type[C], args: argparse.Namespace) -> C:
    """The dataclass from what was parsed; nested ones are made too.

    Args:
        cls: the dataclass whose options a parser was given.
        args: what it found.

    Raises:
        ExpertcastError: values that the dataclass refuses.
    """
    return cls(**_values(cls, args, None))


def _values(cls: type[C], args: argparse.Namespace, only: Mapping[str, Option] | None) -> dict[str, object]:
    values: dict[str, object] = {}
    for field, hint in _hints(cls):
        nested = hint.fields()
        if only is not None and field.name not in only:
            continue
        if nested is not None:
            inner = _dataclass(hint)
            values[field.name] = inner(**_values(inner, args, nested or None))
        else:
            value = getattr(args, field.name)
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return values


def _hints(cls: type[C]) -> Iterator[tuple[dataclasses.Field[object], _Hint]]:
    """Fields with their types, a class's own before those that it inherits."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls, include_extras=True)
    for base in cls.__mro__:
        for name in inspect.get_annotations(base):
            if name in fields:
                yield fields.pop(name), _Hint.of(hints[name])


def _dataclass(hint: _Hint) -> type[DataclassInstance]:
    assert isinstance(hint.kind, type)
    assert dataclasses.is_dataclass(hint.kind)
    return hint.kind


def _add(
    parser: argparse._ActionsContainer, field: dataclasses.Field[object], hint: _Hint, option: Option, doc: str
) -> None:
    default = None if field.default is dataclasses.MISSING else field.default
    required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    text = _help("; ".join(filter(None, (doc.rstrip("."), option.help))), default)
    if option.positional:
        parser.add_argument(field.name, metavar=option.metavar, help=text)
        return
    flag = option.flag or "--" + field.name.replace("_", "-")
    if hint.kind is bool:
        parser.add_argument(flag, dest=field.name, action="store_true", help=text)
        return
    kind = typing.cast(Callable[[str], object], option.read or hint.kind)
    parser.add_argument(
        flag,
        dest=field.name,
        type=kind,
        nargs="+" if hint.many else None,
        required=required,
        default=list(default) if isinstance(default, tuple) else default,
        metavar=option.metavar,
        choices=option.choices,
        help=text,
    )


def _help(doc: str, default: object) -> str:
    """A docstring as the help of an option: no sentence, and with the default unless it says that itself."""
    text = doc if doc[1:2].isupper() else doc[:1].lower() + doc[1:]
    if default is not None and default is not False and default != () and "default:" not in text:
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        text = f"{text} (default: {shown})".strip()
    return text.replace("%", "%%")


def _reader(kind: Callable[[str], N], fits: Callable[[N], bool], expected: str) -> Callable[[str], N]:
    """What makes a number of a word, or says that it is none that fits."""

    def read(text: str) -> N:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r} is no {expected}")
        return value

    return read


PRACTICAL_BANDWIDTH = {"pcie3": 12e9, "pcie4": 25e9, "pcie5": 50e9}
"""Bytes per second of large page-locked copies over 16 lanes, some 80% of what the standards name."""
positive = _reader(int, lambda value: value >= 1, "whole number of 1 or more")
positive_number = _reader(float, lambda value: 0 < value < math.inf, "number above 0")
not_negative = _reader(float, lambda value: 0 <= value < math.inf, "number of 0 or more")
bandwidth = _reader(
    lambda text: PRACTICAL_BANDWIDTH[text] if text in PRACTICAL_BANDWIDTH else float(text),
    lambda value: value > 0,
    f"bandwidth: give bytes per second such as 4e9, or {', '.join(PRACTICAL_BANDWIDTH)}",
)
Count = Annotated[int, Option(metavar="N", read=positive)]
"""1 or more of something."""
