"""Handlers of the OpenAI routes: those of transformers' server, with validated requests and OpenAI's error format."""

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
    GREEDY_BELOW,
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

# Running and stopping generations. A generation stops before a layer's experts run.

log = logging.getLogger("expertcast.serving")
ABORT_AFTER_S = 1.0
"""At shutdown a batch's forward pass is aborted after this many seconds."""
CLOSING, LEFT = "the server is shutting down", "the client has disconnected"
A = TypeVar("A")


class StoppedError(Exception):
    """The request's client has left, or the server shuts down."""


class FailedError(Exception):
    """A generation raised; the message is the first line of its error."""


class GenerationRunner:
    """Runs and stops the generations of one offloaded model.

    Args:
        offloaded: the model.
        requests: the requests in flight.
    """

    def __init__(self, offloaded: OffloadedModel, requests: Requests) -> None:
        self.requests = requests
        self._current: Request | None = None
        self._abandoned: set[asyncio.Task[Any]] = set()
        self._hooks = [layer.experts.register_forward_pre_hook(self._check_stop) for layer in offloaded.view]
        config = offloaded.model.config.get_text_config()
        self._longest: int | None = getattr(config, "max_position_embeddings", None)

    def admit(self, key: str, tokens: int, config: GenerationConfig, room: int | None = None) -> Request:
        """Check a prompt's length, limit the new tokens to the remaining positions, and return the request.

        Args:
            key: id of the request.
            tokens: length of its prompt.
            config: its generation config; changed in place.
            room: capacity of the KV cache in tokens; None: unlimited.

        Raises:
            HTTPException: the prompt is empty or leaves no position for a new token.
        """
        if not tokens:
            raise HTTPException(400, "the prompt has no tokens: send some text")
        for most, limit in ((self._longest, "the model"), (room, "--kv-tokens of this server")):
            if most is not None:
                if tokens >= most:
                    raise HTTPException(400, f"the prompt has {tokens} tokens, but {limit} allows at most {most - 1}")
                config.max_new_tokens = min(config.max_new_tokens, most - tokens)
        request = self.requests.find(key)
        request.prompt_tokens += tokens
        return request

    def run(self, request: Request, generate: Callable[[], Tensor]) -> Tensor:
        """Run a generation. All generations run on the same thread.

        Raises:
            StoppedError: the request is abandoned.
            FailedError: the generation raised.
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

    async def await_answer(self, request: Request, answer: Coroutine[Any, Any, A]) -> A:
        """Await an answer until the request is abandoned; the rest of the generation then ends unobserved.

        Raises:
            StoppedError: the request is abandoned.
        """
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(answer)
        gone = loop.create_future()

        def abandon() -> None:
            loop.call_soon_threadsafe(lambda: None if gone.done() else gone.set_result(None))

        request.on_abandoned(abandon)
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        self._abandoned.add(task)
        task.add_done_callback(self._ended)
        raise StoppedError(LEFT if request.left else CLOSING)

    async def wait_abandoned(self, seconds: float) -> None:
        """Wait up to `seconds` for abandoned generations; each stops at its next layer."""
        if self._abandoned:
            await asyncio.wait(self._abandoned, timeout=seconds)

    def idle(self, seconds: float) -> bool:
        """Wait up to `seconds` for the current generation; return whether none runs."""
        until = time.monotonic() + seconds
        while self._current is not None and time.monotonic() < until:
            time.sleep(0.01)
        return self._current is None

    def close(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio logs it

    def _check_stop(self, *_experts: object) -> None:
        self._stop_for(self._current)

    def _stop_for(self, request: Request | None) -> None:
        grace = ABORT_AFTER_S if request is None else 0.0  # batches are usually stopped between two tokens
        if self.requests.closing_for > grace:
            raise StoppedError(CLOSING)
        if request is not None and request.abandoned:
            raise StoppedError(LEFT)


class _Counted(StoppingCriteria):  # type: ignore[misc]
    """Counts generated tokens and never stops."""

    def __init__(self, request: Request, prompt_tokens: int) -> None:
        self._request, self._prompt_tokens, self._tokens = request, prompt_tokens, 0
        request.add_token_counter(lambda: self._tokens)

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        self._tokens = input_ids.shape[1] - self._prompt_tokens
        self._request.note_first_token()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class StoppableModel:
    """Replaces the model in transformers' server, so that `generate` can be stopped."""

    def __init__(self, generating: GenerationRunner, model: PreTrainedModel, request: Request) -> None:
        self._generating, self._model, self.request = generating, model, request

    def generate(self, **kwargs: Any) -> Tensor:
        """Run the model's own `generate` by :meth:`GenerationRunner.run`."""
        request, prompt_tokens = self.request, kwargs["input_ids"].shape[1]
        kwargs["stopping_criteria"] = StoppingCriteriaList([_Counted(request, prompt_tokens)])
        if any(request.penalties):
            kwargs["logits_processor"] = LogitsProcessorList([Penalties(*request.penalties, prompt_tokens)])
        return self._generating.run(request, lambda: self._model.generate(**kwargs))


