"""transformers' handlers of the OpenAI routes, with requests checked before they are handled."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Coroutine, Mapping
from typing import Any, TypeVar

import torch
from fastapi import FastAPI, HTTPException, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor
from transformers import (
    BatchEncoding,
    ContinuousBatchingConfig,
    ContinuousBatchingManager,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from expertcast.compat import (
    X_REQUEST_ID,
    BaseGenerateManager,
    BaseHandler,
    CBGenerateManager,
    CBStreamer,
    CBWorkerDeadError,
    ChatCompletionHandler,
    CompletionHandler,
    DirectStreamer,
    GenerateManager,
    GenerationState,
    Modality,
    ResponseHandler,
    _GenerationCancelled,
    _StreamError,
)
from expertcast.predictors.messages import Json, first_line
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.serving.parameters import (
    COLDEST,
    BatchSampling,
    CutStream,
    Penalties,
    Sampler,
    biases,
    checked,
    cut,
    prompts,
)
from expertcast.runtime.serving.requests import Request, Requests

# Running and stopping generations. They stop before a layer's experts are called.

log = logging.getLogger("expertcast.serving")
PATIENCE_S = 1.0
"""Seconds after which a batch's forward is cut off when the server goes down."""
CLOSING, LEFT = "the server is shutting down", "the client has left"
A = TypeVar("A")


class StoppedError(Exception):
    """Nobody waits for this generation any more, or the server is going down."""


class FailedError(Exception):
    """A generation raised; the line says what."""


