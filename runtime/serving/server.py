"""An HTTP server with transformers' OpenAI routes over one offloaded model."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI, HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.serving.handlers import (
    CLOSING,
    BatchedManager,
    CheckedChats,
    CheckedCompletions,
    CheckedResponses,
    GenerationRunner,
    RequestMiddleware,
    SequentialManager,
    Served,
    install_error_handlers,
)
from expertcast.runtime.serving.metrics import metrics_app
from expertcast.runtime.serving.parameters import shown
from expertcast.runtime.serving.requests import Requests

HANDLERS = {
    "/v1/completions": CheckedCompletions, "/v1/chat/completions": CheckedChats, "/v1/responses": CheckedResponses,
}  # fmt: skip
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
        manager = (
            BatchedManager(self._generating, kv_tokens) if continuous_batching else SequentialManager(self._generating)
        )
        self.served = Served(
            model=offloaded, tokenizer=tokenizer, name=name, requests=self.requests, manager=manager
        )  # fmt: skip
        self.app = self._application(api_key)
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
        self.served.manager.stop()

    def stop(self) -> None:
        """End :meth:`run`. Call it from another thread."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    def close(self) -> None:
        """Wait for the current generation and detach from the model, which may be closed afterwards."""
        self._generating.idle(ENDS_S)
        self._generating.close()

    def _application(self, api_key: str | None) -> FastAPI:
        app = FastAPI(openapi_url=None)
        for route, handler in HANDLERS.items():
            app.add_api_route(route, handler(self.served).answer, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", self._models)
        app.add_api_route("/v1/models/{name:path}", self._model)
        app.add_api_route("/health", self._health)
        metrics = metrics_app(self.served.model, self.requests.counts, self.served.name)
        app.router.routes.append(Route("/metrics", _ExactRoute(metrics)))
        app.add_middleware(RequestMiddleware, requests=self.requests, routes=HANDLERS, api_key=api_key)
        install_error_handlers(app)
        return app

    async def _models(self) -> Json:
        return {"object": "list", "data": [self.served.entry()]}

    async def _model(self, name: str) -> Json:
        if name != self.served.name:
            raise HTTPException(404, f"model {shown(name)} is not served here: use {self.served.name!r}")
        return self.served.entry()

    async def _health(self) -> Json:
        if self.requests.closing:
            raise HTTPException(503, CLOSING)
        return {"status": "ok"}


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