# Managers: one request after another, or continuous batching

MOST_AT_ONCE = 1024
"""Tokens per batch if the cache is limited, because activations take memory too."""


class SequentialManager(GenerateManager):  # type: ignore[misc]
    """Runs one request after another by the model's `generate`.

    Args:
        generating: runs the generations.
    """

    def __init__(self, generating: GenerationRunner) -> None:
        super().__init__()
        self._generating = generating

    def generate_streaming(
        self, model: PreTrainedModel, processor: PreTrainedTokenizerBase, inputs: Mapping[str, Any],
        gen_config: GenerationConfig, request_id: str, response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any] | CutStream, DirectStreamer]:  # fmt: skip
        """Stream as transformers does, without the stop sequence."""
        stoppable = self._stoppable(model, inputs, gen_config, request_id)
        queue, streamer = super().generate_streaming(
            stoppable, processor, inputs, gen_config, request_id, response_parser
        )
        stops = stoppable.request.stops
        return CutStream(queue, stops) if stops else queue, streamer

    async def generate_non_streaming(
        self, model: PreTrainedModel, processor: PreTrainedTokenizerBase, inputs: Mapping[str, Any],
        gen_config: GenerationConfig, request_id: str,
    ) -> tuple[str, int, Tensor]:  # fmt: skip
        """Generate as transformers does, without the stop sequence.

        Raises:
            StoppedError: the request is abandoned.
            FailedError: the generation raised.
        """
        stoppable = self._stoppable(model, inputs, gen_config, request_id)
        answer = super().generate_non_streaming(stoppable, processor, inputs, gen_config, request_id)
        text, tokens, ids = await self._generating.await_answer(stoppable.request, answer)
        return cut(text, stoppable.request.stops), tokens, ids

    @property
    def alive(self) -> bool:
        """Whether the generating thread is alive."""
        return bool(self._thread._thread.is_alive())

    def _stoppable(
        self, model: PreTrainedModel, inputs: Mapping[str, Any], config: GenerationConfig, key: str
    ) -> StoppableModel:
        request = self._generating.admit(key, inputs["input_ids"].shape[-1], config)
        return StoppableModel(self._generating, model, request)


