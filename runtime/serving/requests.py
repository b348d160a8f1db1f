"""Requests in flight: their state, their metrics and one log line per finished request."""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from expertcast.runtime.serving.metrics import RequestMetrics

if TYPE_CHECKING:
    from expertcast.runtime.serving.parameters import Sampler


log = logging.getLogger("expertcast.serving")
MOST_OPEN = 512
"""Requests in flight."""


class Request:
    """A request in flight.

    Args:
        name: its id for the client.
        route: its path, or `other`.
    """

    def __init__(self, name: str, route: str) -> None:
        self.name, self.route = name, route
        self.key = f"{name}-{uuid.uuid4().hex[:12]}"
        """Unique id: that of a client may come again while a batch still has the first."""
        self.prompt_tokens = 0
        self.seed: int | None = None
        self.penalties = (0.0, 0.0)
        """Presence and frequency penalty."""
        self.stops: Sequence[str] = ()
        """Stop sequences; the output ends before the first of them."""
        self.sampler: Sampler | None = None
        """Its sampler in a batch; None for greedy decoding, or without batching."""
        self.first_s: float | None = None
        """Seconds to its first token; None before it."""
        self.left = False
        """Whether its client disconnected before the answer was complete."""
        self.failed: int | None = None
        """Status of the error that ended its stream after headers with status 200; None without an error."""
        self._started = time.perf_counter()
        self._abandoned_event = threading.Event()
        self._then: list[Callable[[], None]] = []
        self._generated: list[Callable[[], int]] = []

    @property
    def generated_tokens(self) -> int:
        return sum(generated() for generated in self._generated)

    @property
    def seconds(self) -> float:
        """Seconds since its arrival."""
        return time.perf_counter() - self._started

    @property
    def abandoned(self) -> bool:
        """Whether its answer is no longer needed: the client has left or the server shuts down."""
        return self._abandoned_event.is_set()

    def add_token_counter(self, generated: Callable[[], int]) -> None:
        """Add a counter of generated tokens; a request has one per prompt."""
        self._generated.append(generated)

    def note_first_token(self) -> None:
        """Note the time of the first token once there is one."""
        if self.first_s is None and self.generated_tokens:
            self.first_s = self.seconds

    def on_abandoned(self, then: Callable[[], None]) -> None:
        """Call `then` when the request is abandoned, or at once if it already is."""
        self._then.append(then)
        if self.abandoned:
            then()

    def abandon(self, *, left: bool) -> None:
        """Mark the request as abandoned.

        Args:
            left: True if its client has left, False if the server shuts down.
        """
        if not self.abandoned:
            self.left = left
            self._abandoned_event.set()
            for then in self._then:
                then()


class Requests:
    """All requests in flight, and counters of finished ones."""

    def __init__(self) -> None:
        self.counts = RequestMetrics()
        self._closed_at: float | None = None
        self._open: dict[str, Request] = {}
        self._lock = threading.Lock()

    @property
    def closing(self) -> bool:
        """Whether the server shuts down: running requests are stopped and new ones refused."""
        return self._closed_at is not None

    @property
    def closing_for(self) -> float:
        """Seconds since the shutdown began; -1 before it."""
        return -1.0 if self._closed_at is None else time.monotonic() - self._closed_at

    @property
    def full(self) -> bool:
        """Whether no further request is taken."""
        return len(self._open) >= MOST_OPEN

    def open(self, route: str, wanted: bytes | None) -> Request:
        """Register a new request.

        Args:
            route: its path, or `other`.
            wanted: the id in the client's header; used if it is short and plain, since it is logged and repeated.
        """
        plain = wanted is not None and re.fullmatch(rb"[\w.:=/+-]{1,64}", wanted) is not None
        request = Request(wanted.decode() if wanted is not None and plain else uuid.uuid4().hex, route)
        with self._lock:
            self._open[request.key] = request
        self.counts.in_flight.inc()
        return request

    def find(self, key: str) -> Request:
        """Return the request in flight with this id."""
        return self._open[key]

    def sampler(self, key: str) -> Sampler | None:
        """Return the sampler of a request, or None if it has none or is not in flight."""
        request = self._open.get(key)
        return None if request is None else request.sampler

    def close(self, request: Request, status: int) -> None:
        """Remove a finished request, update the metrics and log one line."""
        request.note_first_token()
        counts, left = self.counts, request.left
        status = 499 if left else request.failed or status
        with self._lock:
            del self._open[request.key]
        counts.ended.labels(request.route, status).inc()
        counts.disconnected.inc(left)
        counts.prompt_tokens.inc(request.prompt_tokens)
        counts.generated_tokens.inc(request.generated_tokens)
        counts.seconds.observe(request.seconds)
        if request.first_s is not None:
            counts.first_token.observe(request.first_s)
        counts.in_flight.dec()
        first = "" if request.first_s is None else f", first token after {request.first_s:.3f} s"
        log.info(
            "%s %s %d: %d prompt tokens, %d generated, %.3f s%s%s", request.key, request.route, status,
            request.prompt_tokens, request.generated_tokens, request.seconds, first, ", client left" if left else "",
        )  # fmt: skip

    def stop(self) -> None:
        """Begin the shutdown: refuse new requests and abandon the running ones."""
        self._closed_at = self._closed_at or time.monotonic()
        for request in list(self._open.values()):
            request.abandon(left=False)
