"""Python time of the runtime per MoE layer and token: policies, cache and ordering, without launches.

    python -m benchmarks overhead

The real engine runs decode steps of a model with 128 experts per layer, 8 per token and 512 slots, with routing for
which half of the requests miss. Everything it would launch is replaced: copies arrive at once and move nothing, experts
return their input, forecasts come from a list.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.results import ResultFile, result_parser, shown, spread
from expertcast.data.batch import RouterCall
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors.base import PredictorConfig
from expertcast.predictors.baselines import NextNorm
from expertcast.predictors.view import MoEView
from expertcast.runtime.engine.engine import Engine
from expertcast.runtime.engine.kernels import SlotKernel, kernel_of
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.links.base import Link
from expertcast.runtime.policies import CacheShape, Policies
from expertcast.runtime.recording.recorder import RunStatistics
from expertcast.runtime.storage.layout import FULL
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.storage.transfer import Transfer

LAYERS, EXPERTS, TOP_K, SLOTS = 48, 128, 8, 512
HIDDEN = 16


class NoLink(Link):
    """Link whose copies arrive at once and move nothing."""

    name = "none"

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Transfer:
        return Transfer(key, slot, urgent, done=True)

    def start(self, copy: Transfer) -> None:
        del copy

    def wait(self, copy: Transfer) -> None:
        del copy


class NoKernel(SlotKernel):
    """Experts that return their input."""

    def run(self, experts: nn.Module, hidden_TD: Tensor, *_args: object, **_options: object) -> Tensor:
        return hidden_TD


class ListedForecasts(Speculator):
    """Prepared hints: the next layer's true routing with some experts replaced."""

    listed: list[Tensor | None]

    def due(self, call: RouterCall, executed: object) -> int | None:
        return None if self.listed[call.layer] is None else call.layer + 1

    def hint(self, call: RouterCall, *_: object) -> Tensor | None:
        return self.listed[call.layer]


@dataclass(slots=True)
class Step:
    calls: list[RouterCall]
    forecasts: list[Tensor | None]
    """Ids [1, K] for the layer after each layer."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every repetition that the result lacks, and print the spreads."""
    parser = result_parser("overhead", __doc__)
    parser.add_argument("--tokens", type=int, default=60, help="decode steps per run (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    file = ResultFile(args, {"tokens": args.tokens})
    torch.set_num_threads(1)
    steps = make_steps(args.tokens, missing=0.5)
    for number in range(args.repetitions):
        for name in ("on_demand", "prefetch"):
            per_layer, copied = run(steps, forecasts=name == "prefetch")
            file.values["runs"].append(
                {"run": name, "repetition": number, "seconds_per_layer": per_layer, "not_resident": copied}
            )
    runs = file.values["runs"]
    for name in dict.fromkeys(each["run"] for each in runs):
        own = [each for each in runs if each["run"] == name]
        times = shown(spread(each["seconds_per_layer"] for each in own), 1e6)
        print(f"{name}: {times} us per layer and token, {own[0]['not_resident']:.2f} of the requested experts copied")
    file.write()
    return 0


def make_steps(tokens: int, missing: float) -> list[Step]:
    """Draw routing in which each expert of a layer is kept for the next token with probability 1 - `missing`.

    512 slots hold 10.7 experts of each of the 48 layers, so an expert that the last token did not use is probably
    evicted.
    """
    rng = random.Random(0)
    now = [rng.sample(range(EXPERTS), TOP_K) for _ in range(LAYERS)]
    steps = []
    for _ in range(tokens):
        now = [_moved_on(ids, missing, rng) for ids in now]
        forecasts: list[Tensor | None] = [
            torch.tensor([_moved_on(now[layer + 1], 0.1, rng)]) for layer in range(LAYERS - 1)
        ]
        steps.append(Step([_call(layer, ids) for layer, ids in enumerate(now)], [*forecasts, None]))
    return steps


def run(steps: list[Step], *, forecasts: bool) -> tuple[float, float]:
    """Return (seconds per layer and token, copies per request), without the first steps, which fill the slots."""
    engine, layers, speculator, stats = build(forecasts)
    hidden_TD = torch.zeros(1, HIDDEN)
    warm = len(steps) // 4
    begin = 0.0
    for index, step in enumerate(steps):
        if index == warm:
            stats.reset()
            begin = time.perf_counter()
        speculator.listed = step.forecasts if forecasts else [None] * LAYERS
        engine.on_start(False)
        for layer, call in zip(layers, step.calls, strict=True):
            engine.on_router(call)
            engine.run(layer, hidden_TD, call.ids_TK, call.weights_TK)
    seconds = time.perf_counter() - begin
    total = stats.total
    return seconds / ((len(steps) - warm) * LAYERS), (total.misses + total.prefetched) / total.requests


def build(forecasts: bool) -> tuple[Engine, MoEView, ListedForecasts, RunStatistics]:
    """Build the engine with a link and kernels that do nothing."""
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        moe_intermediate_size=HIDDEN, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    view = find_moe_layers(model)
    store = ExpertStore(view)
    pool = SlotPool(store.layout, SLOTS, torch.device("cpu"))
    link = NoLink()
    link.attach(store, pool)
    speculator = ListedForecasts(view, NextNorm(PredictorConfig(), view.shape).bind(view) if forecasts else None)
    policies = Policies(eviction="lru").make(CacheShape(layers=LAYERS, experts=EXPERTS, top_k=TOP_K, slots=SLOTS))
    engine = Engine(link=link, pool=pool, speculator=speculator, policies=policies, kernel=NoKernel(kernel_of(model)))
    for layer in view:
        engine.attach(layer)
    return engine, view, speculator, engine.stats


def _moved_on(ids: list[int], share: float, rng: random.Random) -> list[int]:
    kept = [expert for expert in ids if rng.random() >= share]
    others = [expert for expert in range(EXPERTS) if expert not in ids]
    return kept + rng.sample(others, TOP_K - len(kept))


def _call(layer: int, ids: list[int]) -> RouterCall:
    nothing = torch.zeros(1, HIDDEN)
    return RouterCall(
        layer=layer, sequences=1, tokens=1, residual_TD=nothing, router_input_TD=nothing,
        logits_TE=torch.zeros(1, EXPERTS), weights_TK=torch.full((1, TOP_K), 1 / TOP_K), ids_TK=torch.tensor([ids]),
    )  # fmt: skip