class BatchedManager(CBGenerateManager):  # type: ignore[misc]
    """Runs many requests at once by continuous batching.

    Args:
        generating: stops the generations.
        kv_tokens: capacity of the shared KV cache in tokens; None: as many as fit the device.
    """

    def __init__(self, generating: GenerationRunner, kv_tokens: int | None) -> None:
        page = ContinuousBatchingConfig().page_size
        blocks = None if kv_tokens is None else -(-kv_tokens // page)
        self._room = None if blocks is None else blocks * page
        config = ContinuousBatchingConfig(
            num_blocks=blocks, max_batch_tokens=kv_tokens and MOST_AT_ONCE,
            use_cuda_graph=False,  # the host decides the copies and samples per request
        )  # fmt: skip
        super().__init__(config)
        self._generating = generating
        self._cb: ContinuousBatchingManager | None = None

    def init_cb(self, model: PreTrainedModel, gen_config: GenerationConfig) -> None:
        """Start batching at the first request. Sampling options are left out: every request has its own sampler.

        Raises:
            HTTPException: the request has a `repetition_penalty`, which batches do not support.
        """
        if (gen_config.repetition_penalty or 1.0) != (model.generation_config.repetition_penalty or 1.0):
            raise HTTPException(
                400, "continuous batching does not support repetition_penalty: leave it out, or serve without "
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
        """Stream as transformers does, until the request is abandoned."""
        request = self._admit(model, inputs, gen_config, request_id)
        queue, streamer = super().generate_streaming(model, processor, inputs, gen_config, request_id, response_parser)
        request.add_token_counter(lambda: streamer.total_tokens)
        loop = asyncio.get_running_loop()

        def end() -> None:
            loop.call_soon_threadsafe(queue.put_nowait, _StreamError(CLOSING))
            streamer.cancel()

        request.on_abandoned(end)
        return queue, streamer

    async def generate_non_streaming(
        self, model: PreTrainedModel, processor: PreTrainedTokenizerBase, inputs: Mapping[str, Any],
        gen_config: GenerationConfig, request_id: str,
    ) -> tuple[str, int, list[int]]:  # fmt: skip
        """Generate as transformers does.

        Raises:
            StoppedError: the request is abandoned.
            FailedError: the generation raised.
        """
        request = self._admit(model, inputs, gen_config, request_id)
        answer, batching = super().generate_non_streaming(model, processor, inputs, gen_config, request_id), self._cb
        assert batching is not None
        request.on_abandoned(lambda: batching.cancel_request(request_id))
        try:
            text, tokens, ids = await self._generating.await_answer(request, answer)
        except CBWorkerDeadError:
            raise
        except RuntimeError as error:
            raise FailedError(first_line(error)) from error
        request.add_token_counter(lambda: len(ids))
        return text, tokens, ids

    def _admit(self, model: PreTrainedModel, inputs: Mapping[str, Any], config: GenerationConfig, key: str) -> Request:
        request = self._generating.admit(key, len(inputs["input_ids"]), config, self._room)
        sampler = Sampler(model, config, request.seed)
        request.sampler = sampler if sampler.changes else None
        return request

    def stop(self) -> None:
        """Stop at once. Running requests are lost and their clients get an error."""
        if self._cb is not None:
            self._cb.stop(block=True, timeout=2, hard_stop=True)


class OffloadedGeneration(GenerationState):  # type: ignore[misc]
    """Chooses between one-by-one generation and continuous batching.

    Args:
        generating: runs and stops the generations.
        continuous_batching: whether to batch, if the model supports it.
        kv_tokens: as for :class:`BatchedManager`.
    """

    def __init__(self, generating: GenerationRunner, *, continuous_batching: bool, kv_tokens: int | None) -> None:
        super().__init__(continuous_batching=continuous_batching)
        self._one_by_one = SequentialManager(generating)
        self._batched = BatchedManager(generating, kv_tokens)

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        """Return the manager; there is one of each kind for all model names."""
        if not use_cb:
            return self._one_by_one
        self._cb_manager = self._batched
        return self._batched

    @property
    def alive(self) -> bool:
        """Whether the generating threads are alive."""
        return self._one_by_one.alive and bool(self.is_cb_alive())


# Errors in OpenAI's format


def error_body(status: int, message: str) -> Json:
    """Return the body of an error response in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error of an application in OpenAI's format."""

    def install(kind: type[Exception], read: Callable[[Any], tuple[int, str]]) -> None:
        async def answer(_request: HttpRequest, error: Exception) -> JSONResponse:
            status, message = read(error)
            return JSONResponse(error_body(status, message), status_code=status)

        app.add_exception_handler(kind, answer)

    install(StarletteHTTPException, lambda error: (error.status_code, str(error.detail)))
    install(RequestValidationError, lambda error: (400, f"the body is not a JSON object: {error.errors()[0]['msg']}"))
    install(StoppedError, lambda error: (503, str(error)))
    install(CBWorkerDeadError, lambda error: (503, first_line(error)))
    install(FailedError, lambda error: (500, f"the generation failed: {error}"))


NEW_TOKENS = 1024
"""Default limit of new tokens, the same as transformers'."""
_OWN = ("temperature", "seed", "stop", "logit_bias", "presence_penalty", "frequency_penalty")
"""Parameters handled here instead of by transformers' handlers."""


class CheckedHandler(BaseHandler):  # type: ignore[misc]
    """Base of all handlers: validates requests and answers errors in OpenAI's format."""

    requests: Requests
    chats: PreTrainedTokenizerBase | None = None
    """The tokenizer whose chat template the route needs; None for routes without one."""
    _unsupported: frozenset[str] = frozenset()
    """Parameters of OpenAI's API that transformers accepts but ignores; they are refused here."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        """Validate and answer a request.

        Raises:
            HTTPException: the model has no chat template, or the request is invalid.
            FailedError: the generated tool calls cannot be parsed.
        """
        if self.chats is not None and self.chats.chat_template is None:
            raise HTTPException(
                400, f"{self.model_manager.force_model!r} has no chat template: send a prompt to /v1/completions"
            )
        body = checked(body, self._valid_params_class.__mutable_keys__ - self._unsupported)
        request = self.requests.find(request_id)
        request.seed = body.get("seed")  # set when the generation begins
        request.penalties = (body.get("presence_penalty", 0), body.get("frequency_penalty", 0))
        request.stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop", [])
        body.setdefault("stream", False)
        try:
            answer: Response = await self._answer(body, request_id)
        except (LookupError, TypeError, ValueError, TemplateError) as error:
            if request.generated_tokens:
                raise FailedError(f"the generated text cannot be parsed: {first_line(error)}") from error
            missing = f"{error} is missing" if isinstance(error, KeyError) else first_line(error)
            raise HTTPException(400, f"the request is invalid: {missing}") from error
        except HTTPException as error:
            raise HTTPException(400 if error.status_code == 422 else error.status_code, error.detail) from error
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = self._with_errors(answer.body_iterator, request)
        return answer

    async def _answer(self, body: dict[str, Any], request_id: str) -> Any:
        return await super().handle_request(body, request_id)

    async def _with_errors(self, parts: AsyncIterable[Any], request: Request) -> AsyncIterator[Any]:
        """Replace the error strings in transformers' streams by error objects, and note the status."""
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
        """Build transformers' config, with OpenAI's sampling, biases and stop sequences. Penalties are applied
        elsewhere.
        """
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
    """Enable sampling if the temperature is above 0, or if only `top_p` is set."""
    temperature = body.get("temperature")
    if temperature is None and "top_p" not in body:
        return
    config.do_sample = temperature is None or temperature >= GREEDY_BELOW
    config.temperature = None
    if config.do_sample:
        config.temperature = 1.0 if temperature is None else float(temperature)
        config.top_k = config.top_k or 0  # 0 disables top_k; transformers' default is 50


def _refuse_in_batches(config: GenerationConfig, body: dict[str, Any]) -> None:
    refused = [name for name in ("presence_penalty", "frequency_penalty") if body.get(name)]
    refused += ["stop"] if config.stop_strings else []
    if refused:
        raise HTTPException(
            400, f"continuous batching does not support {', '.join(refused)}: leave it out, or serve without "
            "--continuous-batching"
        )  # fmt: skip


class CheckedCompletions(CheckedHandler, CompletionHandler):  # type: ignore[misc]
    """/v1/completions. It accepts all of OpenAI's prompt forms and answers several prompts one after another."""

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
            raise HTTPException(400, f"{len(tokens)} prompts cannot be streamed: send one prompt, or leave stream out")
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


class CheckedChats(CheckedHandler, ChatCompletionHandler):  # type: ignore[misc]
    """/v1/chat/completions"""

    def _build_completion(self, request_id: str, content: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Cut the answer at the stop sequence: transformers' response templates parse all tokens again."""
        content = cut(content, self.requests.find(request_id).stops)
        made: dict[str, Any] = super()._build_completion(request_id, content, *args, **kwargs)
        return made


class CheckedResponses(CheckedHandler, ResponseHandler):  # type: ignore[misc]
    """/v1/responses"""

    _unsupported = frozenset({"prompt"})


# Middleware: request ids, log lines and disconnected clients

_ID = X_REQUEST_ID.encode()
_LEFT: Message = {"type": "http.disconnect"}


class RequestMiddleware:
    """ASGI middleware that opens and closes requests and watches for disconnects.

    Args:
        app: the application.
        requests: the requests in flight.
        routes: paths with their own label in the metrics; other paths are labelled `other`.
    """

    def __init__(self, app: ASGIApp, requests: Requests, routes: Collection[str]) -> None:
        self._app, self._requests, self._routes = app, requests, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request. Only POST requests below /v1/ are tracked."""
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
    """Messages of one HTTP request and its answer."""

    def __init__(self, request: Request, receive: Receive, send: Send) -> None:
        self.status = 500
        self._request, self._receive, self._send = request, receive, send
        self._listening: asyncio.Task[None] | None = None
        self._answered = False

    async def receive(self) -> Message:
        """Return the next message of the body, and after the body wait for the disconnect."""
        if self._listening is not None:
            await asyncio.shield(self._listening)
            return _LEFT
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._request.abandon(left=True)
        elif not message.get("more_body", False):
            self._listening = asyncio.ensure_future(self._listen())
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer and note its status and first token."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self._request.note_first_token()
            self._answered = self._answered or not message.get("more_body", False)
        await self._send(message)

    def end(self) -> None:
        if self._listening is not None:
            self._listening.cancel()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._answered:
            self._request.abandon(left=True)