class Generating:
    """Runs generations of one offloaded model, and stops them.

    Args:
        offloaded: the model.
        requests: those in flight.
    """

    def __init__(self, offloaded: OffloadedModel, requests: Requests) -> None:
        self.requests = requests
        self._current: Request | None = None
        self._unwanted: set[asyncio.Task[Any]] = set()
        self._hooks = [layer.experts.register_forward_pre_hook(self._go_on) for layer in offloaded.view]
        config = offloaded.model.config.get_text_config()
        self._longest: int | None = getattr(config, "max_position_embeddings", None)

    def admit(self, key: str, tokens: int, config: GenerationConfig, room: int | None = None) -> Request:
        """The request of that id, with as many new tokens as the model has places for.

        Args:
            key: of the request.
            tokens: of its prompt.
            config: its own; changed in place.
            room: tokens that a cache has places for; None: it grows.

        Raises:
            HTTPException: no token, too many, or none to generate.
        """
        if not tokens:
            raise HTTPException(400, "the prompt holds no token: give some text")
        for most, said in ((self._longest, "the model reads"), (room, "by its --kv-tokens this server takes")):
            if most is not None:
                if tokens >= most:
                    raise HTTPException(400, f"the prompt has {tokens} tokens, {said} {most - 1} at most")
                config.max_new_tokens = min(config.max_new_tokens, most - tokens)
        request = self.requests.find(key)
        request.prompt_tokens += tokens
        return request

    def run(self, request: Request, generate: Callable[[], Tensor]) -> Tensor:
        """A generation, on the thread that all of them run on.

        Raises:
            StoppedError: nobody waits for it.
            FailedError: it raised.
        """
        self._stop_for(request)
        self._current = request
        try:
            if request.seed is not None:
                torch.manual_seed(request.seed)
            return generate()
        except (StoppedError, _GenerationCancelled):
            raise
        except Exception as error:
            log.exception("%s failed", request.key)
            raise FailedError(first_line(error)) from error
        finally:
            self._current = None

    async def while_wanted(self, request: Request, answer: Coroutine[Any, Any, A]) -> A:
        """An answer, unless nobody waits for it any more: then its end is not waited for.

        Raises:
            StoppedError: nobody waits for it.
        """
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(answer)
        gone = loop.create_future()

        def leave() -> None:
            loop.call_soon_threadsafe(lambda: None if gone.done() else gone.set_result(None))

        request.on_gone(leave)
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        self._unwanted.add(task)
        task.add_done_callback(self._ended)
        raise StoppedError(LEFT if request.left else CLOSING)

    async def all_ended(self, seconds: float) -> None:
        """Wait for what nobody waits for any more: it stops when its turn comes."""
        if self._unwanted:
            await asyncio.wait(self._unwanted, timeout=seconds)

    def idle(self, seconds: float) -> bool:
        """Whether nothing is being generated, waited for as long."""
        until = time.monotonic() + seconds
        while self._current is not None and time.monotonic() < until:
            time.sleep(0.01)
        return self._current is None

    def close(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._unwanted.discard(task)
        if not task.cancelled():
            task.exception()  # which nobody else asks for

    def _go_on(self, *_experts: object) -> None:
        """Before each layer's experts."""
        self._stop_for(self._current)

    def _stop_for(self, request: Request | None) -> None:
        grace = PATIENCE_S if request is None else 0.0  # batches end by themselves between two tokens
        if self.requests.closing_for > grace:
            raise StoppedError(CLOSING)
        if request is not None and request.gone:
            raise StoppedError(LEFT)


class _Counted(StoppingCriteria):  # type: ignore[misc]
    """Stops nothing; sees how many tokens there are."""

    def __init__(self, request: Request, prompt_tokens: int) -> None:
        self._request, self._prompt_tokens, self._tokens = request, prompt_tokens, 0
        request.counted_by(lambda: self._tokens)

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        self._tokens = input_ids.shape[1] - self._prompt_tokens
        self._request.look()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Guarded:
    """Stands for the model where transformers' server calls `generate`."""

    def __init__(self, generating: Generating, model: PreTrainedModel, request: Request) -> None:
        self._generating, self._model, self.request = generating, model, request

    def generate(self, **kwargs: Any) -> Tensor:
        """The model's own; see :meth:`Generating.run`."""
        request, prompt_tokens = self.request, kwargs["input_ids"].shape[1]
        kwargs["stopping_criteria"] = StoppingCriteriaList([_Counted(request, prompt_tokens)])
        if any(request.penalties):
            kwargs["logits_processor"] = LogitsProcessorList([Penalties(*request.penalties, prompt_tokens)])
        return self._generating.run(request, lambda: self._model.generate(**kwargs))


# Managers: one request after another, or continuous batching

MOST_AT_ONCE = 1024
"""Tokens of a batch at most, where the cache has a bound: activations take memory too."""


class OneByOne(GenerateManager):  # type: ignore[misc]
    """Request after request, by the model's `generate`.

    Args:
        generating: what runs them.
    """

    def __init__(self, generating: Generating) -> None:
        super().__init__()
        self._generating = generating

    def generate_streaming(
        self, model: PreTrainedModel, processor: PreTrainedTokenizerBase, inputs: Mapping[str, Any],
        gen_config: GenerationConfig, request_id: str, response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any] | CutStream, DirectStreamer]:  # fmt: skip
        """As transformers has it, without the stop."""
        guarded = self._guarded(model, inputs, gen_config, request_id)
        queue, streamer = super().generate_streaming(
            guarded, processor, inputs, gen_config, request_id, response_parser
        )
        stops = guarded.request.stops
        return CutStream(queue, stops) if stops else queue, streamer

    async def generate_non_streaming(
        self, model: PreTrainedModel, processor: PreTrainedTokenizerBase, inputs: Mapping[str, Any],
        gen_config: GenerationConfig, request_id: str,
    ) -> tuple[str, int, Tensor]:  # fmt: skip
        """As transformers has it, without the stop; ended where nobody waits.

        Raises:
            StoppedError: nobody waits for it.
            FailedError: it raised.
        """
        guarded = self._guarded(model, inputs, gen_config, request_id)
        answer = super().generate_non_streaming(guarded, processor, inputs, gen_config, request_id)
        text, tokens, ids = await self._generating.while_wanted(guarded.request, answer)
        return cut(text, guarded.request.stops), tokens, ids

    @property
    def alive(self) -> bool:
        """Whether the thread is."""
        return bool(self._thread._thread.is_alive())

    def _guarded(
        self, model: PreTrainedModel, inputs: Mapping[str, Any], config: GenerationConfig, key: str
    ) -> Guarded:
        request = self._generating.admit(key, inputs["input_ids"].shape[-1], config)
        return Guarded(self._generating, model, request)


