"""Validation of request parameters, sampling, penalties and stop sequences.

Parameters that cannot change the answer (`user`, `store`, `metadata`, `prediction`, ...) are accepted and ignored. A
parameter that would change it but is not supported is refused.
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

GREEDY_BELOW = 1e-5
"""Lower temperatures mean greedy decoding: logits divided by less leave the range of float32."""
MOST_BIAS = 100.0
_TEXTS = ("text", "input_text", "output_text")
_FORMAT = "text: structured output is not supported"


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
_Off = Annotated[bool, AfterValidator(_off), "false or no value: this option is not supported"]
_NewTokens = Annotated[int, Field(ge=1), "a whole number of 1 or more"]
_Nothing = Annotated[None, "no value: this parameter is not supported"]
_One = Annotated[int, Field(ge=1, le=1), "1: each request has one answer"]
_Penalty = Annotated[float, Field(ge=-2, le=2), "a number from -2 to 2"]
_Text = Annotated[str, "a string"]
_Stop = Annotated[str, Field(min_length=1)]


_A = TypeVar("_A")
_Some = Annotated[_A, Field(min_length=1)]


class Parameters(TypedDict, total=False):
    """Parameters of all routes with the supported values. Each annotation ends with the expected value for the error
    message.
    """

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
    stop: Annotated[_Stop | list[_Stop], "a string or a list of strings, none of them empty"]
    logprobs: Annotated[bool, AfterValidator(_off), "no value: log probabilities are not supported"]
    top_logprobs: Annotated[int, Field(ge=0, le=0), "0: log probabilities are not supported"]
    include: Annotated[
        list[Any], AfterValidator(_without_probabilities), "a list without logprobs: they are not supported"
    ]
    modalities: Annotated[tuple[Literal["text"]], Strict(False), '["text"]: this server writes text only']
    response_format: Annotated[_Format, _FORMAT]
    text: Annotated[_Written, _FORMAT]
    tools: Annotated[list[_Tool], "a list of functions: other tools are not supported"]
    tool_choice: Annotated[Literal["auto", "none"], "auto or none: forced calls are not supported"]
    chat_template_kwargs: Annotated[dict[str, Any], "an object"]
    generation_config: Annotated[JsonText[dict[str, Any]], "a string that contains a JSON object"]
    prompt: Annotated[
        str | _Some[list[int]] | _Some[list[str | list[int]]], "a string, a list of tokens, or a list of these"
    ]
    messages: Annotated[list[dict[str, Any]], Field(min_length=1), 'a list of {"role": ..., "content": ...}']
    input: Annotated[str | list[dict[str, Any]], "a string or a list of objects"]


_PARAMETERS = TypeAdapter(Parameters)
_EXPECTED = {name: hint.__metadata__[-1] for name, hint in get_type_hints(Parameters, include_extras=True).items()}


def checked(body: dict[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Validate a request. Return it without null values, and without tools if none may be called.

    Args:
        body: the request.
        known: parameters of the route.

    Raises:
        HTTPException: status 400 and one line.
    """
    body = {name: value for name, value in body.items() if value is not None}
    unknown = sorted(body.keys() - set(known))
    if unknown:
        raise HTTPException(400, f"unknown parameter {', '.join(map(repr, unknown))}: remove it from the request")
    try:
        _PARAMETERS.validate_python(body)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        raise HTTPException(400, f"{name}={_shown(body[name])} is not supported: use {_EXPECTED[name]}") from None
    if not body.get("tools") or body.get("tool_choice") == "none":
        body.pop("tools", None)
    _read_only_text(body.get("messages", body.get("input")))
    return body


def prompts(given: str | list[Any], vocabulary: int) -> list[str | list[int]]:
    """Return the prompts of a completion request as a list of strings or token lists.

    Raises:
        HTTPException: status 400: a token is not in the vocabulary.
    """
    made: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    tokens = (token for each in made if isinstance(each, list) for token in each)
    wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise HTTPException(400, f"the prompt has unknown token {wrong}: use tokens from 0 to {vocabulary - 1}")
    return made


def biases(given: object, vocabulary: int) -> dict[tuple[int, ...], float] | None:
    """Convert a `logit_bias` to the `sequence_bias` of transformers; return None if it is empty.

    Raises:
        HTTPException: status 400: a token is not in the vocabulary, or a bias is not a number from -100 to 100.
    """
    if not isinstance(given, Mapping):
        raise HTTPException(400, f"logit_bias={_shown(given)} is not an object: use an object of numbers by token")
    made = dict[tuple[int, ...], float]()
    for token, bias in given.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocabulary):
            raise HTTPException(400, f"logit_bias has unknown token {_shown(token)}: use 0 to {vocabulary - 1}")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not abs(bias) <= MOST_BIAS:
            raise HTTPException(400, f"logit_bias has {_shown(bias)} for {token}: use a number from -100 to 100")
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
        raise HTTPException(400, f"a message has a part of type {_shown(other)}: only text is supported")


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
"""Options that may differ between requests of one batch."""
_NUMBERS = itertools.count(1)


