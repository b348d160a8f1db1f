"""An HTTP server with transformers' OpenAI routes over one offloaded model."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from expertcast.compat import ModelManager, SystemOneHandler, TranscriptionHandler, build_server
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.serving.handlers import (
    CheckedChats,
    CheckedCompletions,
    CheckedHandler,
    CheckedResponses,
    GenerationRunner,
    OffloadedGeneration,
    RequestMiddleware,
    error_body,
    install_error_handlers,
)
from expertcast.runtime.serving.metrics import metrics_app
from expertcast.runtime.serving.parameters import MOST_BODY, shown
from expertcast.runtime.serving.requests import Requests


class OffloadedModelManager(ModelManager):  # type: ignore[misc]
    """Model manager of one loaded model; it never loads or drops another.

    Args:
        offloaded: the model.
        tokenizer: its tokenizer.
        name: its name for clients.
    """

    def __init__(self, offloaded: OffloadedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        super().__init__(device="cpu", model_timeout=-1)
        self.force_model = name
        self.model, self.tokenizer = offloaded, tokenizer
        self._since = int(time.time())

    @property
    def vocabulary(self) -> int:
        """Number of tokens of the model's embedding."""
        return len(self.model.model.get_input_embeddings().weight)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """Return the client's model name unchanged."""
        return model_id

    def load_model_and_processor(
        self, model_id_and_revision: str, progress_callback: Callable[..., None] | None = None,
        tqdm_class: type | None = None, gguf_file: str | None = None,
    ) -> tuple[OffloadedModel, PreTrainedTokenizerBase]:  # fmt: skip
        """Return the model and its tokenizer, whatever name the client sends."""
        return self.model, self.tokenizer

    def load_model_streaming(self, model_id_and_revision: str, gguf_file: str | None = None) -> AsyncIterator[str]:
        """Refuse: the model is loaded already.

        Raises:
            NotImplementedError: always; the route is not served.
        """
        raise NotImplementedError

    def get_gen_models(self, cache_dir: str | None = None) -> list[Json]:
        """List the model."""
        return [{"id": self.force_model, "object": "model", "created": self._since, "owned_by": "expertcast"}]

    async def described(self, name: str) -> Json:
        """Return the model's entry.

        Raises:
            HTTPException: status 404: it has another name.
        """
        if name != self.force_model:
            raise HTTPException(404, f"model {shown(name)} is not served here: use {self.force_model!r}")
        return self.get_gen_models()[0]

    def shutdown(self) -> None:
        """Do nothing: the caller that opened the model closes it."""


ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models")
"""Served routes of transformers' server."""
ENDS_S = 2.0
"""Seconds that requests and generations have to end at shutdown."""


class ModelServer:
    """An OpenAI-compatible server over one offloaded model.

    Args:
        offloaded: the model.
        tokenizer: its tokenizer.
        name: its name for clients, who may leave it out.
        continuous_batching: run many requests at once, so that their tokens share a layer's experts; otherwise one
            by one.
        kv_tokens: with continuous batching, capacity of the shared KV cache in tokens; None: as many as fit the device.
        api_key: key that clients must send; None: none is needed.
    """

    def __init__(
        self, offloaded: OffloadedModel, tokenizer: PreTrainedTokenizerBase, name: str, *,
        continuous_batching: bool = False, kv_tokens: int | None = None, api_key: str | None = None,
    ) -> None:  # fmt: skip
        self.requests = Requests()
        self._generating = GenerationRunner(offloaded, self.requests)
        self._generation = OffloadedGeneration(
            self._generating, continuous_batching=continuous_batching, kv_tokens=kv_tokens
        )
        manager = OffloadedModelManager(offloaded, tokenizer, name)
        checked = [
            handler(manager, self._generation) for handler in (CheckedCompletions, CheckedChats, CheckedResponses)
        ]
        positions = self._generating.positions
        longest = max(map(len, tokenizer.get_vocab()))
        for handler in checked:
            handler.requests = self.requests
            handler.most_characters = MOST_BODY if positions is None else positions * longest
        self.app = self._application(manager, api_key, *checked)
        self.app.router.routes.append(
            Route("/metrics", _ExactRoute(metrics_app(offloaded, self.requests.counts, name)))
        )
        self._uvicorn: _Uvicorn | None = None

    def run(self, listening: socket.socket, ready: Callable[[str], None] = print) -> None:
        """Serve until SIGINT, SIGTERM or :meth:`stop`, which also stop running generations.

        Args:
            listening: a socket made by :func:`listen`.
            ready: called with the server's address once requests are accepted.
        """
        config = uvicorn.Config(
            self.app, log_level="warning", access_log=False, timeout_graceful_shutdown=int(ENDS_S), lifespan="off"
        )
        host, port = listening.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._uvicorn = _Uvicorn(config, self.requests, self._generating, lambda: ready(address))
        self._uvicorn.run(sockets=[listening])
        self._generation.shutdown()

    def stop(self) -> None:
        """End :meth:`run`. Call it from another thread."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    def close(self) -> None:
        """Wait for the current generation and detach from the model, which may be closed afterwards."""
        self._generating.idle(ENDS_S)
        self._generating.close()

    def _application(
        self, manager: OffloadedModelManager, api_key: str | None, *checked: CheckedHandler
    ) -> FastAPI:  # fmt: skip
        completions, chats, responses = checked
        app: FastAPI = build_server(
            manager, chats, completion_handler=completions, response_handler=responses,
            transcription_handler=TranscriptionHandler(manager, self._generation),
            systemone_handler=SystemOneHandler(manager, self._generation), generation_state=self._generation,
        )  # fmt: skip
        app.router.routes[:] = [each for each in app.router.routes if isinstance(each, Route) and each.path in ROUTES]
        app.add_api_route("/health", self._health)
        app.add_api_route("/v1/models/{name:path}", manager.described)
        app.add_middleware(RequestMiddleware, requests=self.requests, routes=ROUTES, api_key=api_key)
        install_error_handlers(app)
        return app

    async def _health(self) -> JSONResponse:
        if self.requests.closing:
            return JSONResponse(error_body(503, "the server is shutting down"), status_code=503)
        if not self._generation.alive:
            return JSONResponse(error_body(503, "the generating thread has died: restart the server"), status_code=503)
        return JSONResponse({"status": "ok"})


class _ExactRoute:
    """Serves an ASGI application at exactly one path; a mounted one would redirect to `/metrics/`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _Uvicorn(uvicorn.Server):
    """Reports when it is ready, and ends requests at a signal."""

    def __init__(
        self, config: uvicorn.Config, requests: Requests, generating: GenerationRunner, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._requests, self._generating, self._ready = requests, generating, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._requests.stop()
        await super().shutdown(sockets)
        await self._generating.wait_abandoned(ENDS_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            os._exit(130)  # second Ctrl-C
        self._requests.stop()
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 chooses a free port.

    Raises:
        ExpertcastError: the address is in use or does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ExpertcastError(f"cannot listen on {host}:{port}: {error}; use another --host or --port") from error
