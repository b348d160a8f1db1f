"""Check configurations by their types, parse and format their fields as text, and read the fields' docstrings.

A configuration is a dataclass whose fields each have a default, a type hint and a docstring. Limits are part of the
type, such as `Annotated[int, Field(ge=1)]`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import reprlib
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

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


@cache
def _adapters(cls: type) -> dict[str, TypeAdapter[Any]]:
    config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: TypeAdapter(hints[field.name], config=config) for field in dataclasses.fields(cls)}


_SHOULD = "Input should be "
"""Beginning of most messages of pydantic."""


def validate(config: DataclassInstance, *names: str) -> None:
    """Check the fields of a dataclass by their types, and convert them, such as lists to tuples and text to numbers.

    Args:
        config: the dataclass; call this in `__post_init__`.
        names: fields to check; default: all.

    Raises:
        ExpertcastError: names the first wrong field, its value and the allowed values.
    """
    adapters = _adapters(type(config))
    for name in names or adapters:
        value = getattr(config, name)
        try:
            object.__setattr__(config, name, adapters[name].validate_python(value))
        except ValidationError as error:
            said = dict.fromkeys(each["msg"] for each in error.errors())
            wanted = [text.removeprefix(_SHOULD) for text in said if text.startswith(_SHOULD)]
            expected = f"must be {' or '.join(wanted)}" if wanted else next(iter(said))
            raise ExpertcastError(f"{name}={reprlib.repr(value)}: {expected}") from None


class Validated:
    """Base of dataclasses whose fields are checked when they are created, as by :func:`validate`."""

    __slots__ = ()

    def __post_init__(self) -> None:
        validate(self)  # type: ignore[arg-type]


def settable(cls: type) -> dict[str, object]:
    """Return the types of the fields that can be parsed from text, by name."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if _readable(hints[field.name])}


def parse_settings(words: Iterable[str], cls: type[C], what: str, given: Mapping[str, object] | None = None) -> C:
    """Create a configuration of type `cls` from `field=value` words; other fields keep their default.

    A value is `none` for None, and `a/b` or `a,b` for a list.

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
        values[name] = _split(text, hints[name])
    try:
        made = cls(**values)
        validate(made)  # type: ignore[arg-type]
    except ExpertcastError as error:
        raise ExpertcastError(f"{what}: {error}") from None
    return made


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


def written(value: object) -> str:
    """Format a value so that :func:`parse_settings` reads it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return "/".join(map(written, value)) if isinstance(value, (tuple, list)) else str(value)


def from_values(cls: type[C], values: Mapping[str, object], what: str, remedy: str) -> C:
    """Create a configuration from the JSON values of all its fields.

    Raises:
        ExpertcastError: a field is missing, unknown or has a wrong value.
    """
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    wrong = [f"{name} is missing" for name in known if name not in values]
    wrong += [f"unknown field {reprlib.repr(name)}" for name in values if name not in known]
    if wrong:
        raise ExpertcastError(f"{what}: {wrong[0]}; {remedy}")
    try:
        return cls(**values)
    except ExpertcastError as error:
        raise ExpertcastError(f"{what}: {error}; {remedy}") from error


def _split(text: str, hint: object) -> object:
    """Return None for `none` and parts for a list where the type has them, else the text, for pydantic to convert."""
    if text == "none" and type(None) in typing.get_args(hint):
        return None
    listed = any(_elements(kind) for kind in (hint, *typing.get_args(hint)))
    return (re.split("[/,]", text) if text else []) if listed else text


def _elements(hint: object) -> tuple[object, ...]:
    """Return the element types of a tuple or sequence type; empty for other types."""
    origin = typing.get_origin(hint)
    return typing.get_args(hint) if isinstance(origin, type) and issubclass(origin, Sequence) else ()


def _readable(hint: object) -> bool:
    """Return whether values of this type can be parsed from text."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(_readable(kind) for kind in typing.get_args(hint) if kind is not type(None))
    if elements := _elements(hint):
        return all(kind is ... or _readable(kind) for kind in elements)
    return hint in (bool, int, float, str) or typing.get_origin(hint) is typing.Literal
