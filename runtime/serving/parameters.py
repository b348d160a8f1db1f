"""Validation of request parameters, sampling, penalties and stop sequences.

Parameters that cannot change the answer (`user`, `store`, `metadata`, `prediction`, ...) are accepted and ignored. A
parameter that would change it but is not supported is refused.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypeVar, get_type_hints
from weakref import WeakValueDictionary

import torch
from fastapi import HTTPException
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticSerializationError, to_json
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
)
from transformers.cli.serving.utils import ReasoningText
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.continuous_batching.requests import FutureRequestState
from typing_extensions import TypedDict

if TYPE_CHECKING:
    from expertcast.runtime.serving.requests import Request

GREEDY_BELOW = 1e-5
"""Lower temperatures mean greedy decoding: logits divided by less leave the range of float32."""
MOST_BIAS, MOST_BIASES = 100.0, 1024
MOST_STOPS, MOST_STOP = 4, 128
"""Stop sequences of a request, and characters of each."""
MOST_PROMPTS, MOST_TOOLS, MOST_MESSAGES = 128, 128, 4096
"""Messages are bounded because a template may look at all of them for each."""
MOST_BODY, MOST_SKIPPED = 4 << 20, 256 << 20
"""Bytes of a request, and of a refused one that are read and dropped."""
_FORMAT = "text: structured output is not supported"


def _unless(wrong: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Return a function that refuses values for which `wrong` is true."""

    def check(value: Any) -> Any:
        if wrong(value):
            raise ValueError
        return value

    return check


_without_probabilities = _unless(lambda include: any("logprobs" in str(each) for each in include))
_few = _unless(lambda given: isinstance(given, Mapping) and len(given) > MOST_BIASES)
"""Runs before the entries are read: each bad one is an error object."""
_begins_with_role = _unless(lambda items: "role" not in items[0])
"""transformers takes a list that begins otherwise for the parts of one message."""

_A = TypeVar("_A")
_Some = Annotated[list[_A], Field(min_length=1, fail_fast=True)]


class _Format(TypedDict):
    type: Literal["text"]


class _Written(TypedDict, total=False):
    format: _Format


class _Tool(TypedDict):
    type: Literal["function"]


class _Part(TypedDict):
    type: Literal["text", "input_text", "output_text"]
    text: str


class _Function(TypedDict):
    name: str
    arguments: str | dict[str, Any]


class _Call(TypedDict):
    function: _Function


class _Message(TypedDict):
    role: str
    content: NotRequired[str | Annotated[list[_Part], Field(fail_fast=True)]]
    tool_calls: NotRequired[Annotated[list[_Call], Field(fail_fast=True)]]
    tool_call_id: NotRequired[str]


class _Called(_Function):
    call_id: str


class _Returned(TypedDict):
    call_id: str
    output: str | Annotated[list[_Part], Field(fail_fast=True)]


class _Thought(TypedDict):
    text: str


class _Thoughts(TypedDict):
    content: NotRequired[Annotated[list[_Thought], Field(fail_fast=True)]]


_Item = Annotated[
    Annotated[_Message, Tag("message")]
    | Annotated[_Called, Tag("function_call")]
    | Annotated[_Returned, Tag("function_call_output")]
    | Annotated[_Thoughts, Tag("reasoning")],
    Discriminator(lambda item: isinstance(item, dict) and ("message" if "role" in item else item.get("type"))),
]
_Flag = Annotated[bool, "true or false"]
_Off = Annotated[bool, Field(le=False), "false or no value: this option is not supported"]
_NewTokens = Annotated[int, Field(ge=1, lt=2**31), "a whole number of 1 or more"]
_One = Annotated[int, Field(ge=1, le=1), "1: each request has one answer"]
_Penalty = Annotated[float, Field(ge=-2, le=2), "a number from -2 to 2"]
_Object = Annotated[dict[str, Any], "an object"]
_Text = Annotated[str, "a string"]
_Stop = Annotated[str, Field(min_length=1, max_length=MOST_STOP)]


