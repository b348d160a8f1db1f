"""A vLLM model that is watched while it runs: its traffic as traces, and forecasts from what its layers show.

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
from vllm.config import CompilationMode, VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config

from expertcast.data.batch import RouterCall, capturing
from expertcast.data.live import Conversations, LiveDocument, LiveOptions, LiveTraces
from expertcast.data.processes import exclusive
from expertcast.predictors import Predictor
from expertcast.predictors.messages import ExpertcastError, first_line
from expertcast.predictors.view import ModelShape, MoELayer, MoEView
from expertcast.runtime.engine.drift import DriftMonitor
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.forecasters import make_monitor, resolve_predictor
from expertcast_vllm.settings import Settings
from expertcast_vllm.step import Part, Requests, captures_whole_steps, refuse, tell_requests, without_padding
from expertcast_vllm.wiring import ForecastRouter, Kept, wire

if TYPE_CHECKING:
    from expertcast_vllm.offload import WorkerOffload


class PreviousTokens:
    """Router logits of the last token of each request in the last step, all layers: a request that pauses, or goes
    on elsewhere, is unknown."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._row: dict[tuple[str, int], int] = {}
        """Of the requests in the present step, each with the position behind its tokens."""
        self._last: list[int] = []
        """Row of each request's last token among the step's."""
        self._known_R: list[int] = []
        """For each request its row in the step before, or -1."""
        self._before_RLE: Tensor | None = None
        self._now_RLE: Tensor | None = None
        self._previous_RLE: Tensor | None = None

    def start(self, running: Requests) -> None:
        """A step over these requests' tokens begins."""
        self._known_R = [self._row.get((part.request, part.start), -1) for part in running.parts]
        ends = [(part.request, part.start + part.rows.stop - part.rows.start) for part in running.parts]
        self._row = {end: index for index, end in enumerate(ends)}
        self._last = [part.rows.stop - 1 for part in running.parts]
        self._before_RLE, self._now_RLE, self._previous_RLE = self._now_RLE, None, None

    def see(self, call: RouterCall) -> None:
        """A router has run."""
        last_RE = call.logits_TE[self._last]
        if self._now_RLE is None:
            layers, experts = self._shape.layers, self._shape.experts
            self._now_RLE = last_RE.new_full((len(last_RE), layers, experts), float("nan"))
        self._now_RLE[:, call.layer] = last_RE

    def of(self, call: RouterCall) -> Tensor:
        """[R, L, E] for a step of one token each; NaN where a request was not in the step before."""
        if self._previous_RLE is None:
            unknown_1LE = call.logits_TE.new_full((1, self._shape.layers, self._shape.experts), float("nan"))
            held = unknown_1LE if self._before_RLE is None else torch.cat([self._before_RLE, unknown_1LE])
            self._previous_RLE = held[self._known_R]
        return self._previous_RLE


# Collecting traffic

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
    rows: list[tuple[Tensor, ...]] = field(default_factory=list)
    """Token ids [T], residuals [T, L, D] and logits [T, L, E] of each forward."""

    @property
    def tokens(self) -> int:
        return self.end - self.start


class TrafficCollector:
    """Keeps the first tokens of requests, as many as fit its memory, and gives them to a thread that writes.

    Requests are left out that begin while too much waits, and rows of a token that was run before.

    Args:
        live: where to.
        shape: of the model.
        hash_of: what a request's document is known by, from its prompt's ids.
    """

    def __init__(self, live: LiveTraces, shape: ModelShape, hash_of: Callable[[Sequence[int]], str]) -> None:
        self._live, self._shape, self._hash_of = live, shape, hash_of
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
            prompt = known[part.request].prompt_token_ids  # None where it is given as embeddings
            if prompt is None or self._held >= MOST_BYTES:
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
            seen = token_T[rows], residual_RLD[first:last], logits_RLE[first:last]
            own.rows.append(tuple(each.clone() for each in seen))
            own.end, first = own.end + count, last
            self._hold(residual_RLD[:1].nbytes * count + logits_RLE[:1].nbytes * count)
            if own.tokens >= self._live.options.window or self._held >= MOST_BYTES:
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
            rows = map(torch.cat, zip(*own.rows, strict=True))
            named = dict(zip(("token_T", "residual_TLD", "logits_TLE"), rows, strict=True))
            self._queue.put(LiveDocument(hash=own.hash, start=own.start, **named))

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
            self._live.commit()
        except Exception as error:  # the disk may be full, or the model give NaN
            self._failed = True
            logger.error("expertcast stops collecting in %s: %s", self._live.folder, first_line(error))


