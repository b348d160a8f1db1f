"""Python time of the runtime per MoE layer and token: policies, cache, CUDA link and readbacks, without launches.

    python -m benchmarks overhead

The real engine runs decode steps of six layers and of 48, with the routing recorded from the first six layers of
Qwen3-30B-A3B (`benchmarks/routing`), once or eight times so that layers miss equally often, with slots for a twelfth of
the experts, and forecasts that are right nine times in ten. Everything it would launch is replaced: streams, events and
copies of the CUDA link do nothing, experts return their input, forecasts come from a list. Times are processor times of
the only thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from benchmarks.results import ResultFile, markdown, result_parser, shown, spread
from benchmarks.timed.routing import RoutingTables, recorded
from benchmarks.timed.run import tiny_model
from expertcast.data.batch import RouterCall
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors.base import PredictorConfig
from expertcast.predictors.baselines import NextNorm
from expertcast.predictors.messages import Json
from expertcast.predictors.view import MoEView
from expertcast.runtime.engine.engine import Engine
from expertcast.runtime.engine.kernels import SlotKernel, kernel_of
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.links.cuda import CudaLink
from expertcast.runtime.links.driver import CudaDevice
from expertcast.runtime.policies import CacheShape, Policies
from expertcast.runtime.recording.recorder import RunStatistics
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

SHAPE, LAYERS, SLOTS = "qwen3-30b-a3b", (6, 48), 12
"""The model, numbers of layers, and experts for each slot."""
KEYS = ("run", "layers", "repetition", "seconds_per_layer", "not_resident")


def null_device() -> CudaDevice:
    """Return a device whose work is over at once and moves nothing."""
    device = CudaDevice(torch.device("cpu"))
    stream = SimpleNamespace(query=lambda: True, elapsed_time=lambda _: 0.0)
    stream.wait_event = stream.wait_stream = lambda _: None
    device.new_stream = device.current_stream = lambda: stream  # type: ignore[method-assign]
    device.__dict__.update(record=lambda own, timing=False: own, to_device=lambda *_: None)
    device.__dict__.update(to_host=lambda source: source, send=lambda values, _stream: values)
    return device


class NoKernel(SlotKernel):
    """Experts that return their input."""

    def run(self, experts: nn.Module, hidden_TD: Tensor, *_args: object, **_options: object) -> Tensor:
        return hidden_TD


class ListedForecasts(Speculator):
    """Prepared hints for the next layer."""

    listed: Sequence[Tensor] = ()
    """Ids [1, K] by layer; empty: no forecasts."""

    def due(self, call: RouterCall, executed: object) -> int | None:
        return call.layer + 1 if call.layer + 1 < len(self.listed) else None

    def hint(self, call: RouterCall, *_: object) -> Tensor | None:
        return self.listed[call.layer + 1]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every repetition that the result lacks, and print the spreads."""
    parser = result_parser("overhead", __doc__)
    parser.add_argument("--tokens", type=int, default=60, help="decode steps per run (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    file = ResultFile(args, {"tokens": args.tokens})
    torch.set_num_threads(1)
    tables = recorded(SHAPE, prompt=1, new_tokens=args.tokens, accuracy=0.9)
    runs: list[Json] = file.values["runs"]
    known = [tuple(each[key] for key in KEYS[:3]) for each in runs]
    for number, name, layers in product(range(args.repetitions), ("on_demand", "prefetch"), LAYERS):
        if (name, layers, number) not in known:
            found = run(tables, layers, forecasts=name == "prefetch")
            runs.append(dict(zip(KEYS, (name, layers, number, *found), strict=True)))
            file.write()
    rows = []
    for name, layers in dict.fromkeys((each["run"], each["layers"]) for each in runs):
        own = [each for each in runs if (each["run"], each["layers"]) == (name, layers)]
        spent, copied = spread(each["seconds_per_layer"] for each in own), own[0]["not_resident"]
        rows.append([name, str(layers), shown(spent, 1e6), f"{copied:.2f}"])
    table = markdown(["run", "layers", "us per layer and token", "requested experts copied"], rows)
    about = f"Recorded routing of {SHAPE}, slots for 1 of {SLOTS} experts; CUDA's calls and kernels do nothing."
    file.publish("Python's own work per layer", f"{about}\n\n{table}")
    return 0


def run(tables: RoutingTables, cut: int, *, forecasts: bool) -> tuple[float, float]:
    """Return (seconds per layer and token, copies per request) of `cut` layers, without the first steps, which fill the
    slots."""
    (engine, layers, speculator, stats), read = build(cut, forecasts), torch.arange(cut) % LAYERS[0]
    hidden_TD = torch.zeros(1, layers.shape.hidden)
    logits_TE = torch.zeros(1, layers.shape.experts)
    steps = [[RouterCall(
        layer=layer, sequences=1, tokens=1, residual_TD=hidden_TD, router_input_TD=hidden_TD, logits_TE=logits_TE,
        weights_TK=torch.ones(ids_TK.shape), ids_TK=ids_TK,
    ) for layer, ids_TK in enumerate(ids_LK.split(1))] for ids_LK in tables.ids_PLK[tables.prompt :, read]]  # fmt: skip
    warm, begin = len(steps) // 4, 0.0
    for index, (calls, forecast_LK) in enumerate(zip(steps, tables.forecast_NLK, strict=True)):
        if index == warm:
            stats.reset()
            begin = time.process_time()
        speculator.listed = forecast_LK[read].split(1) if forecasts else ()
        engine.on_start(False)
        for layer, call in zip(layers, calls, strict=True):
            engine.on_router(call)
            engine.run(layer, hidden_TD, call.ids_TK, call.weights_TK)
    seconds, total = time.process_time() - begin, stats.total
    return seconds / ((len(steps) - warm) * len(layers)), (total.misses + total.prefetched) / total.requests


def build(layers: int, forecasts: bool) -> tuple[Engine, MoEView, ListedForecasts, RunStatistics]:
    """Build the engine with a link and kernels that do nothing."""
    model = tiny_model(SHAPE, layers)
    view = find_moe_layers(model)
    store, slots, link = ExpertStore(view), len(view) * view.shape.experts // SLOTS, CudaLink()
    pool = SlotPool(store.layout, slots, torch.device("cpu"))
    for layer in range(store.layers):
        store.open(layer)
    link.driver = null_device()
    link.attach(store, pool)
    speculator = ListedForecasts(view, NextNorm(PredictorConfig(), view.shape).bind(view) if forecasts else None)
    shape = CacheShape(layers=len(view), experts=view.shape.experts, top_k=view.shape.top_k, slots=slots)
    policies = Policies(eviction="lru").make(shape)
    engine = Engine(link=link, pool=pool, speculator=speculator, policies=policies, kernel=NoKernel(kernel_of(model)))
    for layer in view:
        engine.attach(layer)
    return engine, view, speculator, engine.stats
