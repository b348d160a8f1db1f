"""Requests in flight, their metrics, and one log line for each when it ends."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from expertcast.runtime.serving.metrics import RequestMetrics

if TYPE_CHECKING:
    from expertcast.runtime.serving.parameters import Sampler


log = logging.getLogger("expertcast.serving")


class Request:
    """A request in flight.

    Args:
        key: its id, which no other request in flight has.
        route: its path, or `other`.
    """

    def __init__(self, key: str, route: str) -> None:
        self.key, self.route = key, route
        self.prompt_tokens = 0
        self.seed: int | None = None
        self.penalties = (0.0, 0.0)
        """For tokens that were generated before: once, and each time."""
        self.stops: Sequence[str] = ()
        """Texts that end its own, and are no part of it."""
        self.sampler: Sampler | None = None
        """Of its tokens in batches; None: the likeliest are taken, or it is generated alone."""
        self.first_s: float | None = None
        """Seconds to its first token; None: there is none yet, or nobody saw it."""
        self.left = False
        """Whether its client has left before it was answered."""
        self.failed: int | None = None
        """Status of the error that ended its stream, whose headers had 200; None: there was none."""
        self._started = time.perf_counter()
        self._gone = threading.Event()
        self._then: list[Callable[[], None]] = []
        self._generated: list[Callable[[], int]] = []

    @property
    def generated_tokens(self) -> int:
        return sum(generated() for generated in self._generated)

    @property
    def seconds(self) -> float:
        """Since it came."""
        return time.perf_counter() - self._started

    @property
    def gone(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._gone.is_set()

    def counted_by(self, generated: Callable[[], int]) -> None:
        """Add a counter of generated tokens: one for each of its prompts."""
        self._generated.append(generated)

    def look(self) -> None:
        """Note the first token, if there is one now."""
        if self.first_s is None and self.generated_tokens:
            self.first_s = self.seconds

    def on_gone(self, then: Callable[[], None]) -> None:
        """What to do when nobody waits for it any more; at once, if that is so already."""
        self._then.append(then)
        if self.gone:
            then()

    def leave(self, *, left: bool) -> None:
        """Nobody waits for it any more.

        Args:
            left: whether that is because its client has left.
        """
        if not self.gone:
            self.left = left
            self._gone.set()
            for then in self._then:
                then()


class Requests:
    """All requests in flight, and counts of those that were."""

    def __init__(self) -> None:
        self.counts = RequestMetrics()
        self._closed_at: float | None = None
        self._open: dict[str, Request] = {}
        self._lock = threading.Lock()

    @property
    def closing(self) -> bool:
        """Whether the server is going down: what runs stops, what comes is refused."""
        return self._closed_at is not None

    @property
    def closing_for(self) -> float:
        """Seconds since then; negative where it is not."""
        return -1.0 if self._closed_at is None else time.monotonic() - self._closed_at

    def open(self, route: str, wanted: str | None) -> Request:
        """A request has come.

        Args:
            route: its path, or `other`.
            wanted: the id that the client gave it; used where no other request has it.
        """
        with self._lock:
            taken = wanted is None or wanted in self._open
            request = Request(str(uuid.uuid4()) if taken or wanted is None else wanted, route)
            self._open[request.key] = request
        self.counts.in_flight.inc()
        return request

    def find(self, key: str) -> Request:
        """The request in flight of that id."""
        return self._open[key]

    def sampler(self, key: str) -> Sampler | None:
        """That of a request, if it has one and is in flight."""
        request = self._open.get(key)
        return None if request is None else request.sampler

    def close(self, request: Request, status: int) -> None:
        """A request has ended: one line in the log."""
        request.look()
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
        """The server is going down."""
        self._closed_at = self._closed_at or time.monotonic()
        for request in list(self._open.values()):
            request.leave(left=False)