class Watching:
    """A model's wiring, and what a forward shows beyond what routers are called with.

    Args:
        model_runner: vLLM's, whose model is loaded.
        kept: its gates' parameters as they were loaded.

    Raises:
        ExpertcastError: a model, or a way of running it, that cannot be watched.
    """

    def __init__(self, model_runner: Any, kept: Kept) -> None:
        config = model_runner.vllm_config
        _check_model(config)
        self._runner = model_runner
        self.sees_residuals = config.compilation_config.mode == CompilationMode.NONE
        """Compiled forwards run without hooks."""
        self.view = wire(model_runner, kept)
        self._factors = [layer.router.factor for layer in self.view if isinstance(layer.router, ForecastRouter)]
        self._residual: Tensor | None = None
        self._seen: tuple[RouterCall, RouterCall] | None = None
        self.running: Requests | None = None
        """Whose tokens the present forward is over."""
        self.collector: TrafficCollector | None = None
        if self.sees_residuals:
            for layer in self.view:
                layer.norm.register_forward_hook(self._normed)
        tell_requests(model_runner, self)
        self._folder = ExitStack()

    def collect(self, settings: Settings) -> TrafficCollector | None:
        """Keep the traffic from now on as traces, if that is asked for; of workers that share every layer the first one
        does.

        Returns:
            What is to be closed when no more comes.

        Raises:
            ExpertcastError: no folder for it, another process writes there, or residuals are not seen.
        """
        if settings.collect is None:
            return None
        if not self.sees_residuals:
            raise ExpertcastError("collect looks at layers while they run, which compiled ones do not show: start vLLM "
                                  "with --enforce-eager")  # fmt: skip
        if get_tensor_model_parallel_rank():
            return None
        tokenizer = cached_tokenizer_from_config(self._runner.vllm_config.model_config)
        if tokenizer is None:
            raise ExpertcastError("collect knows requests by their text: start vLLM without --skip-tokenizer-init")
        config, folder = self._runner.vllm_config.model_config, Path(settings.collect)
        self._folder.enter_context(exclusive(folder))
        live = LiveTraces(
            folder, self.view, LiveOptions(tokens=settings.collect_tokens, window=settings.collect_window),
            config=json.loads(config.hf_config.to_json_string(use_diff=False)), logits=torch.float32,
            dtype=str(config.dtype).removeprefix("torch."),
        )  # fmt: skip
        self.collector = TrafficCollector(live, self.view.shape, Conversations(tokenizer).hash)
        return self.collector

    def seen(self, call: RouterCall) -> RouterCall:
        """The call as transformers' router would have given it: with the residual stream, where it is seen, and ids and
        weights of its kind."""
        if self._seen is None or self._seen[0] is not call:
            residual = self._residual if self.sees_residuals else None
            if residual is not None and capturing():
                residual = without_padding(residual)
            rows = len(call.ids_TK)
            own = replace(
                call,
                residual_TD=call.residual_TD if residual is None else residual[:rows],
                weights_TK=call.weights_TK * self._factors[call.layer],
                ids_TK=call.ids_TK.long(),
            )
            self._seen = call, own
        return self._seen[1]

    def on_router(self, call: RouterCall) -> None:
        """A router has run; first to last in every forward."""
        if self.collector is not None:
            self.collector.see(self.seen(call))

    def start(self, running: Requests) -> None:
        """A forward over these requests' tokens is about to run."""
        self.running, self._seen = running, None
        if self.collector is not None:
            self.collector.start(running, self._runner.requests)

    def finish(self, running: Requests) -> None:
        """It has run to its end."""
        self._residual, self._seen = None, None
        if self.collector is not None:
            self.collector.finish(running)

    def ended(self) -> None:
        """Requests may have ended."""
        if self.collector is not None:
            self.collector.ended(self._runner.requests)

    def _normed(self, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, Tensor]) -> None:
        self._residual = output[1] if isinstance(output, tuple) else args[0]


