"""Collecting: the router inputs and routing of live traffic as traces, in bounded memory, written beside the forwards.

T tokens, D hidden size, L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger

from expertcast.data.batch import RouterCall
from expertcast.data.live import LiveDocument, LiveTraces
from expertcast.predictors.messages import first_line
from expertcast.predictors.view import ModelShape
from expertcast_vllm.requests import Part, Requests, prompt_of

logger = init_logger(__name__)

MOST_BYTES = 256 << 20
"""Of rows of running requests, and of such that wait to be written."""

_LULL_S = 1.0


@dataclass(slots=True)
class _Open:
    """A running request."""

    hash: str
    start: int
    """Position of the first token that is kept."""
    end: int
    """Position after the last token that is kept."""
    token_T: list[Tensor] = field(default_factory=list)
    residual_TLD: list[Tensor] = field(default_factory=list)
    logits_TLE: list[Tensor] = field(default_factory=list)
    tokens: int = 0


class TrafficCollector:
    """Keeps the first tokens of requests, as many as fit its memory, and gives them to a thread that writes.

    Requests are left out that begin while too much waits, and rows of a token that was run before.

    Args:
        live: where to.
        shape: of the model.
        hash_of: what a request's document is known by, from its prompt's ids.
        most_bytes: of rows that are held.
    """

    def __init__(
        self,
        live: LiveTraces,
        shape: ModelShape,
        hash_of: Callable[[Sequence[int]], str],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._live, self._shape, self._hash_of, self._most = live, shape, hash_of, most_bytes
        self._open: dict[str, _Open] = {}
        self._ended: set[str] = set()
        """Running requests of which no more is kept."""
        self._rows: list[tuple[str, slice]] = []
        self._keep_R: Tensor | None = None
        self._residuals: list[Tensor] = []
        self._logits: list[Tensor] = []
        self._held = 0
        self._lock = threading.Lock()
        self._left = live.left
        self._failed = False
        self._queue: queue.SimpleQueue[LiveDocument | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="expertcast-traces", daemon=True)
        self._thread.start()

    def start(self, running: Requests, known: Mapping[str, Any]) -> None:
        """A forward is about to run, with these requests of all that are `known`."""
        self._rows, self._residuals, self._logits = [], [], []
        wanted = []
        if running.token_T is not None and self._left > 0 and not self._failed:
            for part in running.parts:
                rows = self._wanted(part, known)
                if rows is not None:
                    wanted.append(torch.arange(rows.start, rows.stop))
                    self._rows.append((part.request, rows))
        self._keep_R = torch.cat(wanted) if wanted else None

    def _wanted(self, part: Part, known: Mapping[str, Any]) -> slice | None:
        """Which of a request's rows are kept."""
        if part.request in self._ended:
            return None
        own = self._open.get(part.request)
        if own is None:
            prompt = prompt_of(known, part.request)
            if prompt is None or self._held >= self._most:
                self._ended.add(part.request)
                return None
            own = self._open[part.request] = _Open(hash=self._hash_of(prompt), start=part.start, end=part.start)
        begin = part.rows.start + max(0, own.end - part.start)  # it may run again from its beginning
        end = min(part.rows.stop, begin + self._live.options.window - own.tokens)
        return slice(begin, end) if begin < end and part.start <= own.end else None

    def see(self, call: RouterCall) -> None:
        """A router has run."""
        if self._keep_R is None:
            return
        keep_R = self._keep_R.to(call.logits_TE.device)
        self._residuals.append(call.residual_TD[keep_R].to(torch.bfloat16))
        self._logits.append(call.logits_TE[keep_R])

    def finish(self, running: Requests) -> None:
        """The forward has run."""
        if self._keep_R is None or len(self._residuals) != self._shape.layers or running.token_T is None:
            return
        residual_RLD = torch.stack(self._residuals, dim=1).cpu()
        logits_RLE = torch.stack(self._logits, dim=1).cpu()
        token_T, first = running.token_T.cpu(), 0
        self._residuals, self._logits = [], []
        for request, rows in self._rows:
            own, count = self._open[request], rows.stop - rows.start
            last = first + count
            own.token_T.append(token_T[rows].clone())
            own.residual_TLD.append(residual_RLD[first:last].clone())
            own.logits_TLE.append(logits_RLE[first:last].clone())
            own.end, own.tokens, first = own.end + count, own.tokens + count, last
            self._hold(residual_RLD[:1].nbytes * count + logits_RLE[:1].nbytes * count)
            if own.tokens >= self._live.options.window or self._held >= self._most:
                self._end(request)

    def ended(self, known: Mapping[str, Any]) -> None:
        """Requests that are not `known` any more have ended."""
        for request in [request for request in self._open if request not in known]:
            self._end(request)
        self._ended.intersection_update(known)

    def close(self) -> None:
        """Write what is held."""
        if not self._thread.is_alive():
            return
        for request in list(self._open):
            self._end(request)
        self._queue.put(None)
        self._thread.join()

    def _end(self, request: str) -> None:
        """No more is kept of a request."""
        own = self._open.pop(request)
        self._ended.add(request)
        if own.tokens:
            self._left -= own.tokens
            joined = {name: torch.cat(getattr(own, name)) for name in ("token_T", "residual_TLD", "logits_TLE")}
            self._queue.put(LiveDocument(hash=own.hash, start=own.start, **joined))

    def _hold(self, nbytes: int) -> None:
        with self._lock:
            self._held += nbytes

    def _write(self) -> None:
        """Of the thread: what cannot be written ends the collection, never the server."""
        try:
            while True:
                try:
                    document = self._queue.get(timeout=_LULL_S)
                except queue.Empty:
                    self._live.lull()
                    continue
                if document is None:
                    break
                self._live.add(document)
                self._hold(-document.residual_TLD.nbytes - document.logits_TLE.nbytes)
            self._live.close()
        except Exception as error:  # the disk may be full, or the model give NaN
            self._failed = True
            logger.error("expertcast stops collecting in %s: %s", self._live.folder, first_line(error))
