"""Handlers of the OpenAI routes: those of transformers' server, with validated requests and OpenAI's error format."""

from __future__ import annotations

import asyncio
import copy
import hmac
import inspect
import json
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from fastapi import FastAPI, HTTPException, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse
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
    StoppingCriteriaList,
)
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import (
    BaseHandler,
    CBGenerateManager,
    CBStreamer,
    CBWorkerDeadError,
    DirectStreamer,
    GenerateManager,
    Modality,
    _GenerationCancelled,
    _StreamError,
)

from expertcast.predictors.messages import Json, first_line
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.serving.parameters import (
    GREEDY_BELOW,
    MOST_BODY,
    MOST_SKIPPED,
    BatchSampling,
    CutStream,
    Penalties,
    Sampler,
    Stops,
    biases,
    checked,
    cut,
    refuse_unknown,
    shown,
)
from expertcast.runtime.serving.requests import Request, Requests

# Running and stopping generations. A generation stops before a layer's experts run.

log = logging.getLogger("expertcast.serving")
ABORT_AFTER_S = 1.0
"""At shutdown a batch's forward pass is aborted after this many seconds."""
SKIP_S = 10.0
"""Seconds to read the rest of a refused body."""
CLOSING, LEFT = "the server is shutting down", "the client has disconnected"
TOO_LONG = f"the body has more than {MOST_BODY:,} bytes: send less"
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
        self._positions = _positions(offloaded)
        self.context = offloaded.context
        """Tokens of the longest sequence for which memory is reserved."""

    def admit(self, key: str, tokens: int, config: GenerationConfig, room: int | None, option: str) -> Request:
        """Check a prompt's length, limit the new tokens to the remaining positions, and return the request.

        Args:
            key: id of the request.
            tokens: length of its prompt.
            config: its generation config; changed in place.
            room: capacity of the KV cache in tokens; None: unlimited.
            option: the server's option that sets it.

        Raises:
            HTTPException: the prompt is empty or leaves no position for a new token.
        """
        if not tokens:
            raise HTTPException(400, "the prompt has no tokens: send some text")
        for most, limit in ((self._positions, "the model"), (room, f"{option} of this server")):
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


class StoppableModel:
    """Replaces the model in transformers' server, so that `generate` can be stopped."""

    def __init__(self, generating: GenerationRunner, model: PreTrainedModel, request: Request) -> None:
        self._generating, self._model, self.request = generating, model, request

    def generate(self, **kwargs: Any) -> Tensor:
        """Run the model's own `generate` by :meth:`GenerationRunner.run`."""
        request, prompt_tokens = self.request, kwargs["input_ids"].shape[1]
        kwargs["stopping_criteria"] = StoppingCriteriaList([Stops(request, kwargs["tokenizer"], prompt_tokens)])
        if any(request.penalties):
            kwargs["logits_processor"] = LogitsProcessorList([Penalties(*request.penalties, prompt_tokens)])
        return self._generating.run(request, lambda: self._model.generate(**kwargs))


# Managers: one request after another, or continuous batching

