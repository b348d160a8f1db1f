"""Values of options as a JSON file holds them, and sizes as people write them."""

from __future__ import annotations

import math
import os
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path

from expertcast.checkpoints.replacing import recover
from expertcast.predictors import ExpertcastError, names
from expertcast.runtime.policies import Policies
from expertcast.runtime.pools.states import State

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_JSON_TYPES: dict[object, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    types.NoneType: "null",
    Policies: "an object with a text for each kind of policy",
}
"""What JSON may hold for a field of such a type; for others (links, stores, predictors) it holds nothing."""


def to_plain(name: str, value: object, hint: object) -> object:
    """A field's value as JSON has it; the field's name and type are for the error.

    Raises:
        ExpertcastError: JSON cannot hold it: an object that was made already, or a number without end.
    """
    if isinstance(value, Policies):
        return value.as_dict()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return list(value)
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    what = value if isinstance(value, float) else f"a {type(value).__name__}"
    raise ExpertcastError(f"{name} is {what}, which no file can hold: give {_allowed(hint)}")


def from_plain(name: str, value: object, hint: object) -> object:
    """A value from JSON as a field of this type has it: of a union, the first member that takes the value decides.

    Raises:
        ExpertcastError: the value is not of the field's type.
    """
    if isinstance(value, str) and "\0" in value:
        raise ExpertcastError(f"{name}={value!r}: give a text without NUL, which no path can have")
    for kind in _members(hint):
        if typing.get_origin(kind) is tuple and isinstance(value, list):
            return tuple(from_plain(name, element, typing.get_args(kind)[0]) for element in value)
        if kind is Policies and isinstance(value, dict):
            return _policies(value)
        if type(value) is kind or (kind is float and type(value) is int):
            return value
    raise ExpertcastError(f"{name}={value!r}: give {_allowed(hint)}")


def size_bytes(memory: str | int) -> int:
    """Bytes of a size: a number of them, or a text such as `2GB` or `512MiB`.

    Raises:
        ExpertcastError: another text.
    """
    if isinstance(memory, int):
        return memory
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMG]?I?)B?\s*", memory.upper())
    try:
        if match is None:
            raise ValueError
        return int(float(match[1]) * _UNITS[match[2]])
    except (ValueError, KeyError, OverflowError):
        raise ExpertcastError(f"memory={memory!r} is no size: write bytes, or text such as '2GB' or '512MiB'") from None


def pool_bytes(text: str) -> dict[State, int]:
    """Bytes of each pool of a text such as `C=2GB,S=500MB`; none for an empty one.

    Raises:
        ExpertcastError: another text, or a state twice.
    """
    found: dict[State, int] = {}
    for entry in filter(None, text.split(",")):
        name, _, size = entry.partition("=")
        state = next((state for state in (State.C, State.S, State.E) if state.name == name.strip()), None)
        if state is None or state in found:
            raise ExpertcastError(
                f"pools={text!r}: give sizes by state, each once, of C (compressed), S (signs and mantissas) and E "
                "(exponents), such as 'C=2GB,E=300MB'; full experts have the slots"
            )
        try:
            found[state] = size_bytes(size)
        except ExpertcastError:
            raise ExpertcastError(f"pools={text!r}: {size!r} is no size: write it as '2GB' or '512MiB'") from None
    return found


def _members(hint: object) -> tuple[object, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _allowed(hint: object) -> str:
    """What JSON may hold for a field of this type, in words."""
    words = []
    for kind in _members(hint):
        if typing.get_origin(kind) is tuple:
            words.append(f"a list, each of it {_allowed(typing.get_args(kind)[0])}")
        elif kind in _JSON_TYPES:
            words.append(_JSON_TYPES[kind])
    return " or ".join(words)


def _policies(given: Mapping[str, object]) -> Policies:
    kinds = list(Policies().as_dict())
    for kind, text in given.items():
        if kind not in kinds or not isinstance(text, str):
            raise ExpertcastError(f"policies {kind}={text!r}: give texts by kind, of {', '.join(kinds)}")
    return Policies(**given)  # type: ignore[arg-type]


def check_predictor(given: str | Path) -> None:
    """Refuse what is neither a folder nor a predictor's name.

    Raises:
        ExpertcastError: with the names that there are.
    """
    recover(Path(given))
    if not os.path.exists(given) and str(given) not in names():  # no error for a text that can be no path
        raise ExpertcastError(
            f"predictor {str(given)!r} is neither a folder nor one of {', '.join(names())}: give a checkpoint's folder"
        )