class Batched(CBGenerateManager):  # type: ignore[misc]
    """Many requests at once, by continuous batching.

    Args:
        generating: what stops them.
        kv_tokens: tokens that the cache of all requests together has room for; None: as many as fit the device.
    """

    def __init__(self, generating: Generating, kv_tokens: int | None) -> None:
        page = ContinuousBatchingConfig().page_size
        blocks = None if kv_tokens is None else -(-kv_tokens // page)
        self._room = None if blocks is None else blocks * page
        config = ContinuousBatchingConfig(
            num_blocks=blocks, max_batch_tokens=kv_tokens and MOST_AT_ONCE,
            use_cuda_graph=False,  # the host decides what is copied, and which request is sampled
        )  # fmt: skip
        super().__init__(config)
        self._generating = generating
        self._cb: ContinuousBatchingManager | None = None

    def init_cb(self, model: PreTrainedModel, gen_config: GenerationConfig) -> None:
        """Start batching, with what the first request asks for left out: every request is sampled by its own sampler.

        Raises:
            HTTPException: a request wants what batches cannot do.
        """
        if (gen_config.repetition_penalty or 1.0) != (model.generation_config.repetition_penalty or 1.0):
            raise HTTPException(
                400, "continuous batching knows no repetition_penalty: leave it out, or serve without "
                "--continuous-batching"
            )  # fmt: skip
        if self._cb is None:
            shared = copy.deepcopy(gen_config)
            shared.do_sample, shared.sequence_bias = False, None
            batching = model.init_continuous_batching(
                generation_config=shared, continuous_batching_config=self._cb_config
            )
            processors = batching.logit_processor
            processors.logits_processor.append(BatchSampling(self._generating.requests.sampler))
            processors.tensors_required += 1
            processors.do_processing = True
            batching.start()
            self._cb = batching

    def generate_streaming(
        self, model: PreTrainedModel, processor: PreTrainedTokenizerBase, inputs: Mapping[str, Any],
        gen_config: GenerationConfig, request_id: str, response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], CBStreamer]:  # fmt: skip
        """As transformers has it."""
        request = self._admit(model, inputs, gen_config, request_id)
        queue, streamer = super().generate_streaming(model, processor, inputs, gen_config, request_id, response_parser)
        request.counted_by(lambda: streamer.total_tokens)
        loop = asyncio.get_running_loop()

        def end() -> None:
            loop.call_soon_threadsafe(queue.put_nowait, _StreamError(CLOSING))
            streamer.cancel()

        request.on_gone(end)
        return queue, streamer

    async def generate_non_streaming(
        self, model: PreTrainedModel, processor: PreTrainedTokenizerBase, inputs: Mapping[str, Any],
        gen_config: GenerationConfig, request_id: str,
    ) -> tuple[str, int, list[int]]:  # fmt: skip
        """As transformers has it; ended where nobody waits.

        Raises:
            StoppedError: nobody waits for it.
            FailedError: it raised.
        """
        request = self._admit(model, inputs, gen_config, request_id)
        answer, batching = super().generate_non_streaming(model, processor, inputs, gen_config, request_id), self._cb
        assert batching is not None
        request.on_gone(lambda: batching.cancel_request(request_id))
        try:
            text, tokens, ids = await self._generating.while_wanted(request, answer)
        except CBWorkerDeadError:
            raise
        except RuntimeError as error:
            raise FailedError(first_line(error)) from error
        request.counted_by(lambda: len(ids))
        return text, tokens, ids

    def _admit(self, model: PreTrainedModel, inputs: Mapping[str, Any], config: GenerationConfig, key: str) -> Request:
        request = self._generating.admit(key, len(inputs["input_ids"]), config, self._room)
        sampler = Sampler(model, config, request.seed)
        request.sampler = sampler if sampler.changes else None
        return request

    def stop(self) -> None:
        """At once: what runs is lost, and its clients are told."""
        if self._cb is not None:
            self._cb.stop(block=True, timeout=2, hard_stop=True)


class OffloadedGeneration(GenerationState):  # type: ignore[misc]
    """How requests are generated: one by one, or in batches where that was asked for and the model can.

    Args:
        generating: what runs and stops them.
        continuous_batching: whether in batches.
        kv_tokens: as :class:`Batched`.
    """

    def __init__(self, generating: Generating, *, continuous_batching: bool, kv_tokens: int | None) -> None:
        super().__init__(continuous_batching=continuous_batching)
        self._one_by_one = OneByOne(generating)
        self._batched = Batched(generating, kv_tokens)

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        """The only one of its kind, whatever the model is called."""
        if not use_cb:
            return self._one_by_one
        self._cb_manager = self._batched
        return self._batched

    @property
    def alive(self) -> bool:
        """Whether what generates still runs."""
        return self._one_by_one.alive and bool(self.is_cb_alive())


# Errors in OpenAI's format