class Sampler:
    """Changes the logits of one request so that their argmax is a sample.

    Args:
        model: the source of transformers' own logits processors.
        config: generation config of the request.
        seed: of its random draws; None: drawn from torch's generator.
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
        """Whether it changes any logits."""
        return self._generator is not None or bool(self._processors)

    def __call__(self, logits_1V: Tensor) -> Tensor:
        """Return the changed logits of the next token, `[1, V]`."""
        logits_1V = self._processors(_NO_TOKENS.to(logits_1V.device), logits_1V)
        if self._generator is None:
            return logits_1V
        # Gumbel-max: the argmax of logits minus the log of exponential noise is a draw from their softmax.
        noise_1V = torch.empty(logits_1V.shape).exponential_(generator=self._generator)
        return logits_1V - noise_1V.log().to(logits_1V.device)


class BatchSampling(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """Runs the samplers of all requests of a continuous batch.

    Args:
        find: returns the sampler of a request id, or None.
    """

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012
    ignored_kwargs = ()

    def __init__(self, find: Callable[[str], Sampler | None]) -> None:
        self._find = find
        self._samplers = WeakValueDictionary[int, Sampler]()

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Fill with 0, the number of no sampler."""
        int32_tensor.fill_(0)

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> Tensor:
        """Return the number of each request's sampler, int32 `[B]`."""
        samplers = [self._find(request.state.request_id) for request in requests_with_new_token]
        self._samplers.update({sampler.number: sampler for sampler in samplers if sampler is not None})
        return torch.tensor([0 if sampler is None else sampler.number for sampler in samplers], dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Return the changed logits; `scores` is `[B, V]`."""
        if not self._samplers:
            return scores
        rows = [self._samplers.get(number) for number in tensor_arg[: len(scores)].tolist()]
        changed = [
            row_1V if sampler is None else sampler(row_1V)
            for sampler, row_1V in zip(rows, scores.unsqueeze(1), strict=True)
        ]
        return torch.cat(changed)


_NO_TOKENS = torch.empty(1, 0, dtype=torch.long)
"""Empty token history: the processors in use do not depend on earlier tokens."""


# OpenAI's penalties, and stop sequences


class Penalties(LogitsProcessor):  # type: ignore[misc]
    """Subtracts OpenAI's penalties from the logits of generated tokens: `presence` once, `frequency` per occurrence.

    Args:
        presence: the parameter `presence_penalty`.
        frequency: the parameter `frequency_penalty`.
        prompt_tokens: number of tokens before the generated ones.
    """

    supports_continuous_batching = False

    def __init__(self, presence: float, frequency: float, prompt_tokens: int) -> None:
        self._presence, self._frequency, self._prompt_tokens = presence, frequency, prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the penalised logits; `input_ids` is `[B, T]`, `scores` is `[B, V]`."""
        new_BT = input_ids[:, self._prompt_tokens :]
        counts_BV = torch.zeros_like(scores).scatter_add_(1, new_BT, torch.ones_like(new_BT, dtype=scores.dtype))
        return scores - self._frequency * counts_BV - self._presence * (counts_BV > 0)


def cut(text: str, stops: Sequence[str]) -> str:
    """Return the text before its first stop sequence."""
    return text[: min((at for at in map(text.find, stops) if at >= 0), default=len(text))]


class CutStream:
    """Cuts a stream of transformers' server before the first stop sequence. No part of the stop sequence is sent.

    Args:
        queue: the streamer's queue of strings, other items and an end marker.
        stops: stop sequences, none of them empty.
    """

    def __init__(self, queue: asyncio.Queue[Any], stops: Sequence[str]) -> None:
        self._queue, self._stops = queue, stops
        self._ready = deque[Any]()
        self._held = ""
        self._over = False

    async def get(self) -> Any:
        """Return the next item."""
        while not self._ready:
            self._take(await self._queue.get())
        return self._ready.popleft()

    def get_nowait(self) -> Any:
        """Return the next item.

        Raises:
            asyncio.QueueEmpty: the queue has no item yet.
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
        """Return the number of last characters that may begin a stop sequence."""
        longest = max(map(len, self._stops)) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