MOST_AT_ONCE = 1024
"""Tokens per batch if the cache is limited, because activations take memory too."""
_UNBATCHED = ("repetition_penalty", "no_repeat_ngram_size", "min_length", "min_new_tokens", "bad_words_ids")
"""Options of a model's generation config that transformers' batches do not support."""


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

    def _stoppable(
        self, model: PreTrainedModel, inputs: Mapping[str, Any], config: GenerationConfig, key: str
    ) -> StoppableModel:
        room, tokens = self._generating.context, inputs["input_ids"].shape[-1]
        request = self._generating.admit(key, tokens, config, room, "--context")
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
        """Start batching, at the first request and again after an error. Every request has its own sampler: no other
        request's options reach the batch."""
        # a batch that fails says so before it tells its requests, and is dead only afterwards
        if self._cb is None or self._cb.background_thread_status.can_accept_new_requests() is not None:
            shared = GenerationConfig(do_sample=False, eos_token_id=gen_config.eos_token_id)
            batching = model.init_continuous_batching(
                generation_config=shared, continuous_batching_config=copy.copy(self._cb_config)
            )
            processors = batching.logit_processor
            processors.logits_processor = LogitsProcessorList([BatchSampling(self._generating.requests.sampler)])
            processors.tensors_required, processors.do_processing = 1, True
            batching.output_router.output_queue.put = lambda _output: None  # of requests that were cancelled
            left_out = [name for name in _UNBATCHED if getattr(model.generation_config, name) not in (None, 0, 1.0)]
            if left_out:
                log.warning("batches leave out %s of the model's generation config", ", ".join(left_out))
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
            self._cancel(request_id)

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
        answer = super().generate_non_streaming(model, processor, inputs, gen_config, request_id)
        request.on_abandoned(lambda: self._cancel(request_id))
        try:
            text, tokens, ids = await self._generating.await_answer(request, answer)
        except CBWorkerDeadError:
            raise
        except RuntimeError as error:
            raise FailedError(first_line(error)) from error
        request.add_token_counter(lambda: len(ids))
        return text, tokens, ids

    def _cancel(self, key: str) -> None:
        assert self._cb is not None
        self._cb.cancel_request(key)
        with self._cb.output_router._lock:
            self._cb.output_router.result_handlers.pop(key, None)

    def _admit(self, model: PreTrainedModel, inputs: Mapping[str, Any], config: GenerationConfig, key: str) -> Request:
        request = self._generating.admit(key, len(inputs["input_ids"]), config, self._room, "--kv-tokens")
        sampler = Sampler(model, config, request.seed)
        request.sampler = sampler if sampler.changes else None
        return request

    def stop(self) -> None:
        """Stop at once. Running requests are lost and their clients get an error."""
        if self._cb is not None:
            self._cb.stop(block=True, timeout=2, hard_stop=True)


@dataclass(frozen=True, kw_only=True)
class Served:
    """The model behind all routes."""

    model: OffloadedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    """Its name for clients."""
    requests: Requests
    manager: SequentialManager | BatchedManager
    since: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def most_characters(self) -> int:
        """Characters of a prompt; a longer one cannot fit the model's positions."""
        positions = _positions(self.model)
        return MOST_BODY if positions is None else positions * max(map(len, self.tokenizer.get_vocab()))

    def entry(self) -> Json:
        """Return the model's entry in the list of models."""
        return {"id": self.name, "object": "model", "created": self.since, "owned_by": "expertcast"}


def _positions(offloaded: OffloadedModel) -> int | None:
    return getattr(offloaded.model.config.get_text_config(), "max_position_embeddings", None)


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
    install(StoppedError, lambda error: (503, str(error)))
    install(CBWorkerDeadError, lambda error: (503, first_line(error)))
    install(FailedError, lambda error: (500, f"the generation failed: {error}"))


NEW_TOKENS = 1024
"""Default limit of new tokens, the same as transformers'."""
_PREPARING = ThreadPoolExecutor(2, thread_name_prefix="requests")
"""Threads that parse, validate, template and tokenise requests: the event loop goes on meanwhile."""


