"""Parse and format configuration fields as text, and read the docstrings of fields.

A configuration is a dataclass whose fields each have a default, a type hint and a docstring.
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
    """Return the docstring of each field of a dataclass on one line, inherited fields included.

    Fields without a docstring, and classes without source, yield empty strings.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError):  # built-in class, or created by exec
            continue
        lines = tree.body if isinstance(tree, ast.ClassDef) else []
        for line, below in pairwise(lines):
            match line, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return {field.name: found.get(field.name, "") for field in dataclasses.fields(cls)}


def settable(cls: type) -> dict[str, object]:
    """Return the types of the fields that can be parsed from text, by name."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if _readable(hints[field.name])}


def parse_settings(words: Iterable[str], cls: type[C], what: str, given: Mapping[str, object] | None = None) -> C:
    """Create a configuration of type `cls` from `field=value` words; other fields keep their default.

    Args:
        words: `field=value` each.
        cls: the dataclass.
        what: name of the configured object in error messages.
        given: values of fields that the words must not set.

    Raises:
        ExpertcastError: a field is unknown or a value does not parse.
    """
    values = dict(given or {})
    hints = {name: hint for name, hint in settable(cls).items() if name not in values}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in hints:
            known = f"options are {', '.join(hints)}, written name=value" if hints else "it has no options"
            raise ExpertcastError(f"{what} has no option {word!r}: {known}")
        values[name] = parse_field(text, hints[name], f"{what}: {name}")
    return cls(**values)


def parse_options(text: str, cls: type[C], what: str) -> C:
    """Create a configuration from the format of :func:`options_text`; raises as :func:`parse_settings`."""
    return parse_settings(filter(None, re.split(r",(?=\w+=)", text)), cls, what)


def options_text(config: DataclassInstance) -> str:
    """Format the fields that differ from their default as `field=value,field=value`."""
    default = type(config)()
    return ",".join(
        f"{field.name}={written(getattr(config, field.name))}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(default, field.name)
    )


def parse_field(text: str, hint: object, what: str) -> object:
    """Parse text as a value of a field's type.

    Args:
        text: `none` for None; tuples are written `a/b` or `a,b`.
        hint: int, float, bool, str, a Literal, a tuple or Sequence of these, or a union of these and None.
        what: name of the field in error messages.

    Raises:
        ExpertcastError: the text is not such a value.
    """
    try:
        return _value(text, hint)
    except (KeyError, ValueError):
        name, expected = _expected(hint)
        raise ExpertcastError(f"{what}={text!r} is not a valid {name}: use {expected}") from None


def written(value: object) -> str:
    """Format a value so that :func:`parse_field` reads it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return "/".join(map(written, value)) if isinstance(value, (tuple, list)) else str(value)


def check_finite(config: DataclassInstance) -> None:
    """Raise :class:`ExpertcastError` for nan and infinities, also in tuples and lists; range checks let nan pass."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        several = value if isinstance(value, (tuple, list)) else (value,)
        if any(isinstance(one, float) and not math.isfinite(one) for one in several):
            raise ExpertcastError(f"{field.name}={written(value)}: must be finite")


def check_between(config: object, least: float, most: float, *names: str) -> None:
    """Raise :class:`ExpertcastError` if a named field of `config` is outside `least` to `most`."""
    for name in names:
        value = getattr(config, name)
        if not least <= value <= most:
            raise ExpertcastError(f"{name}={value}: must be from {least:g} to {most:g}")


def from_values(cls: type[C], values: Mapping[str, object], what: str, remedy: str) -> C:
    """Create a configuration from JSON values: every field must be present, with its own type, and no other.

    Args:
        cls: the dataclass.
        values: values by field name, lists for tuples.
        what: name of the source in error messages.
        remedy: end of error messages.

    Raises:
        ExpertcastError: a field is missing, unknown, of another type, or invalid.
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
"""Scalar types: parser, name, and description of valid text."""


def _value(text: str, hint: object) -> object:
    # raises KeyError or ValueError if the text does not parse
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
    """Return a type's name and the description of valid text."""
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
    """Return the first type of a union that can be parsed from text."""
    return next(filter(_readable, typing.get_args(hint)))


def _elements(hint: object) -> tuple[object, ...]:
    """Return the element types of a tuple or sequence type, with `...` for repetition; empty for other types."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return args
    return (*args, ...) if isinstance(origin, type) and issubclass(origin, Sequence) else ()


def _readable(hint: object) -> bool:
    """Return whether values of this type can be parsed from text."""
    if _is_union(hint):
        return any(map(_readable, typing.get_args(hint)))
    if _elements(hint):
        return all(kind is ... or _readable(kind) for kind in _elements(hint))
    return hint in _PLAIN or typing.get_origin(hint) is typing.Literal
