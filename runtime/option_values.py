"""Values of options: their types, what a JSON file holds of them, and sizes as people write them."""

from __future__ import annotations

import math
import numbers
import os
import re
import reprlib
import types
import typing
from collections.abc import Mapping
from pathlib import Path

from expertcast.checkpoints.kind import is_name
from expertcast.checkpoints.replacing import recover
from expertcast.checkpoints.repositories import HubName
from expertcast.checkpoints.store import PredictorCheckpoint
from expertcast.predictors import ExpertcastError, names
from expertcast.predictors.fields import field_docs
from expertcast.runtime.policies import Policies
from expertcast.runtime.pools.states import State

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_JSON_TYPES: dict[object, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    types.NoneType: "leave it out",
    Policies: "Policies(...), in a file an object with a text for each kind of policy",
}
"""What JSON may hold for a field of such a type; for others (links, stores, predictors) it holds nothing."""
_ALIKE = {int: numbers.Integral, float: numbers.Real}
"""Types of numbers that are taken as well, such as numpy's."""


def check_types(config: object) -> None:
    """Refuse a configuration in which a field holds a value of another type.

    Raises:
        ExpertcastError: the line names the first such field, its value, and what may be given.
    """
    cls: type = type(config)
    for name, hint in typing.get_type_hints(cls).items():
        value = getattr(config, name)
        if not any(_is_of(kind, value) for kind in _members(hint)):
            meaning = re.split("[:;(]", field_docs(cls)[name])[0].strip().rstrip(".")
            raise ExpertcastError(f"{name}={reprlib.repr(value)}: give {_allowed(hint)} ({name} is: {meaning})")


def _is_of(kind: object, value: object) -> bool:
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(typing.get_args(kind)[0], element) for element in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, _ALIKE.get(kind, kind))  # type: ignore[arg-type, call-overload]


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
    """A value from JSON as a field of this type has it, if it is one; :func:`check_types` refuses others.

    Raises:
        ExpertcastError: a text with NUL, or policies that are none.
    """
    if isinstance(value, str) and "\0" in value:
        raise ExpertcastError(f"{name}={value!r}: give a text without NUL, which no path can have")
    if isinstance(value, list):
        return tuple(value)
    return _policies(value) if isinstance(value, dict) and Policies in _members(hint) else value


def size_bytes(memory: str | int) -> int:
    """Bytes of a size: a number of them, or a text such as `2GB` or `512MiB`.

    Raises:
        ExpertcastError: another text.
    """
    if not isinstance(memory, str):
        return int(memory)
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


def named_checkpoint(given: str | Path) -> PredictorCheckpoint | None:
    """The checkpoint that a `predictor` or `next_token` names: a folder, or a repository of the hub, which is
    downloaded; None for a registered predictor's name.

    Raises:
        ExpertcastError: it names none of these, a predictor and a folder, or a checkpoint that is not right.
    """
    recover(Path(given))
    if is_name(given):
        return None
    if not os.path.exists(given) and HubName.of(given) is None:  # no error for a text that can be no path
        raise ExpertcastError(
            f"predictor {str(given)!r} is neither a folder nor one of {', '.join(names())}, nor user/repo of the "
            "hub: give a checkpoint's folder"
        )
    return PredictorCheckpoint.open(given)
