"""The server: transformers' routes over one offloaded model, run until it is told to end."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from expertcast.compat import ModelManager, SystemOneHandler, TranscriptionHandler, build_server
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.serving.handlers import (
    Chats,
    Checked,
    Completions,
    Generating,
    OffloadedGeneration,
    Responses,
    Watching,
    error_body,
    tell_errors,
)
from expertcast.runtime.serving.metrics import metrics_app
from expertcast.runtime.serving.requests import Requests


class OffloadedModelManager(ModelManager):  # type: ignore[misc]
    """Holds a model that is loaded already, and neither loads nor drops another.

    Args:
        offloaded: the model.
        tokenizer: its own.
        name: by which clients ask for it.
    """

    def __init__(self, offloaded: OffloadedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        super().__init__(device="cpu", model_timeout=-1)
        self.force_model = name
        self._offloaded, self._tokenizer = offloaded, tokenizer
        self._since = int(time.time())

    @property
    def vocabulary(self) -> int:
        """Tokens that the model has logits of."""
        return int(self._offloaded.model.config.get_text_config().vocab_size)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """Clients get the name back that they gave."""
        return model_id

    def load_model_and_processor(
        self, model_id_and_revision: str, progress_callback: Callable[..., None] | None = None,
        tqdm_class: type | None = None, gguf_file: str | None = None,
    ) -> tuple[OffloadedModel, PreTrainedTokenizerBase]:  # fmt: skip
        """The model and its tokenizer."""
        return self._offloaded, self._tokenizer

    def load_model_streaming(self, model_id_and_revision: str, gguf_file: str | None = None) -> AsyncIterator[str]:
        """There is nothing to load.

        Raises:
            NotImplementedError: always; the route is not served.
        """
        raise NotImplementedError

    def get_gen_models(self, cache_dir: str | None = None) -> list[Json]:
        """The model."""
        return [{"id": self.force_model, "object": "model", "created": self._since, "owned_by": "expertcast"}]

    def shutdown(self) -> None:
        """Who opened the model closes it."""


ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models")
"""Of transformers' server, those that are served."""
ENDS_S = 2.0
"""Seconds that requests and generations get to end in, once they have been told to."""


class ModelServer:
    """An OpenAI server over one offloaded model.

    Args:
        offloaded: the model.
        tokenizer: its own.
        name: by which clients ask for it; they may leave it out.
        continuous_batching: many requests at once, whose tokens share the layers' experts; else one by one.
        kv_tokens: with it, tokens that the requests' caches have room for together; None: as many as fit the device.
    """

    def __init__(
        self, offloaded: OffloadedModel, tokenizer: PreTrainedTokenizerBase, name: str, *,
        continuous_batching: bool = False, kv_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self.requests = Requests()
        self._generating = Generating(offloaded, self.requests)
        self._generation = OffloadedGeneration(
            self._generating, continuous_batching=continuous_batching, kv_tokens=kv_tokens
        )
        manager = OffloadedModelManager(offloaded, tokenizer, name)
        checked = [handler(manager, self._generation) for handler in (Completions, Chats, Responses)]
        for handler in checked:
            handler.requests = self.requests
            handler.chats = None if isinstance(handler, Completions) else tokenizer
        self.app = self._application(manager, *checked)
        self.app.router.routes.append(Route("/metrics", _Page(metrics_app(offloaded, self.requests.counts, name))))
        self._uvicorn: _Uvicorn | None = None

    def run(self, listening: socket.socket, ready: Callable[[str], None] = print) -> None:
        """Serve until SIGINT, SIGTERM or :meth:`stop`; generations that run then are stopped.

        Args:
            listening: as :func:`listen` makes it.
            ready: told the address once requests are taken.
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
        """End :meth:`run`, from another thread."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    def close(self) -> None:
        """Let go of the model, which can be closed then unless a generation would not end."""
        self._generating.idle(ENDS_S)
        self._generating.close()

    def _application(self, manager: OffloadedModelManager, *checked: Checked) -> FastAPI:
        completions, chats, responses = checked
        app: FastAPI = build_server(
            manager, chats, completion_handler=completions, response_handler=responses,
            transcription_handler=TranscriptionHandler(manager, self._generation),
            systemone_handler=SystemOneHandler(manager, self._generation), generation_state=self._generation,
        )  # fmt: skip
        app.router.routes[:] = [each for each in app.router.routes if isinstance(each, Route) and each.path in ROUTES]
        app.add_api_route("/health", self._health)
        app.add_middleware(Watching, requests=self.requests, routes=ROUTES)
        tell_errors(app)
        return app

    async def _health(self) -> JSONResponse:
        if self.requests.closing:
            return JSONResponse(error_body(503, "the server is shutting down"), status_code=503)
        if not self._generation.alive:
            return JSONResponse(error_body(503, "what generates has died: start the server again"), status_code=503)
        return JSONResponse({"status": "ok"})


class _Page:
    """An ASGI application as one page: a mounted one would send its readers on to `/metrics/`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _Uvicorn(uvicorn.Server):
    """Tells when it is ready, and that it ends; signals end it and nothing else."""

    def __init__(
        self, config: uvicorn.Config, requests: Requests, generating: Generating, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._requests, self._generating, self._ready = requests, generating, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._requests.stop()
        await super().shutdown(sockets)
        await self._generating.all_ended(ENDS_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            os._exit(130)  # asked twice
        self._requests.stop()
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients connect to; port 0 finds a free one.

    Raises:
        ExpertcastError: the address is taken, or is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ExpertcastError(f"cannot listen on {host}:{port}: {error}; give another --host or --port") from error
