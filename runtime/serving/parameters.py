"""What requests may ask for: checked before anything runs, so that nobody is answered other than asked.

What only books, hurries or keeps (`user`, `store`, `metadata`, `prediction`, ...) is taken and does nothing. What would
change the answer and cannot be done is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastapi import HTTPException

COLDEST = 1e-5
"""Temperatures below it are the likeliest token: logits divided by less leave the range of float32."""
MOST_BIAS, MOST_PENALTY = 100.0, 2.0
SEEDS = range(-(2**63), 2**64)
"""What torch takes."""
_TEXTS = ("text", "input_text", "output_text")
Fits = Callable[[Any], bool]


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _texts(value: object) -> bool:
    texts = value if isinstance(value, list) else [value]
    return all(isinstance(text, str) and text for text in texts)


def _objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


def _object_in_text(value: object) -> bool:
    try:
        return isinstance(value, str) and isinstance(json.loads(value), dict)
    except ValueError:
        return False


def _kind(value: object) -> object:
    return value.get("type") if isinstance(value, Mapping) else value


def _plain(value: object) -> bool:
    return isinstance(value, Mapping) and _kind(value.get("format", {"type": "text"})) == "text"


_YES = (lambda value: isinstance(value, bool), "true or false")
_NO = (lambda value: value is False, "false, or leave it out: this server cannot")
_NEW_TOKENS = (lambda value: _whole(value) and value >= 1, "a whole number of 1 or more")
_PENALTY = (lambda value: _number(value) and abs(value) <= MOST_PENALTY, "a number from -2 to 2")
_ONE = (lambda value: _whole(value) and value == 1, "1: a request gets one answer")
_NOTHING = (lambda value: False, "nothing, leave it out: this server cannot")
_FORMAT = "text: this server cannot hold the model to a form"
_MEMBERS = (lambda value: isinstance(value, Mapping), "an object")

FITS: dict[str, tuple[Fits, str]] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _NEW_TOKENS),
    **dict.fromkeys(("n", "best_of"), _ONE),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _PENALTY),
    **dict.fromkeys(("stream", "parallel_tool_calls"), _YES),
    **dict.fromkeys(("echo", "background"), _NO),
    **dict.fromkeys(
        ("audio", "conversation", "functions", "function_call", "moderation", "previous_response_id",
         "web_search_options"), _NOTHING,
    ),
    "temperature": (lambda value: _number(value) and 0 <= value <= 2, "a number from 0 to 2"),
    "top_p": (lambda value: _number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "seed": (lambda value: _whole(value) and value in SEEDS, "a whole number of 64 bits"),
    "stop": (_texts, "a text or a list of texts, none of them empty"),
    "suffix": (lambda value: isinstance(value, str), "a text"),
    "logprobs": (lambda value: value is False, "nothing, leave it out: this server tells no probabilities"),
    "top_logprobs": (lambda value: _whole(value) and value == 0, "0: this server tells no probabilities"),
    "include": (
        lambda value: isinstance(value, list) and not any("logprobs" in str(each) for each in value),
        "a list without probabilities: this server tells none",
    ),
    "modalities": (lambda value: value == ["text"], '["text"]: this server writes text'),
    "response_format": (lambda value: _kind(value) == "text", _FORMAT),
    "text": (_plain, _FORMAT),
    "tool_choice": (lambda value: value in ("auto", "none"), "auto or none: this server cannot force a call"),
    "chat_template_kwargs": _MEMBERS,
    "generation_config": (_object_in_text, "a text that holds a JSON object"),
    "messages": (lambda value: _objects(value) and value != [], 'a list of {"role": ..., "content": ...}'),
    "input": (lambda value: isinstance(value, str) or _objects(value), "a text or a list of objects"),
    "instructions": (lambda value: isinstance(value, str), "a text"),
}  # fmt: skip
"""By parameter: what fits, and what to give."""


def checked(body: dict[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """A request as it is handled: without what was given as null, and with the tools that may be called.

    Args:
        body: the request.
        known: names of what its route knows.

    Raises:
        HTTPException: 400, in one line.
    """
    body = {name: value for name, value in body.items() if value is not None}
    unknown = sorted(body.keys() - set(known))
    if unknown:
        raise HTTPException(400, f"this route knows no {', '.join(map(repr, unknown))}: leave it out")
    for name, (fits, expected) in FITS.items():
        if name in body and not fits(body[name]):
            raise HTTPException(400, f"{name}={_shown(body[name])}: give {expected}")
    tools = body.get("tools", [])
    if not isinstance(tools, list) or not all(_kind(tool) == "function" for tool in tools):
        raise HTTPException(400, f"tools={_shown(tools)}: give a list of functions, this server has no other tools")
    if not tools or body.get("tool_choice") == "none":
        body.pop("tools", None)
    _read_only_text(body.get("messages", body.get("input")))
    return body


def prompts(given: object, vocabulary: int) -> list[str | list[int]]:
    """The prompts of a completion: texts, or tokens.

    Raises:
        HTTPException: 400: neither, or no token of the model.
    """
    made: list[Any] = given if isinstance(given, list) and not any(map(_whole, given)) else [given]
    if not made or not all(
        isinstance(each, str) or (isinstance(each, list) and all(map(_whole, each))) for each in made
    ):
        raise HTTPException(400, f"prompt={_shown(given)}: give a text, a list of tokens, or a list of such")
    tokens = (token for each in made if isinstance(each, list) for token in each)
    wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise HTTPException(400, f"the prompt has token {wrong}: give tokens from 0 to {vocabulary - 1}")
    return made


def biases(given: object, vocabulary: int) -> dict[tuple[int, ...], float] | None:
    """A `logit_bias` as transformers takes biases, by sequences of tokens; None where there is nothing to add.

    Raises:
        HTTPException: 400: no token of the model, or no number from -100 to 100.
    """
    if not isinstance(given, Mapping):
        raise HTTPException(400, f"logit_bias={_shown(given)}: give an object of numbers by token")
    made = dict[tuple[int, ...], float]()
    for token, bias in given.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocabulary):
            raise HTTPException(400, f"logit_bias has {_shown(token)}: give tokens from 0 to {vocabulary - 1}")
        if not _number(bias) or abs(bias) > MOST_BIAS:
            raise HTTPException(400, f"logit_bias has {_shown(bias)} for {token}: give a number from -100 to 100")
        made[(int(token),)] = float(bias)
    return made or None


def _read_only_text(messages: object) -> None:
    if not isinstance(messages, list):
        return
    parts = [part for message in messages for part in _parts(message)]
    other = next((_kind(part) for part in parts if _kind(part) not in _TEXTS), None)
    if other is not None:
        raise HTTPException(400, f"a message has a part of type {_shown(other)}: this server reads text")


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    if "role" in message and isinstance(content, list):
        return content
    kind = str(message.get("type", ""))
    return [message] if "role" not in message and kind.startswith("input_") else []


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