class CheckedHandler(BaseHandler):  # type: ignore[misc]
    """Base of all handlers: validates requests and answers errors in OpenAI's format."""

    _unsupported: frozenset[str] = frozenset(
        {"generation_config", "audio", "context_management", "conversation", "functions", "function_call", "moderation",
         "previous_response_id", "web_search_options"}
    )  # fmt: skip
    """Parameters that transformers accepts and that are refused here."""
    _templated = True
    """Whether prompts are chats."""

    def __init__(self, served: Served) -> None:
        super().__init__(served, None)
        self._served = served
        self._batched = isinstance(served.manager, BatchedManager)

    async def answer(self, http: HttpRequest) -> Response:
        """Validate and answer a request.

        Raises:
            HTTPException: the model has no chat template, or the request is invalid.
            FailedError: the generated tool calls cannot be parsed.
        """
        request, served, loop = http.scope[REQUEST], self._served, asyncio.get_running_loop()
        if "json" not in http.headers.get("content-type", ""):  # a page in a browser may send other types anywhere
            raise HTTPException(400, "send the body with Content-Type: application/json")
        text = await http.body()
        body, prompts, config = await loop.run_in_executor(_PREPARING, self._prepare, text, request)
        served.manager.init_cb(served.model, config)
        answers = list[Response]()
        for ids in prompts:
            inputs = {"input_ids": ids}
            if not self._batched:
                rows = {"input_ids": [ids], "attention_mask": [[1] * len(ids)]}
                inputs = BatchEncoding(rows, tensor_type="pt").to(served.model.device)
            own = {
                "request_id": request.key, "model": served.model, "processor": served.tokenizer, "inputs": inputs,
                "model_id": served.name, "gen_config": copy.copy(config), "gen_manager": served.manager,
                **self._rest(body),
            }  # fmt: skip
            if body.get("stream"):
                answer: StreamingResponse = self._streaming(**own)
                answer.body_iterator = self._with_errors(answer.body_iterator, request)
                return answer
            try:
                answers.append(await self._non_streaming(**own))
            except (LookupError, TypeError, ValueError) as error:
                raise FailedError(f"the generated text cannot be parsed: {first_line(error)}") from error
        return answers[0] if len(answers) == 1 else _together([json.loads(bytes(answer.body)) for answer in answers])

    def _prepare(self, text: bytes, request: Request) -> tuple[dict[str, Any], list[list[int]], GenerationConfig]:
        """Return the validated parameters of a request, its prompts and its generation config.

        Raises:
            HTTPException: the request is invalid.
        """
        name, model = self._served.name, self._served.model.model
        vocabulary = int(model.get_input_embeddings().num_embeddings)
        if self._templated and self._served.tokenizer.chat_template is None:
            raise HTTPException(400, f"{name!r} has no chat template: send a prompt to /v1/completions")
        try:
            body = checked(text, self._valid_params_class.__mutable_keys__ - self._unsupported)
            if body.get("model", name) != name:
                raise HTTPException(400, f"model={shown(body['model'])} is not served here: use {name!r}")
            request.seed = body.get("seed")  # set when the generation begins
            request.penalties = (body.get("presence_penalty", 0), body.get("frequency_penalty", 0))
            request.stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop", [])
            if self._batched and (any(request.penalties) or request.stops):
                raise HTTPException(
                    400, "continuous batching does not support stop, presence_penalty and frequency_penalty: leave "
                    "them out, or serve without --continuous-batching"
                )  # fmt: skip
            prompts = [each if isinstance(each, list) else self._tokens(each) for each in self._texts(body)]
            for ids in prompts:
                refuse_unknown(ids, vocabulary)
            return body, prompts, _generation_config(body, self._served.model.generation_config, vocabulary)
        except HTTPException:
            raise
        except Exception as error:  # a template, or a tokenizer, that this text does not suit
            missing = f"{error} is missing" if isinstance(error, KeyError) else first_line(error)
            raise HTTPException(400, f"the request is invalid: {missing[:150]}") from error

    async def _with_errors(self, parts: AsyncIterable[Any], request: Request) -> AsyncIterator[Any]:
        """Replace the error strings in transformers' streams by error objects, and note the status."""
        async for part in parts:
            begun, failed, message = part.partition('data: {"error": "')
            status = 503 if self._served.requests.closing else 500
            if failed or '"type":"response.failed"' in part:
                request.failed = status
            if failed:
                error = error_body(status, message.removesuffix('"}\n\n'))
                part = f"{begun}data: {json.dumps(error)}\n\n"
            yield part

    def _texts(self, body: dict[str, Any]) -> list[str | list[int]]:
        """Return the prompts of a request as texts, or as tokens if it has these."""
        raise NotImplementedError

    def _rest(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return further arguments of transformers' handler."""
        return {"tools": body.get("tools")}

    def _rendered(self, body: dict[str, Any], messages: list[Any], tools: list[Any] | None) -> str:
        """Return a chat as text, by the model's own template: one of a request would run on this machine."""
        tokenizer = self._served.tokenizer
        given = {"reasoning_effort": body.get("reasoning_effort", body.get("reasoning", {}).get("effort"))}
        options = {name: value for name, value in given.items() if value is not None}
        options |= body.get("chat_template_kwargs", {})
        reserved = sorted(options.keys() & inspect.signature(tokenizer.apply_chat_template).parameters)
        if reserved:
            raise HTTPException(400, f"chat_template_kwargs has {reserved[0]}, which only the server sets: remove it")
        return str(
            tokenizer.apply_chat_template(
                self.get_processor_inputs_from_messages(messages, Modality.LLM), tools=tools,
                add_generation_prompt=True, tokenize=False, **options,
            )
        )  # fmt: skip

    def _tokens(self, text: str) -> list[int]:
        if len(text) > self._served.most_characters:
            raise HTTPException(
                400, f"the prompt has {len(text)} characters, but the model's longest prompts at most "
                f"{self._served.most_characters}"
            )  # fmt: skip
        return list(self._served.tokenizer(text, add_special_tokens=not self._templated)["input_ids"])


def _generation_config(body: dict[str, Any], own: GenerationConfig, vocabulary: int) -> GenerationConfig:
    """Return the model's generation config with a request's sampling, biases and limit of tokens."""
    config: GenerationConfig = copy.deepcopy(own)
    config.num_beams = config.num_return_sequences = 1
    limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
    config.max_new_tokens = next(filter(None, limits), max(own.max_new_tokens or 0, NEW_TOKENS))
    if "logit_bias" in body:
        config.sequence_bias = biases(body["logit_bias"], vocabulary)
    if "top_p" in body:
        config.top_p = float(body["top_p"])
    temperature = body.get("temperature")
    if temperature is not None or "top_p" in body:  # top_p alone samples as well
        config.do_sample = temperature is None or temperature >= GREEDY_BELOW
        config.temperature = None
        if config.do_sample:
            config.temperature = 1.0 if temperature is None else float(temperature)
            config.top_k = config.top_k or 0  # 0 disables top_k; transformers' default is 50
    return config


class CheckedCompletions(CheckedHandler, CompletionHandler):  # type: ignore[misc]
    """/v1/completions. It accepts all of OpenAI's prompt forms and answers several prompts one after another."""

    _templated = False

    def _texts(self, body: dict[str, Any]) -> list[str | list[int]]:
        prompt = body["prompt"]
        texts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
        if body.get("stream") and len(texts) > 1:
            raise HTTPException(400, f"{len(texts)} prompts cannot be streamed: send one prompt, or leave stream out")
        return texts

    def _rest(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"suffix": body.get("suffix")}


def _together(answers: list[Json]) -> JSONResponse:
    """Return the answers to several prompts as one answer with several choices."""
    choices = [{**answer["choices"][0], "index": place} for place, answer in enumerate(answers)]
    usage = {kind: sum(answer["usage"][kind] for answer in answers) for kind in answers[0]["usage"]}
    return JSONResponse({**answers[0], "choices": choices, "usage": usage})


class CheckedChats(CheckedHandler, ChatCompletionHandler):  # type: ignore[misc]
    """/v1/chat/completions"""

    def _texts(self, body: dict[str, Any]) -> list[str | list[int]]:
        return [self._rendered(body, body["messages"], body.get("tools"))]

    def _build_completion(self, request_id: str, content: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Cut the answer at the stop sequence: transformers' response templates parse all tokens again."""
        content = cut(content, self._served.requests.find(request_id).stops)
        made: dict[str, Any] = super()._build_completion(request_id, content, *args, **kwargs)
        return made


class CheckedResponses(CheckedHandler, ResponseHandler):  # type: ignore[misc]
    """/v1/responses"""

    _unsupported = CheckedHandler._unsupported | {"prompt"}

    def _texts(self, body: dict[str, Any]) -> list[str | list[int]]:
        return [self._rendered(body, self._normalize_input(body), self._normalize_tools(body.get("tools")))]

    def _rest(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"body": body, "tools": self._normalize_tools(body.get("tools"))}


# Middleware: request ids, log lines and disconnected clients

_ID, REQUEST = b"x-request-id", "expertcast.request"
_LEFT: Message = {"type": "http.disconnect"}


class RequestMiddleware:
    """ASGI middleware that opens and closes requests and watches for disconnects.

    Args:
        app: the application.
        requests: the requests in flight.
        routes: paths with their own label in the metrics; other paths are labelled `other`.
        api_key: key that every request needs, apart from /health; None: none.
    """

    def __init__(self, app: ASGIApp, requests: Requests, routes: Collection[str], api_key: str | None = None) -> None:
        self._app, self._requests, self._routes = app, requests, routes
        self._wanted = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request. Only POST requests below /v1/ are tracked."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        values, refused = dict(scope["headers"]), None
        posted = scope["method"] == "POST" and scope["path"].startswith("/v1/")
        given = values.get(b"authorization", b"")
        if self._wanted is not None and scope["path"] != "/health" and not hmac.compare_digest(given, self._wanted):
            refused = 401, "the API key is missing or wrong: send the one that --api-key was started with"
        elif posted and self._requests.closing:
            refused = 503, CLOSING
        elif int(values.get(b"content-length", 0)) > MOST_BODY:
            refused = 413, TOO_LONG
        elif posted and self._requests.full:
            refused = 429, "too many requests are waiting: send this one later"
        if refused is not None:
            if b"expect" not in values:  # else the client waits for the answer before it sends
                await _skip(receive)
            await JSONResponse(error_body(*refused), status_code=refused[0])(scope, receive, send)
        elif not posted:
            await self._app(scope, receive, send)
        else:
            await self._track(scope, values.get(_ID), receive, send)

    async def _track(self, scope: Scope, wanted: bytes | None, receive: Receive, send: Send) -> None:
        request = self._requests.open(scope["path"] if scope["path"] in self._routes else "other", wanted)
        exchange = _Exchange(request, receive, send)
        try:
            await self._app({**scope, REQUEST: request}, exchange.receive, exchange.send)
        finally:
            exchange.end()
            self._requests.close(request, exchange.status)


async def _skip(receive: Receive) -> None:
    """Drop the rest of a body, within limits: a client that is still sending sees a closed connection, no answer."""
    left = MOST_SKIPPED
    with suppress(TimeoutError):
        async with asyncio.timeout(SKIP_S):
            while left > 0 and (message := await receive()).get("more_body", False):
                left -= len(message["body"])


class _Exchange:
    """Messages of one HTTP request and its answer."""

    def __init__(self, request: Request, receive: Receive, send: Send) -> None:
        self.status, self._bytes = 500, 0
        self._request, self._receive, self._send = request, receive, send
        self._listening: asyncio.Task[None] | None = None
        self._answered = False

    async def receive(self) -> Message:
        """Return the next message of the body, and after the body wait for the disconnect.

        Raises:
            HTTPException: the body is too long.
        """
        if self._listening is not None:
            await asyncio.shield(self._listening)
            return _LEFT
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > MOST_BODY:  # sent in chunks, without a length
            await _skip(self._receive)
            raise HTTPException(413, TOO_LONG)
        if message["type"] == "http.disconnect":
            self._request.abandon(left=True)
        elif not message.get("more_body", False):
            self._listening = asyncio.ensure_future(self._listen())
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer and note its status and first token."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message["headers"], (_ID, self._request.name.encode())]}
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