def _check_model(config: Any) -> None:
    """
    Raises:
        ExpertcastError: the model runs in a way that shows nothing of its layers.
    """
    parallel = config.parallel_config
    refused = {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--speculative-config": config.speculative_config is not None,
    }
    refuse(refused, "forecasts and collecting need all layers of every token in one place: leave {} out")


# Forecasts


def make_speculator(offload: WorkerOffload, watching: Watching | None) -> tuple[Speculator, DriftMonitor | None]:
    """What forecasts for a model that is loaded, and what follows its recall; None where the device alone knows that.
    `watching` is None where nothing is to be forecast.

    Raises:
        ExpertcastError: a predictor that does not exist, of another model, or one that reads what vLLM does not show.
    """
    config = offload.settings.offload
    if watching is None:
        return Speculator(_layers_view(offload), None), None
    view = watching.view
    predictor, checkpoint = resolve_predictor(config.resolved_predictor(), view)
    if predictor is None:
        return Speculator(view, None), None
    _check_predictor(predictor, watching, config=offload.config)
    predictor.to(next(view[0].router.parameters()).device)
    speculator = WatchedSpeculator(watching, predictor, ahead=config.ahead, reach=config.reach)
    return speculator, None if offload.link.decides_on_device else make_monitor(
        config, view.shape, predictor, checkpoint
    )


class WatchedSpeculator(Speculator):
    """Forecasts from what the watched model shows of its layers; the exact routing is what runs."""

    def __init__(self, watching: Watching, predictor: Predictor, *, ahead: int, reach: int | None) -> None:
        with torch.inference_mode(False):
            super().__init__(watching.view, predictor, ahead=ahead, reach=reach)
        self._watching = watching
        self._memory = None  # rows of one step are other requests in the next
        shape = watching.view.shape
        self._previous_tokens = PreviousTokens(shape) if predictor.uses_previous_token else None

    def start(self, fresh: bool, rung: int | None = -1) -> None:
        super().start(fresh, rung)
        if self._previous_tokens is not None and self._watching.running is not None:
            self._previous_tokens.start(self._watching.running)

    def due(self, call: RouterCall, executed: tuple[Tensor, Tensor] | None) -> int | None:
        seen = self._watching.seen(call)
        if self._previous_tokens is not None:
            self._previous_tokens.see(seen)
        return super().due(seen, executed)

    def _previous(self, call: RouterCall) -> Tensor | None:
        return None if self._previous_tokens is None or call.tokens > 1 else self._previous_tokens.of(call)


def _check_predictor(predictor: Predictor, watching: Watching, config: VllmConfig) -> None:
    """
    Raises:
        ExpertcastError: the predictor reads what is not there.
    """
    if predictor.looks == "tokens":
        raise ExpertcastError(
            f"{predictor.name} looks tokens ahead, which nothing under vLLM uses: give another predictor"
        )
    if predictor.uses_early:
        raise ExpertcastError(
            f"{predictor.name} reads early attention, which vLLM cannot run: train it with --set "
            "inputs=quasi_hidden/router_input/routing/previous, or give linear"
        )
    if predictor.uses_previous_token and captures_whole_steps(config):
        raise ExpertcastError(
            f"{predictor.name} keeps the last token's routing on the host, which whole CUDA graphs leave out: give "
            'another predictor, or start vLLM with --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\''
        )
    if predictor.reads_residual and not watching.sees_residuals:
        raise ExpertcastError(
            f"{predictor.name} reads the residual stream, which compiled layers do not show: start vLLM with "
            "--enforce-eager, or give router_input, or linear trained with --set reads=router_input"
        )


def _layers_view(offload: WorkerOffload) -> MoEView:
    shape = offload.shape
    layers = [
        MoELayer(
            index=index, block_name=layer.layer_name, norm_name="", router_name="", experts_name=layer.layer_name,
            decoder=nn.Module(), block=nn.Module(), norm=nn.Identity(), router=nn.Module(), experts=layer,
            num_experts=shape.experts, top_k=shape.top_k, hidden_size=shape.hidden, has_shared=False,
        )
        for index, layer in enumerate(offload.layers)
    ]  # fmt: skip
    return MoEView(tuple(layers), model_id=offload.config.model_config.model)
