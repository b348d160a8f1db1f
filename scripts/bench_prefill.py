"""What loading the next layer's experts early brings to a prefill: the same prompt with it and without, in alternation.

    python scripts/bench_prefill.py --out benchmarks/results/prefill.json

The bundled model on the CPU over the emulated link, on which copying all experts of a layer takes as long as computing
it for this prompt; no predictor. The prefetch policy `none` is what does without.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.checkpoints.provenance import provenance
from expertcast.commands.output import write_json
from expertcast.data.models import load_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime import OffloadConfig, offload
from expertcast.runtime.benchmarking.bench import hardware
from expertcast.runtime.policies import Policies
from expertcast.runtime.storage.layout import BlockLayout

RUNS = {"without": Policies(prefetch="none"), "with": Policies()}


def main(argv: list[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt (default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.15, help="of all experts that fit (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = load_model("reference")
    view = find_moe_layers(model)
    shape = view.shape
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (1, args.tokens), generator=generator)
    resident = [prefill(model, prompt) for _ in range(args.repetitions)]
    layer_bytes = shape.experts * BlockLayout.of(view).block_bytes
    bandwidth = shape.layers * layer_bytes / statistics.median(seconds for seconds, _ in resident)
    slots = max(shape.top_k, round(args.share * shape.layers * shape.experts))
    found: dict[str, dict[str, list[float]]] = {name: {"ttft_s": [], "waited_s": []} for name in RUNS}
    for _ in range(args.repetitions):
        for name, policies in RUNS.items():
            config = OffloadConfig(slots=slots, bandwidth=bandwidth, policies=policies)
            with offload(model, config) as offloaded:
                seconds, logits_V = prefill(model, prompt)
                assert torch.equal(logits_V, resident[0][1]), "other bits than the resident model"
                found[name]["ttft_s"].append(seconds)
                found[name]["waited_s"].append(offloaded.stats.total.waited_s)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        **provenance(),
        "tokens": args.tokens,
        "slots": slots,
        "bandwidth": bandwidth,
        "resident_s": statistics.median(seconds for seconds, _ in resident),
        "runs": {name: {key: statistics.median(values) for key, values in own.items()} for name, own in found.items()},
    }
    try:
        write_json(args.out, result)
    except ExpertcastError as error:
        print(f"bench_prefill: {error}", file=sys.stderr)
        return 2
    for name, own in result["runs"].items():
        print(f"{name:8} prefill {own['ttft_s'] * 1e3:.0f} ms, waiting {own['waited_s'] * 1e3:.0f} ms")
    print(f"resident prefill {result['resident_s'] * 1e3:.0f} ms")
    return 0


@torch.no_grad()
def prefill(model: PreTrainedModel, prompt: Tensor) -> tuple[float, Tensor]:
    """Seconds of one forward over the prompt, and the logits [V] of its last token."""
    start = time.perf_counter()
    logits_V = model(input_ids=prompt, use_cache=True, logits_to_keep=1).logits[0, -1]
    return time.perf_counter() - start, logits_V


if __name__ == "__main__":
    raise SystemExit(main())
