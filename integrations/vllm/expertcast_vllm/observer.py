"""Observation of a running vLLM model: collecting its traffic as traces, and forecasts from its layers.

R requests of a step, T tokens, D hidden size, L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.config import CompilationMode
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config

from expertcast.data.batch import RouterCall
from expertcast.data.processes import exclusive
from expertcast.predictors import Predictor
from expertcast.predictors.messages import ExpertcastError, first_line
from expertcast.predictors.view import ModelShape, MoELayer, MoEView
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.forecasters import resolve_predictor
from expertcast_vllm.settings import Settings
from expertcast_vllm.step import Part, Requests, observe_requests, refuse
from expertcast_vllm.traffic import Conversations, LiveDocument, LiveOptions, LiveTraces
from expertcast_vllm.wiring import ForecastRouter, GateParameters, find_layers

if TYPE_CHECKING:
    from expertcast_vllm.offload import WorkerOffload


class PreviousTokens:
    """Router logits of each request's last token in the previous step, for all layers.

    A request that pauses or restarts has no such logits.

    Args:
        shape: the model's shape.
    """

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._row: dict[tuple[str, int], int] = {}
        """Row of each request in the current step, by request and the position after its tokens."""
        self._last: list[int] = []
        """Row of each request's last token in the step."""
        self._known_R: list[int] = []
        """Each request's row in the previous step, or -1."""
        self._before_RLE: Tensor | None = None
        self._now_RLE: Tensor | None = None
        self._previous_RLE: Tensor | None = None

    def start(self, running: Requests) -> None:
        """Begin a step over these requests' tokens."""
        self._known_R = [self._row.get((part.request, part.start), -1) for part in running.parts]
        ends = [(part.request, part.start + part.rows.stop - part.rows.start) for part in running.parts]
        self._row = {end: index for index, end in enumerate(ends)}
        self._last = [part.rows.stop - 1 for part in running.parts]
        self._before_RLE, self._now_RLE, self._previous_RLE = self._now_RLE, None, None

    def record(self, call: RouterCall) -> None:
        """Record a router's output."""
        last_RE = call.logits_TE[self._last]
        if self._now_RLE is None:
            layers, experts = self._shape.layers, self._shape.experts
            self._now_RLE = last_RE.new_full((len(last_RE), layers, experts), float("nan"))
        self._now_RLE[:, call.layer] = last_RE

    def of(self, call: RouterCall) -> Tensor:
        """Return logits [R, L, E] for a step of one token per request; NaN for requests outside the previous step."""
        if self._previous_RLE is None:
            unknown_1LE = call.logits_TE.new_full((1, self._shape.layers, self._shape.experts), float("nan"))
            held = unknown_1LE if self._before_RLE is None else torch.cat([self._before_RLE, unknown_1LE])
            self._previous_RLE = held[self._known_R]
        return self._previous_RLE


# Collecting traffic

logger = init_logger(__name__)

MOST_BYTES = 256 << 20
"""Memory for the rows of running requests, to their ends, and of documents to write. One request may need more."""

_LULL_S = 1.0


@dataclass(slots=True)
class _OpenRequest:
    """A running request and its collected rows."""

    hash: str
    start: int
    """Position of the first collected token."""
    end: int
    """Position after the last collected token."""
    reserved: int
    """Bytes of all tokens that it may have."""
    rows: list[tuple[Tensor, ...]] = field(default_factory=list)
    """Token ids [T], residuals [T, L, D] and logits [T, L, E] of each forward pass."""

    @property
    def tokens(self) -> int:
        return self.end - self.start


