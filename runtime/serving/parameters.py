"""Parameters of requests, checked before anything runs.

Parameters that cannot change the answer (`user`, `store`, `metadata`, `prediction`, ...) are taken and do nothing. A
parameter that would change it and that this server cannot serve is refused.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_type_hints
from weakref import WeakValueDictionary

import torch
from fastapi import HTTPException
from pydantic import AfterValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic import Json as JsonText
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from typing_extensions import TypedDict

from expertcast.compat import ContinuousBatchingLogitsProcessor, FutureRequestState, ReasoningText

COLDEST = 1e-5
"""Temperatures below it are the likeliest token: logits divided by less leave the range of float32."""
MOST_BIAS = 100.0
_TEXTS = ("text", "input_text", "output_text")
_FORMAT = "text: this server cannot hold the model to a form"


def _without_probabilities(include: list[Any]) -> list[Any]:
    if any("logprobs" in str(each) for each in include):
        raise ValueError
    return include


def _off(value: bool) -> bool:
    if value:
        raise ValueError
    return value


class _Format(TypedDict):
    type: Literal["text"]


class _Written(TypedDict, total=False):
    format: _Format


class _Tool(TypedDict):
    type: Literal["function"]


_Flag = Annotated[bool, "true or false"]
_Off = Annotated[bool, AfterValidator(_off), "false, or leave it out: this server cannot"]
_NewTokens = Annotated[int, Field(ge=1), "a whole number of 1 or more"]
_Nothing = Annotated[None, "nothing, leave it out: this server cannot"]
_One = Annotated[int, Field(ge=1, le=1), "1: a request gets one answer"]
_Penalty = Annotated[float, Field(ge=-2, le=2), "a number from -2 to 2"]
_Text = Annotated[str, "a text"]
_Stop = Annotated[str, Field(min_length=1)]


_A = TypeVar("_A")
_Some = Annotated[_A, Field(min_length=1)]


class Parameters(TypedDict, total=False):
    """Parameters of all routes with the values that this server can serve. The text says what to give instead."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)  # type: ignore[misc]
    max_tokens: _NewTokens
    max_completion_tokens: _NewTokens
    max_output_tokens: _NewTokens
    n: _One
    best_of: _One
    presence_penalty: _Penalty
    frequency_penalty: _Penalty
    stream: _Flag
    parallel_tool_calls: _Flag
    echo: _Off
    background: _Off
    audio: _Nothing
    conversation: _Nothing
    functions: _Nothing
    function_call: _Nothing
    moderation: _Nothing
    previous_response_id: _Nothing
    web_search_options: _Nothing
    suffix: _Text
    instructions: _Text
    temperature: Annotated[float, Field(ge=0, le=2), "a number from 0 to 2"]
    top_p: Annotated[float, Field(ge=0, le=1), "a number from 0 to 1"]
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64), "a whole number of 64 bits"]
    stop: Annotated[_Stop | list[_Stop], "a text or a list of texts, none of them empty"]
    logprobs: Annotated[bool, AfterValidator(_off), "nothing, leave it out: this server tells no probabilities"]
    top_logprobs: Annotated[int, Field(ge=0, le=0), "0: this server tells no probabilities"]
    include: Annotated[
        list[Any], AfterValidator(_without_probabilities), "a list without probabilities: this server tells none"
    ]
    modalities: Annotated[tuple[Literal["text"]], Strict(False), '["text"]: this server writes text']
    response_format: Annotated[_Format, _FORMAT]
    text: Annotated[_Written, _FORMAT]
    tools: Annotated[list[_Tool], "a list of functions, this server has no other tools"]
    tool_choice: Annotated[Literal["auto", "none"], "auto or none: this server cannot force a call"]
    chat_template_kwargs: Annotated[dict[str, Any], "an object"]
    generation_config: Annotated[JsonText[dict[str, Any]], "a text that holds a JSON object"]
    prompt: Annotated[
        str | _Some[list[int]] | _Some[list[str | list[int]]], "a text, a list of tokens, or a list of such"
    ]
    messages: Annotated[list[dict[str, Any]], Field(min_length=1), 'a list of {"role": ..., "content": ...}']
    input: Annotated[str | list[dict[str, Any]], "a text or a list of objects"]


_PARAMETERS = TypeAdapter(Parameters)
_EXPECTED = {name: hint.__metadata__[-1] for name, hint in get_type_hints(Parameters, include_extras=True).items()}


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
    try:
        _PARAMETERS.validate_python(body)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        raise HTTPException(400, f"{name}={_shown(body[name])}: give {_EXPECTED[name]}") from None
    if not body.get("tools") or body.get("tool_choice") == "none":
        body.pop("tools", None)
    _read_only_text(body.get("messages", body.get("input")))
    return body


def prompts(given: str | list[Any], vocabulary: int) -> list[str | list[int]]:
    """The prompts of a completion, texts or tokens: one, or a list of them.

    Raises:
        HTTPException: 400: no token of the model.
    """
    made: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
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
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not abs(bias) <= MOST_BIAS:
            raise HTTPException(400, f"logit_bias has {_shown(bias)} for {token}: give a number from -100 to 100")
        made[(int(token),)] = float(bias)
    return made or None


def _kind(value: object) -> object:
    return value.get("type") if isinstance(value, Mapping) else value


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


# Sampling in batches

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


# OpenAI's penalties, and text that ends before a stop


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
