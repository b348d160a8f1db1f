"""Around every request: an id of its own, one log line when it ends, and an ear for clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers.cli.serving.utils import X_REQUEST_ID

from expertcast.runtime.serving.errors import error_body
from expertcast.runtime.serving.requests import Request, Requests

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
        """Nobody listens any more."""
        if self._listening is not None:
            self._listening.cancel()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._answered:
            self._request.leave(left=True)