class TrafficCollector:
    """Collects the first tokens of requests in bounded memory; a thread writes them.

    It skips requests that begin while the memory is taken by others, and tokens that run a second time. A request that
    has begun is collected to its end: its memory is reserved.

    Args:
        live: destination of the traces.
        shape: the model's shape.
        hash_of: returns a document's hash from the prompt's token ids.
    """

    def __init__(self, live: LiveTraces, shape: ModelShape, hash_of: Callable[[Sequence[int]], str]) -> None:
        self._live, self._shape, self._hash_of = live, shape, hash_of
        self._open: dict[str, _OpenRequest] = {}
        self._ended: set[str] = set()
        """Running requests that are no longer collected."""
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
        """Begin a forward pass over these requests; `known` has all of vLLM's requests."""
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
        """Return the rows of a request to collect, or None."""
        if part.request in self._ended:
            return None
        own = self._open.get(part.request)
        if own is None:
            prompt = known[part.request].prompt_token_ids  # None for prompts of embeddings
            limit = getattr(known[part.request].sampling_params, "max_tokens", None)
            most = self._live.options.window
            tokens = most if prompt is None or limit is None else min(most, len(prompt) + limit)
            needed = tokens * self._live.row_bytes
            if prompt is None or (self._held and self._held + needed > MOST_BYTES):
                self._ended.add(part.request)
                return None
            self._hold(needed)
            own = self._open[part.request] = _OpenRequest(
                hash=self._hash_of(prompt), start=part.start, end=part.start, reserved=needed
            )
        begin = part.rows.start + max(0, own.end - part.start)  # a preempted request runs again from its start
        end = min(part.rows.stop, begin + self._live.options.window - own.tokens)
        return slice(begin, end) if begin < end and part.start <= own.end else None

    def record(self, call: RouterCall) -> None:
        """Record the collected rows of a router's output."""
        if self._keep_R is None:
            return
        keep_R = self._keep_R.to(call.logits_TE.device)
        self._residuals.append(call.residual_TD[keep_R].to(torch.bfloat16))
        self._logits.append(call.logits_TE[keep_R])

    def finish(self, running: Requests) -> None:
        """End a forward pass and keep its rows."""
        if self._keep_R is None or len(self._residuals) != self._shape.layers or running.token_T is None:
            return
        residual_RLD = torch.stack(self._residuals, dim=1).cpu()
        logits_RLE = torch.stack(self._logits, dim=1).cpu()
        token_T, first = running.token_T.cpu(), 0
        self._residuals, self._logits = [], []
        for request, rows in self._rows:
            own, count = self._open[request], rows.stop - rows.start
            last = first + count
            rows_seen = token_T[rows], residual_RLD[first:last], logits_RLE[first:last]
            own.rows.append(tuple(each.clone() for each in rows_seen))
            own.end, first = own.end + count, last
            if own.tokens >= self._live.options.window:
                self._end(request)

    def ended(self, known: Mapping[str, Any]) -> None:
        """End the requests that are not `known` any more."""
        for request in [request for request in self._open if request not in known]:
            self._end(request)
        self._ended.intersection_update(known)

    def close(self) -> None:
        """Write all collected rows and end the thread."""
        if not self._thread.is_alive():
            return
        for request in list(self._open):
            self._end(request)
        self._queue.put(None)
        self._thread.join()

    def _end(self, request: str) -> None:
        """End the collection of a request and queue its document."""
        own = self._open.pop(request)
        self._ended.add(request)
        self._hold(own.tokens * self._live.row_bytes - own.reserved)
        if own.tokens:
            self._left -= own.tokens
            rows = map(torch.cat, zip(*own.rows, strict=True))
            named = dict(zip(("token_T", "residual_TLD", "logits_TLE"), rows, strict=True))
            self._queue.put(LiveDocument(hash=own.hash, start=own.start, **named))

    def _hold(self, nbytes: int) -> None:
        with self._lock:
            self._held += nbytes

    def _write(self) -> None:
        """Write queued documents. A write error ends the collection, not the server."""
        try:
            while True:
                try:
                    document = self._queue.get(timeout=_LULL_S)
                except queue.Empty:
                    self._live.commit_if_idle()
                    continue
                if document is None:
                    break
                self._live.add(document)
                self._hold(-len(document.token_T) * self._live.row_bytes)
            self._live.commit()
        except Exception as error:  # for example a full disk, or NaN from the model
            self._failed = True
            logger.error("expertcast stops collecting in %s: %s", self._live.folder, first_line(error))


