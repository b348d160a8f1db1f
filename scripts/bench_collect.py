"""What collecting costs over a plain forward of the same batches, on CPU.

Rounds of plain forwards and of collection (hooks, sums for default vectors, Arrow shards written and flushed to disk)
alternate on the same windows, in an order that swaps every round. The plain forward runs without the head, as
collection does, and with padding in the experts, which collection leaves out; it is timed under the model's default
experts implementation and under grouped_mm, on which collection runs. A forward with the head is timed too, collection
with early attention, and the fit of the stand-in that it runs on, which a collection does once however long it is.
Writes medians and ratios as JSON.

    python scripts/bench_collect.py --threads 1 --json benchmarks/results/collect.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from expertcast.checkpoints.provenance import provenance
from expertcast.data import trace_format as layout
from expertcast.data.collect import ActivationStream, plan_stand_in
from expertcast.data.means import MeanOutputs
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.moe_layers import experts_implementation, find_moe_layers
from expertcast.data.plan import WindowBatch, make_plan, window_batches
from expertcast.data.stand_in import TOKENS
from expertcast.data.text import load_documents
from expertcast.data.trace_writer import RankWriter
from expertcast.predictors.early_attention import StandIn
from expertcast.predictors.view import MoEView

PLAIN = ("plain_default", "plain_grouped_mm", "plain_with_head")
RATIOS = [*(("collect", name) for name in PLAIN), ("collect_early", "collect"), ("collect_early", "plain_default")]


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--data", nargs="+", default=["reference"])
    parser.add_argument("--tokens", type=int, default=12_288, help="tokens per round")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, view, batches = prepare(args)
    kinds: dict[str, Callable[[], None]] = {
        "plain_default": partial(plain, model, batches),
        "plain_grouped_mm": partial(plain, model, batches, implementation="grouped_mm"),
        "plain_with_head": partial(plain, model, batches, head=True),
        "collect": partial(collect_once, model, view, batches),
        "collect_early": partial(collect_once, model, view, batches, fit(args, model, view)),
        "fit_stand_in": partial(fit, args, model, view),
    }
    result = {
        "model": args.model,
        "default_experts_implementation": model.get_experts_implementation(),
        "tokens_per_round": sum(map(len, batches)),
        "rounds": args.rounds,
        "threads": args.threads,
        "cpu": platform.processor() or platform.machine(),
        **summary(measure(kinds, args.rounds)),
        **provenance(),
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if args.json:
        args.json.write_text(text)


def prepare(args: argparse.Namespace) -> tuple[PreTrainedModel, MoEView, list[WindowBatch]]:
    """The model and the train windows of the plan, as collection batches them."""
    model = load_model(args.model)
    plan = make_plan(load_documents(args.data), load_tokenizer(args.model), tokens=args.tokens, window=args.window)
    return model, find_moe_layers(model), list(window_batches(plan.windows["train"], args.batch_size))


@torch.no_grad()
def plain(
    model: PreTrainedModel, batches: list[WindowBatch], *, implementation: str | None = None, head: bool = False
) -> None:
    """Forwards, and nothing else."""
    with experts_implementation(model, implementation or model.get_experts_implementation()):
        for batch in batches:
            (model if head else model.base_model)(
                input_ids=batch.input_ids_BS, attention_mask=batch.mask_BS, use_cache=False
            )


def fit(args: argparse.Namespace, model: PreTrainedModel, view: MoEView) -> StandIn:
    """The stand-in as `collect` fits it, on as many tokens as it takes."""
    tokens = round(1.3 * TOKENS)  # so that the train split holds enough
    plan = make_plan(load_documents(args.data), load_tokenizer(args.model), tokens=tokens, window=args.window)
    return plan_stand_in(model, view, plan)


def collect_once(
    model: PreTrainedModel, view: MoEView, batches: list[WindowBatch], stand_in: StandIn | None = None
) -> None:
    """What `collect` does per batch, to disk.

    Args:
        model, view: are run.
        batches: of text.
        stand_in: what early attention runs on; None leaves it out.
    """
    means = MeanOutputs(view)
    stream = ActivationStream(model, view, [], means=means, stand_in=stand_in)
    columns = layout.Columns(view.shape, torch.float32, stand_in is not None)
    with tempfile.TemporaryDirectory(prefix="bench-collect-") as folder:
        writer = RankWriter(Path(folder), means, rank=0, columns=columns)
        for batch in batches:
            writer.append(stream.run(batch))
        writer.commit()
        assert list(Path(folder).glob("data-*")), layout.shard_file(0, 0)


def measure(kinds: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(wall seconds, CPU seconds) of each kind in each round, after one round of warm-up."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for number in range(-1, rounds):
        for name in list(kinds)[:: 1 if number % 2 else -1]:
            wall, cpu = time.perf_counter(), time.process_time()
            kinds[name]()
            if number >= 0:
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def summary(times: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians, and medians over rounds of :data:`RATIOS`; CPU time is the steadier on a shared machine."""
    result: dict[str, Any] = {}
    for column, clock in enumerate(("wall", "cpu")):
        result[f"median_{clock}_s"] = {
            name: statistics.median(values[column] for values in rounds) for name, rounds in times.items()
        }
        result[f"ratio_{clock}"] = {
            f"{one} / {other}": statistics.median(
                ours[column] / theirs[column] for ours, theirs in zip(times[one], times[other], strict=True)
            )
            for one, other in RATIOS
        }
    return result


if __name__ == "__main__":
    main()
