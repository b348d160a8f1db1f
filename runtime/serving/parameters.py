"""What requests may ask for: checked before anything runs, so that nobody is answered other than asked.

What only books, hurries or keeps (`user`, `store`, `metadata`, `prediction`, ...) is taken and does nothing. What would
change the answer and cannot be done is refused.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from fastapi import HTTPException
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.cli.serving.utils import ReasoningText
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.continuous_batching.requests import FutureRequestState

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


# Sampling in batches: every request by its own temperature, bounds, biases and seed.

SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "sequence_bias")
"""What requests of one batch may differ in."""
_NUMBERS = itertools.count(1)


class Sampler:
    """Changes the logits of one request so that the largest is the token that is drawn.

    Args:
        model: that knows transformers' own processors.
        config: of the request.
        seed: of its draws; None: one of torch's own.
    """

    def __init__(self, model: PreTrainedModel, config: GenerationConfig, seed: int | None) -> None:
        self.number = next(_NUMBERS)
        own = GenerationConfig(**{name: getattr(config, name, None) for name in SAMPLING})
        self._processors: LogitsProcessorList = model._get_logits_processor(own)
        self._generator = None
        if config.do_sample:
            self._generator = torch.Generator()
            self._generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)

    @property
    def changes(self) -> bool:
        """Whether it changes anything."""
        return self._generator is not None or bool(self._processors)

    def __call__(self, logits_1V: Tensor) -> Tensor:
        """Of its next token."""
        logits_1V = self._processors(_NO_TOKENS.to(logits_1V.device), logits_1V)
        if self._generator is None:
            return logits_1V
        # the largest of logits less the logarithms of such noise is a draw from their softmax
        noise_1V = torch.empty(logits_1V.shape).exponential_(generator=self._generator)
        return logits_1V - noise_1V.log().to(logits_1V.device)


class BatchSampling(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """Continuous batching's view of samplers.

    Args:
        find: the sampler of a request by its id; None: it has none.
    """

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012
    ignored_kwargs = ()

    def __init__(self, find: Callable[[str], Sampler | None]) -> None:
        self._find = find
        self._samplers = WeakValueDictionary[int, Sampler]()

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """0: nothing is changed."""
        int32_tensor.fill_(0)

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> Tensor:
        """Numbers of samplers `[B]`."""
        samplers = [self._find(request.state.request_id) for request in requests_with_new_token]
        self._samplers.update({sampler.number: sampler for sampler in samplers if sampler is not None})
        return torch.tensor([0 if sampler is None else sampler.number for sampler in samplers], dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Of logits `[B, V]`, those of which the largest are taken."""
        if not self._samplers:
            return scores
        rows = [self._samplers.get(number) for number in tensor_arg[: len(scores)].tolist()]
        changed = [
            row_1V if sampler is None else sampler(row_1V)
            for sampler, row_1V in zip(rows, scores.unsqueeze(1), strict=True)
        ]
        return torch.cat(changed)


_NO_TOKENS = torch.empty(1, 0, dtype=torch.long)
"""What samplers change does not depend on what came before."""


# What a request's text is written with that transformers does not know: OpenAI's penalties, and stops that are cut.


class Penalties(LogitsProcessor):  # type: ignore[misc]
    """Takes from the logit of every token that was generated: `presence` once, and `frequency` each time.

    Args:
        presence, frequency: as OpenAI's parameters.
        prompt_tokens: tokens before the generated ones.
    """

    supports_continuous_batching = False

    def __init__(self, presence: float, frequency: float, prompt_tokens: int) -> None:
        self._presence, self._frequency, self._prompt_tokens = presence, frequency, prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Of tokens `[B, T]` and logits `[B, V]`, the logits less the penalties."""
        new_BT = input_ids[:, self._prompt_tokens :]
        counts_BV = torch.zeros_like(scores).scatter_add_(1, new_BT, torch.ones_like(new_BT, dtype=scores.dtype))
        return scores - self._frequency * counts_BV - self._presence * (counts_BV > 0)


def cut(text: str, stops: Sequence[str]) -> str:
    """A text up to the first of its stops."""
    return text[: min((at for at in map(text.find, stops) if at >= 0), default=len(text))]


class CutStream:
    """A stream of transformers' server up to the first stop, which never shows, not in parts either.

    Args:
        queue: of what the streamer puts in: texts, other things between them, and an end.
        stops: none of them empty.
    """

    def __init__(self, queue: asyncio.Queue[Any], stops: Sequence[str]) -> None:
        self._queue, self._stops = queue, stops
        self._ready = deque[Any]()
        self._held = ""
        self._over = False

    async def get(self) -> Any:
        """The next item."""
        while not self._ready:
            self._take(await self._queue.get())
        return self._ready.popleft()

    def get_nowait(self) -> Any:
        """The next item.

        Raises:
            asyncio.QueueEmpty: there is none yet.
        """
        while not self._ready:
            self._take(self._queue.get_nowait())
        return self._ready.popleft()

    def _take(self, item: Any) -> None:
        if isinstance(item, str) and not isinstance(item, ReasoningText):
            if self._over:
                return
            self._held += item
            text = cut(self._held, self._stops)
            self._over = text != self._held
            shown = len(text) if self._over else len(text) - self._beginning(text)
            self._show(text[:shown])
            self._held = "" if self._over else text[shown:]
        else:
            self._show(self._held)
            self._held = ""
            self._ready.append(item)

    def _show(self, text: str) -> None:
        if text:
            self._ready.append(text)

    def _beginning(self, text: str) -> int:
        """Characters at the end that may be the beginning of a stop."""
        longest = max(map(len, self._stops)) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