class ModelObserver:
    """Observes a loaded model: its layers, its requests and its residual stream.

    Args:
        model_runner: vLLM's model runner with a loaded model.
        gates: parameters of possible gates, as they were loaded.

    Raises:
        ExpertcastError: the model, or vLLM's way of running it, cannot be observed.
    """

    def __init__(self, model_runner: Any, gates: GateParameters) -> None:
        config = model_runner.vllm_config
        _check_model(config)
        self._runner = model_runner
        self.sees_residuals = config.compilation_config.mode == CompilationMode.NONE
        """Whether the residual stream is visible; compiled forward passes run without hooks."""
        self.view = find_layers(model_runner, gates)
        self._factors = [layer.router.factor for layer in self.view if isinstance(layer.router, ForecastRouter)]
        self._residual: Tensor | None = None
        self._last_call: tuple[RouterCall, RouterCall] | None = None
        self.running: Requests | None = None
        """Requests of the current forward pass."""
        self.collector: TrafficCollector | None = None
        if self.sees_residuals:
            for layer in self.view:
                layer.norm.register_forward_hook(self._normed)
        observe_requests(model_runner, self)
        self._folder = ExitStack()

    def collect(self, settings: Settings) -> TrafficCollector | None:
        """Start to collect traffic if `settings.collect` is set. Only the first tensor-parallel worker collects.

        Returns:
            The collector to close at the end, or None.

        Raises:
            ExpertcastError: the folder cannot be used, another process writes to it, or residuals are not visible.
        """
        if settings.collect is None:
            return None
        if not self.sees_residuals:
            raise ExpertcastError("collect needs hooks, which compiled layers skip: start vLLM with --enforce-eager")
        if get_tensor_model_parallel_rank():
            return None
        tokenizer = cached_tokenizer_from_config(self._runner.vllm_config.model_config)
        if tokenizer is None:
            raise ExpertcastError("collect needs the text of requests: start vLLM without --skip-tokenizer-init")
        config, folder = self._runner.vllm_config.model_config, Path(settings.collect)
        self._folder.enter_context(exclusive(folder))
        live = LiveTraces(
            folder, self.view, LiveOptions(tokens=settings.collect_tokens, window=settings.collect_window),
            config=json.loads(config.hf_config.to_json_string(use_diff=False)), logits=torch.float32,
            dtype=str(config.dtype).removeprefix("torch."),
        )  # fmt: skip
        logger.info("expertcast collects requests in %s", live.disk)
        self.collector = TrafficCollector(live, self.view.shape, Conversations(tokenizer).hash)
        return self.collector

    def as_transformers(self, call: RouterCall) -> RouterCall:
        """Return the call in transformers' form: with scaled weights, int64 ids, and the residual stream if visible."""
        if self._last_call is None or self._last_call[0] is not call:
            residual = self._residual if self.sees_residuals else None
            rows = len(call.ids_TK)
            own = replace(
                call,
                residual_TD=call.residual_TD if residual is None else residual[:rows],
                weights_TK=call.weights_TK * self._factors[call.layer],
                ids_TK=call.ids_TK.long(),
            )
            self._last_call = call, own
        return self._last_call[1]

    def on_router(self, call: RouterCall) -> None:
        """Process a router's output. Layers come in order in every forward pass."""
        if self.collector is not None:
            self.collector.record(self.as_transformers(call))

    def start(self, running: Requests) -> None:
        """Begin a forward pass over these requests' tokens."""
        self.running, self._last_call = running, None
        if self.collector is not None:
            self.collector.start(running, self._runner.requests)

    def finish(self, running: Requests) -> None:
        """End a forward pass."""
        self._residual, self._last_call = None, None
        if self.collector is not None:
            self.collector.finish(running)

    def ended(self) -> None:
        """Check for finished requests."""
        if self.collector is not None:
            self.collector.ended(self._runner.requests)

    def _normed(self, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, Tensor]) -> None:
        self._residual = output[1] if isinstance(output, tuple) else args[0]