class Parameters(TypedDict, total=False):
    """Parameters of all routes with the supported values. Each annotation ends with the expected value for the error
    message.
    """

    __pydantic_config__ = ConfigDict(extra="allow", allow_inf_nan=False)  # type: ignore[misc]
    model: _Text
    max_tokens: _NewTokens
    max_completion_tokens: _NewTokens
    max_output_tokens: _NewTokens
    n: _One
    best_of: _One
    presence_penalty: _Penalty
    frequency_penalty: _Penalty
    stream: _Flag
    stream_options: _Object
    parallel_tool_calls: Annotated[bool, Field(ge=True), "true or no value: one call only is not supported"]
    echo: _Off
    background: _Off
    suffix: _Text
    instructions: _Text
    reasoning: _Object
    reasoning_effort: _Text
    verbosity: Annotated[Literal["medium"], "medium or no value: other lengths are not supported"]
    truncation: Annotated[Literal["disabled"], "disabled or no value: prompts are not shortened"]
    temperature: Annotated[float, Field(ge=0, le=2), "a number from 0 to 2"]
    top_p: Annotated[float, Field(ge=0, le=1), "a number from 0 to 1"]
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64), "a whole number of 64 bits"]
    stop: Annotated[
        _Stop | Annotated[list[_Stop], Field(max_length=MOST_STOPS, fail_fast=True)],
        f"a string or a list of up to {MOST_STOPS} strings, of 1 to {MOST_STOP} characters each",
    ]
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]],
        BeforeValidator(_few),
        f"an object of up to {MOST_BIASES} numbers from -100 to 100 by token",
    ]
    logprobs: Annotated[bool, Field(le=False), "no value: log probabilities are not supported"]
    top_logprobs: Annotated[int, Field(ge=0, le=0), "0: log probabilities are not supported"]
    include: Annotated[
        list[Any], AfterValidator(_without_probabilities), "a list without logprobs: they are not supported"
    ]
    modalities: Annotated[
        list[Literal["text"]], Field(min_length=1, max_length=1), '["text"]: this server writes text only'
    ]
    response_format: Annotated[_Format, _FORMAT]
    text: Annotated[_Written, _FORMAT]
    tools: Annotated[
        list[_Tool], Field(max_length=MOST_TOOLS, fail_fast=True), f"a list of functions, at most {MOST_TOOLS}"
    ]
    tool_choice: Annotated[Literal["auto", "none"], "auto or none: forced calls are not supported"]
    chat_template_kwargs: _Object
    prompt: Annotated[
        str
        | _Some[int]
        | Annotated[_Some[str | Annotated[list[int], Field(fail_fast=True)]], Field(max_length=MOST_PROMPTS)],
        f"a string, a list of tokens, or a list of up to {MOST_PROMPTS} of these",
    ]
    messages: Annotated[
        _Some[_Message], Field(max_length=MOST_MESSAGES),
        f'a list of up to {MOST_MESSAGES} {{"role": ..., "content": text}}: only text is supported',
    ]  # fmt: skip
    input: Annotated[
        str
        | _Some[_Part]
        | Annotated[_Some[_Item], Field(max_length=MOST_MESSAGES), AfterValidator(_begins_with_role)],
        f'a string or a list of up to {MOST_MESSAGES} {{"role": ..., "content": text}}: only text is supported',
    ]


_PARAMETERS = TypeAdapter(Parameters)
_EXPECTED = {name: hint.__metadata__[-1] for name, hint in get_type_hints(Parameters, include_extras=True).items()}