def error_body(status: int, message: str) -> Json:
    """What a client of that API expects with a status of 400 and more."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def tell_errors(app: FastAPI) -> None:
    """Answer every error of an application so."""

    def told(kind: type[Exception], read: Callable[[Any], tuple[int, str]]) -> None:
        async def answer(_request: HttpRequest, error: Exception) -> JSONResponse:
            status, message = read(error)
            return JSONResponse(error_body(status, message), status_code=status)

        app.add_exception_handler(kind, answer)

    told(StarletteHTTPException, lambda error: (error.status_code, str(error.detail)))
    told(RequestValidationError, lambda error: (400, f"the body is no JSON object: {error.errors()[0]['msg']}"))
    told(StoppedError, lambda error: (503, str(error)))
    told(CBWorkerDeadError, lambda error: (503, first_line(error)))
    told(FailedError, lambda error: (500, f"the generation failed: {error}"))


NEW_TOKENS = 1024
"""At most, of a request that does not say how many; transformers' number."""
_OWN = ("temperature", "seed", "stop", "logit_bias", "presence_penalty", "frequency_penalty")
"""What is done here, not by transformers' handlers."""


class Checked(BaseHandler):  # type: ignore[misc]
    """Base of all routes: requests are checked, errors are in OpenAI's format."""

    requests: Requests
    chats: PreTrainedTokenizerBase | None = None
    """The tokenizer whose chat template the route needs; None: it needs none."""
    _unheeded: frozenset[str] = frozenset()
    """Of what OpenAI's clients may send, what would have to be heeded and is not."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        """As transformers does.

        Raises:
            HTTPException: the model cannot chat, or a request that cannot be answered.
            FailedError: an answer whose tool calls cannot be read.
        """
        if self.chats is not None and self.chats.chat_template is None:
            raise HTTPException(
                400, f"{self.model_manager.force_model!r} has no chat template: ask /v1/completions with a prompt"
            )
        body = checked(body, self._valid_params_class.__mutable_keys__ - self._unheeded)
        request = self.requests.find(request_id)
        request.seed = body.get("seed")  # set when the generation begins
        request.penalties = (body.get("presence_penalty", 0), body.get("frequency_penalty", 0))
        request.stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop", [])
        body.setdefault("stream", False)
        try:
            answer: Response = await self._answer(body, request_id)
        except (LookupError, TypeError, ValueError, TemplateError) as error:
            if request.generated_tokens:
                raise FailedError(f"what was written cannot be parsed: {first_line(error)}") from error
            missing = f"{error} is missing" if isinstance(error, KeyError) else first_line(error)
            raise HTTPException(400, f"this request cannot be read: {missing}") from error
        except HTTPException as error:
            raise HTTPException(400 if error.status_code == 422 else error.status_code, error.detail) from error
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = self._with_errors(answer.body_iterator, request)
        return answer

    async def _answer(self, body: dict[str, Any], request_id: str) -> Any:
        return await super().handle_request(body, request_id)

    async def _with_errors(self, parts: AsyncIterable[Any], request: Request) -> AsyncIterator[Any]:
        """A stream whose error is an object, where transformers writes a text, and the status of the request."""
        async for part in parts:
            begun, failed, message = part.partition('data: {"error": "')
            status = 503 if self.requests.closing else 500
            if failed or '"type":"response.failed"' in part:
                request.failed = status
            if failed:
                error = error_body(status, message.removesuffix('"}\n\n'))
                part = f"{begun}data: {json.dumps(error)}\n\n"
            yield part

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        """As transformers does, with sampling, biases and stops as OpenAI has them; penalties are no part of it."""
        theirs = {name: value for name, value in body.items() if name not in _OWN}
        config: GenerationConfig = super()._build_generation_config(theirs, model_generation_config, use_cb=use_cb)
        config.max_new_tokens = NEW_TOKENS if config.max_new_tokens is None else config.max_new_tokens
        config.stop_strings = body.get("stop") or config.stop_strings
        if "logit_bias" in body:
            config.sequence_bias = biases(body["logit_bias"], self.model_manager.vocabulary)
        _sample(config, body)
        if use_cb:
            _refuse_in_batches(config, body)
        return config


def _sample(config: GenerationConfig, body: dict[str, Any]) -> None:
    """Sample where a request says how: its temperature is above 0, or it gives none and a `top_p`."""
    temperature = body.get("temperature")
    if temperature is None and "top_p" not in body:
        return
    config.do_sample = temperature is None or temperature >= COLDEST
    config.temperature = None
    if config.do_sample:
        config.temperature = 1.0 if temperature is None else float(temperature)
        config.top_k = config.top_k or 0  # which is none; transformers' own default would be 50


def _refuse_in_batches(config: GenerationConfig, body: dict[str, Any]) -> None:
    asked = [name for name in ("presence_penalty", "frequency_penalty") if body.get(name)]
    asked += ["stop"] if config.stop_strings else []
    if asked:
        raise HTTPException(
            400, f"continuous batching knows no {', '.join(asked)}: leave it out, or serve without "
            "--continuous-batching"
        )  # fmt: skip


class Completions(Checked, CompletionHandler):  # type: ignore[misc]
    """/v1/completions, with prompts in all forms that OpenAI has; several are answered one after another."""

    async def _answer(self, body: dict[str, Any], request_id: str) -> Any:
        name, model, tokenizer = self._resolve_model(body)
        batched = self.generation_state.use_continuous_batching(model, Modality.LLM)
        manager = self.generation_state.get_manager(name, use_cb=batched)
        config = self._build_generation_config(body, model.generation_config, use_cb=batched)
        if batched:
            manager.init_cb(model, config)
        given = prompts(body["prompt"], self.model_manager.vocabulary)
        tokens = [tokenizer(each)["input_ids"] if isinstance(each, str) else each for each in given]
        if body["stream"] and len(tokens) > 1:
            raise HTTPException(400, f"{len(tokens)} prompts are not streamed: leave stream out, or send one prompt")
        answers = []
        for ids in tokens:
            inputs = {"input_ids": ids}
            if not batched:
                rows = {"input_ids": [ids], "attention_mask": [[1] * len(ids)]}
                inputs = BatchEncoding(rows, tensor_type="pt").to(model.device)
            own = request_id, model, tokenizer, name, inputs, copy.copy(config), manager, body.get("suffix")
            if body["stream"]:
                return self._streaming(*own)
            answers.append(json.loads((await self._non_streaming(*own)).body))
        choices = [{**answer["choices"][0], "index": place} for place, answer in enumerate(answers)]
        usage = {kind: sum(answer["usage"][kind] for answer in answers) for kind in answers[0]["usage"]}
        return JSONResponse({**answers[0], "choices": choices, "usage": usage})


class Chats(Checked, ChatCompletionHandler):  # type: ignore[misc]
    """/v1/chat/completions."""

    def _build_completion(self, request_id: str, content: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As transformers does, without the stop and what follows it: a response template reads the tokens again."""
        content = cut(content, self.requests.find(request_id).stops)
        made: dict[str, Any] = super()._build_completion(request_id, content, *args, **kwargs)
        return made