def _check_model(config: Any) -> None:
    """Refuse parallelism and drafts that hide layers or tokens.

    Raises:
        ExpertcastError: such an option is set.
    """
    parallel = config.parallel_config
    refused = {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--speculative-config": config.speculative_config is not None,
    }
    refuse(refused, "forecasts and collecting need all layers of every token in one worker: leave {} out")


# Forecasts


def make_speculator(offload: WorkerOffload, observer: ModelObserver | None) -> Speculator:
    """Create the speculator of a loaded model.

    Args:
        offload: the worker's offload.
        observer: the model's observer; None without forecasts and collection.

    Raises:
        ExpertcastError: the predictor is unknown, belongs to another model, or needs inputs that vLLM hides.
    """
    config = offload.settings.offload
    if observer is None:
        return Speculator(_layers_view(offload), None)
    view = observer.view
    predictor, _ = resolve_predictor(config.resolved_predictor(), view)
    if predictor is None:
        return Speculator(view, None)
    _check_predictor(predictor, observer)
    predictor.to(next(view[0].router.parameters()).device)
    return ObservingSpeculator(observer, predictor, ahead=config.ahead)


class ObservingSpeculator(Speculator):
    """Forecasts from the observed layers. The exact routing always runs."""

    def __init__(self, observer: ModelObserver, predictor: Predictor, *, ahead: int) -> None:
        with torch.inference_mode(False):
            super().__init__(observer.view, predictor, ahead=ahead)
        self._observer = observer
        self._memory = None  # a row belongs to another request in the next step
        shape = observer.view.shape
        self._previous_tokens = PreviousTokens(shape) if predictor.uses_previous_token else None

    def start(self, fresh: bool, rung: int | None = -1) -> None:
        super().start(fresh, rung)
        if self._previous_tokens is not None and self._observer.running is not None:
            self._previous_tokens.start(self._observer.running)

    def due(self, call: RouterCall, executed: tuple[Tensor, Tensor] | None) -> int | None:
        seen = self._observer.as_transformers(call)
        if self._previous_tokens is not None:
            self._previous_tokens.record(seen)
        return super().due(seen, executed)

    def _previous(self, call: RouterCall) -> Tensor | None:
        return None if self._previous_tokens is None or call.tokens > 1 else self._previous_tokens.of(call)


def _check_predictor(predictor: Predictor, observer: ModelObserver) -> None:
    """Raise if vLLM does not provide the predictor's inputs.

    Raises:
        ExpertcastError: an input is missing.
    """
    if predictor.uses_early:
        raise ExpertcastError(
            f"{predictor.name} reads early attention, which is not available under vLLM: train it with --set "
            "inputs=quasi_hidden/router_input/routing/previous, or use linear"
        )
    if predictor.reads_residual and not observer.sees_residuals:
        raise ExpertcastError(
            f"{predictor.name} reads the residual stream, which compiled layers hide: start vLLM with --enforce-eager, "
            "or use router_input, or linear trained with --set inputs=router_input"
        )


def _layers_view(offload: WorkerOffload) -> MoEView:
    shape = offload.shape
    layers = [
        MoELayer(
            index=index, norm_name="", router_name="", experts_name=layer.layer_name,
            decoder=nn.Module(), block=nn.Module(), norm=nn.Identity(), router=nn.Module(), experts=layer,
            num_experts=shape.experts, top_k=shape.top_k, hidden_size=shape.hidden, has_shared=False,
        )
        for index, layer in enumerate(offload.layers)
    ]  # fmt: skip
    return MoEView(tuple(layers), model_id=offload.config.model_config.model)
