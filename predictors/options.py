"""A configuration's fields as text: one parser for predictors' and policies' options, and the fields' docstrings.

A configuration is a dataclass whose fields have a default, a type hint and a docstring each.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import TypedDict

from expertcast.predictors.artefacts import CLOSED, check_values
from expertcast.predictors.messages import ExpertcastError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


C = TypeVar("C")


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, on one line; empty where there is none or no source at hand.

    Fields that it inherits are described by the class they come from.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError):  # built in, or made by exec
            continue
        lines = tree.body if isinstance(tree, ast.ClassDef) else []
        for line, below in pairwise(lines):
            match line, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return {field.name: found.get(field.name, "") for field in dataclasses.fields(cls)}


def settable(cls: type) -> dict[str, object]:
    """The fields of a dataclass that a text can give, with their types."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if _readable(hints[field.name])}


def parse_settings(words: Iterable[str], cls: type[C], what: str, given: Mapping[str, object] | None = None) -> C:
    """A configuration of type `cls` from `field=value` words; fields that they leave out have their default.

    Messages name `what` the options are of; the fields that are `given` are not for the words to set.

    Raises:
        ExpertcastError: an unknown field, or a value that does not fit.
    """
    values = dict(given or {})
    hints = {name: hint for name, hint in settable(cls).items() if name not in values}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in hints:
            known = f"its options are {', '.join(hints)}, written name=value" if hints else "it has none"
            raise ExpertcastError(f"{what} has no option {word!r}: {known}")
        values[name] = parse_field(text, hints[name], f"{what}: {name}")
    return cls(**values)


def parse_options(text: str, cls: type[C], what: str) -> C:
    """The same of words behind one another, with commas between: as :func:`options_text` writes them.

    Raises:
        ExpertcastError: as :func:`parse_settings`.
    """
    return parse_settings(filter(None, re.split(r",(?=\w+=)", text)), cls, what)


def options_text(config: DataclassInstance) -> str:
    """The fields of a configuration that are not at their default, as `field=value,field=value`."""
    default = type(config)()
    return ",".join(
        f"{field.name}={written(getattr(config, field.name))}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(default, field.name)
    )


def parse_field(text: str, hint: object, what: str) -> object:
    """A text as a value of a field's type; `none` is None, the values of a tuple are written `a/b` or `a,b`.

    The `hint` is int, float, bool, str, a Literal, a tuple or Sequence of them, or a union of these and None; `what`
    names the field in messages.

    Raises:
        ExpertcastError: the text is no such value.
    """
    try:
        return _value(text, hint)
    except (KeyError, ValueError):
        name, expected = _expected(hint)
        raise ExpertcastError(f"{what}={text!r} is no {name}: give {expected}") from None


def written(value: object) -> str:
    """A value as :func:`parse_field` reads it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return "/".join(map(written, value)) if isinstance(value, (tuple, list)) else str(value)


def check_finite(config: DataclassInstance) -> None:
    """Refuse nan and infinities, in tuples and lists too: they pass comparisons that refuse what is out of range.

    Raises:
        ExpertcastError: a number is not finite.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        several = value if isinstance(value, (tuple, list)) else (value,)
        if any(isinstance(one, float) and not math.isfinite(one) for one in several):
            raise ExpertcastError(f"{field.name}={written(value)}: give finite numbers")


def check_between(config: object, least: float, most: float, *names: str) -> None:
    """Refuse numbers that are out of range, each a field of `config` named in `names`.

    Raises:
        ExpertcastError: a number is below `least` or above `most`.
    """
    for name in names:
        value = getattr(config, name)
        if not least <= value <= most:
            raise ExpertcastError(f"{name}={value}: give a number from {least:g} to {most:g}")


def from_values(cls: type[C], values: Mapping[str, object], what: str, remedy: str) -> C:
    """The configuration whose fields a JSON file holds: each of them, of its own type, and no others.

    Args:
        cls: its dataclass.
        values: by field name, lists for tuples.
        what: they are part of, for messages.
        remedy: for messages.

    Raises:
        ExpertcastError: a field is missing, unknown, of another type, or has a value that the class refuses.
    """
    checked = check_values(values, _schema(cls), what, remedy)  # type: ignore[arg-type]
    try:
        return cls(**checked)
    except ExpertcastError as error:
        raise ExpertcastError(f"{what}: {error}") from error


@cache
def _schema(cls: type) -> type[dict[str, object]]:
    hints = typing.get_type_hints(cls)
    schema = TypedDict(cls.__name__, {field.name: hints[field.name] for field in dataclasses.fields(cls)})  # type: ignore[misc]
    schema.__pydantic_config__ = CLOSED  # type: ignore[attr-defined]
    return schema  # type: ignore[return-value]


_PLAIN: dict[object, tuple[Callable[[str], object], str, str]] = {
    bool: (lambda text: {"true": True, "false": False}[text.lower()], "bool", "true or false"),
    int: (int, "int", "a whole number"),
    float: (float, "float", "a number such as 0.5"),
    str: (str, "text", "a text"),
}
"""Types of a single value: how it is read, their name, and what may be written."""


def _value(text: str, hint: object) -> object:
    """Raises KeyError or ValueError where the text does not fit."""
    if hint in _PLAIN:
        return _PLAIN[hint][0](text)
    args = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return {str(value): value for value in args}[text]
    if _is_union(hint):
        return None if text == "none" and type(None) in args else _value(text, _member(hint))
    parts, elements = re.split("[/,]", text) if text else [], _elements(hint)
    if elements[-1] is ...:
        elements = elements[:1] * len(parts)
    return tuple(_value(part, kind) for part, kind in zip(parts, elements, strict=True))


def _expected(hint: object) -> tuple[str, str]:
    """What a type is called, and what may be written for it."""
    if hint in _PLAIN:
        return _PLAIN[hint][1:]
    if typing.get_origin(hint) is typing.Literal:
        return "choice", "one of " + ", ".join(map(str, typing.get_args(hint)))
    if _is_union(hint):
        name, expected = _expected(_member(hint))
        return name, expected + " or none" * (type(None) in typing.get_args(hint))
    first, *others = _elements(hint)
    each = _expected(first)[1]
    if others == [...]:
        return "list", f"values such as a/b or a,b, each {each}"
    return "list", f"{len(others) + 1} values such as {'/'.join('abcdef'[: len(others) + 1])}, each {each}"


def _is_union(hint: object) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def _member(hint: object) -> object:
    """The type in a union that texts are read as: the first one that has a text for each of its values."""
    return next(filter(_readable, typing.get_args(hint)))


def _elements(hint: object) -> tuple[object, ...]:
    """The types in a tuple, `...` behind the type of any number of values; empty for other types."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return args
    return (*args, ...) if isinstance(origin, type) and issubclass(origin, Sequence) else ()


def _readable(hint: object) -> bool:
    """Whether a text can stand for a value of this type."""
    if _is_union(hint):
        return any(map(_readable, typing.get_args(hint)))
    if _elements(hint):
        return all(kind is ... or _readable(kind) for kind in _elements(hint))
    return hint in _PLAIN or typing.get_origin(hint) is typing.Literal