class Responses(Checked, ResponseHandler):  # type: ignore[misc]
    """/v1/responses."""

    _unheeded = frozenset({"prompt"})


# Middleware: an id for every request, one log line when it ends, and clients that leave

_ID = X_REQUEST_ID.encode()
_LEFT: Message = {"type": "http.disconnect"}


class Watching:
    """ASGI middleware around the whole application.

    Args:
        app: the application.
        requests: what it opens and closes requests in.
        routes: paths that are counted by name; all others are `other`.
    """

    def __init__(self, app: ASGIApp, requests: Requests, routes: Collection[str]) -> None:
        self._app, self._requests, self._routes = app, requests, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; those that generate nothing pass."""
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        if self._requests.closing:
            refusal = JSONResponse(error_body(503, "the server is shutting down"), status_code=503)
            await refusal(scope, receive, send)
            return
        headers = [(name, value) for name, value in scope["headers"] if name != _ID]
        wanted = next((value.decode("latin-1") for name, value in scope["headers"] if name == _ID), None)
        request = self._requests.open(scope["path"] if scope["path"] in self._routes else "other", wanted)
        headers.append((_ID, request.key.encode("latin-1")))
        exchange = _Exchange(request, receive, send)
        try:
            await self._app({**scope, "headers": headers}, exchange.receive, exchange.send)
        finally:
            exchange.end()
            self._requests.close(request, exchange.status)


class _Exchange:
    """What is said and heard in one request."""

    def __init__(self, request: Request, receive: Receive, send: Send) -> None:
        self.status = 500
        self._request, self._receive, self._send = request, receive, send
        self._listening: asyncio.Task[None] | None = None
        self._answered = False

    async def receive(self) -> Message:
        """The request's body, and then, when it has left, that the client has."""
        if self._listening is not None:
            await asyncio.shield(self._listening)
            return _LEFT
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._request.leave(left=True)
        elif not message.get("more_body", False):
            self._listening = asyncio.ensure_future(self._listen())
        return message

    async def send(self, message: Message) -> None:
        """A part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self._request.look()
            self._answered = self._answered or not message.get("more_body", False)
        await self._send(message)

    def end(self) -> None:
        """Stop watching the connection."""
        if self._listening is not None:
            self._listening.cancel()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._answered:
            self._request.leave(left=True)