def checked(text: bytes, known: Iterable[str]) -> dict[str, Any]:
    """Validate a request. Return it without null values, and without tools if none may be called.

    Args:
        text: the request as JSON.
        known: parameters of the route.

    Raises:
        HTTPException: status 400 and one line.
    """
    try:
        body = json.loads(text)
        if not isinstance(body, dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not a JSON object, or is nested too deeply") from None
    try:
        to_json(body)
    except PydanticSerializationError as error:
        odd = "UnicodeEncodeError" in str(error)
        line = "has text that is not Unicode, half of a surrogate pair" if odd else "is nested too deeply"
        raise HTTPException(400, f"the request {line}") from None
    body = {name: value for name, value in body.items() if value is not None}
    unknown = next(iter(body.keys() - set(known)), None)
    if unknown is not None:
        raise HTTPException(400, f"unknown parameter {shown(unknown)}: remove it from the request")
    for name in ("messages", "input"):
        if isinstance(body.get(name), list):
            body[name] = [
                {key: value for key, value in each.items() if value is not None} if isinstance(each, dict) else each
                for each in body[name]
            ]
    try:
        _PARAMETERS.validate_python(body, strict=True)
    except ValidationError as error:
        raise HTTPException(400, _fault(body, error)) from None
    if not body.get("tools") or body.get("tool_choice") == "none":
        body.pop("tools", None)
    return body


def _fault(body: dict[str, Any], error: ValidationError) -> str:
    """Name the innermost wrong value of a request, and the expected one."""
    deepest, line = list[int](), ""
    for each in error.errors(include_url=False, include_context=False, include_input=False):
        name = str(each["loc"][0])
        places, where, value = list[int](), name, body[name]
        for key in each["loc"][1:]:  # pydantic puts the names of alternatives in between
            if isinstance(value, list) and isinstance(key, int):
                places, where, value = [*places, key], f"{where}[{key}]", value[key]
            elif isinstance(value, dict) and key in value:
                places, where, value = [*places, 0], f"{where}.{shown(key)[1:-1]}", value[key]
        if not line or places > deepest:  # the alternative that fits longest
            deepest, line = places, f"{where}={shown(value)} is not supported: use {_EXPECTED[name]}"
    return line


def biases(given: Mapping[str, float], vocabulary: int) -> dict[tuple[int, ...], float] | None:
    """Convert a `logit_bias` to the `sequence_bias` of transformers; return None if it is empty.

    Raises:
        HTTPException: status 400: a token is not in the vocabulary.
    """
    refuse_unknown(map(int, given), vocabulary)
    return {(int(token),): float(bias) for token, bias in given.items()} or None


def refuse_unknown(tokens: Iterable[int], vocabulary: int) -> None:
    """Check that the model's embedding has all tokens.

    Raises:
        HTTPException: status 400: it lacks one. A tokenizer may have tokens that were added after training.
    """
    wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise HTTPException(400, f"unknown token {shown(wrong)}: the model has tokens 0 to {vocabulary - 1}")


def shown(value: object) -> str:
    """Return the beginning of a value's representation."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


# Sampling in batches

SAMPLING = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "sequence_bias", "suppress_tokens",
)  # fmt: skip
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


class Stops(StoppingCriteria):  # type: ignore[misc]
    """Ends a generation at its first stop sequence, and counts its tokens. Each token is decoded and compared once.

    Args:
        request: the request, with its stop sequences.
        tokenizer: the model's.
        prompt_tokens: number of tokens before the generated ones.
    """

    def __init__(self, request: Request, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int) -> None:
        self._request, self._tokenizer = request, tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        self._read, self._tokens = prompt_tokens, 0
        self._stream, self._tail = DecodeStream(skip_special_tokens=False), ""
        request.add_token_counter(lambda: self._tokens)

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        """Return whether the sequence is over, `[1]`."""
        new, stops, over = input_ids[0, self._read :].tolist(), self._request.stops, False
        self._read, self._tokens = self._read + len(new), self._tokens + len(new)
        self._request.note_first_token()
        for token in new if stops else ():
            self._tail += self._stream.step(self._tokenizer, token) or ""
            over = over or any(stop in self._tail for stop in stops)
            self._tail = self._tail[-MOST_STOP:]
        return torch.full((len(input_ids),), over, device=input_ids.device)


def cut(text: str, stops: Sequence[str]) -> str:
    """Return the text before the stop sequence that ends first, at which a generation by characters would stop."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found, default=(0, len(text)))[1]]


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
