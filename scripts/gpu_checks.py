"""The GPU checks in one call: tests, links, decoding, graph; on a machine without a GPU, its small form.

    python scripts/gpu_checks.py --out benchmarks/results/gpu.json

With CUDA: the tests marked `gpu`; what a layer's misses and one launch cost over either link, with blocks as large as
those of Qwen3-30B-A3B; decoding over both links; and decode steps as a CUDA graph. Without: the runtime's test of
bit-identity, the links of a CPU, and decoding over the emulated link and the device-side one's reference. Writes what
was measured with date, hardware and versions; exits 1 if a check failed. `scripts/gpu_bench.py` is the benchmark.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from transformers import PreTrainedModel

from expertcast.checkpoints.provenance import provenance
from expertcast.commands.output import write_json
from expertcast.data.discovery import find_moe_layers
from expertcast.data.models import load_model, load_tokenizer
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.runtime import CudaLink, InstantLink, Link, OffloadConfig, benchmark, offload
from expertcast.runtime.benchmarking.bench import BenchSettings
from expertcast.runtime.benchmarking.hardware import hardware
from expertcast.runtime.benchmarking.shapes import build_shape
from expertcast.runtime.engine.kernels import kernel_name
from expertcast.runtime.graph import GraphDecoder
from expertcast.runtime.links.kernel import KernelLink
from expertcast.runtime.links.speed import misses_s
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

ROOT = Path(__file__).resolve().parent.parent
CPU_TEST = "tests/runtime/test_exact.py"
PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune,"
LINK_SHAPE = "qwen3-30b-a3b"
MISSES = 8


def main(argv: list[str] | None = None) -> int:
    """Run everything; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference", help="model to decode with (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=192, help="(default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--skip-tests", action="store_true", help="what is measured only")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        result = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "hardware": hardware(),
            **provenance(),
            "checks": None if args.skip_tests else run_checks(device),
            "benchmark": decode(args, device),
            "links": links(args.model, device),
            "graph": graph(args, device),
        }
        write_json(args.out, result)
    except ExpertcastError as error:
        print(f"gpu_checks: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"checks": result["checks"], "out": str(args.out)}, indent=1))
    return 0 if args.skip_tests or result["checks"]["passed"] else 1


def run_checks(device: str) -> Json:
    """Run the tests that belong to this machine in a process of their own."""
    selection = ["-m", "gpu", "tests"] if device == "cuda" else [CPU_TEST]
    command = [sys.executable, "-m", "pytest", "-q", *selection]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = run.stdout.strip().splitlines()
    return {"command": " ".join(["pytest", *selection]), "passed": run.returncode == 0, "tail": lines[-15:]}


def links(name: str, device: str) -> dict[str, dict[str, float]]:
    """Each link on one layer's experts: seconds from ids to a layer's misses, and of the host per copy."""
    model = build_shape(LINK_SHAPE, layers=1, device=device) if device == "cuda" else load_model(name)
    view = find_moe_layers(model)
    store = ExpertStore(view, pinned=device == "cuda")
    store.pack(view)
    kinds: tuple[Callable[[], Link], ...] = (CudaLink if device == "cuda" else InstantLink, KernelLink)
    found: dict[str, dict[str, float]] = {}
    try:
        pool = SlotPool(store.layout, 2 * MISSES, store.device)
        for kind in kinds:
            link = kind()
            link.attach(store, pool)
            seconds = misses_s(link, store, pool)
            found[link.name] = {
                "block_bytes": store.layout.block_bytes,
                "misses_s": seconds,
                "bytes_per_s": MISSES * store.layout.block_bytes / seconds,
                "host_s_per_copy": host_seconds(link, device),
            }
            link.close()
    finally:
        store.unpack()
        store.close()
    return found


def host_seconds(link: Link, device: str) -> float:
    """Seconds of the host to start one copy and make compute wait for it; on the CPU, the copy itself."""
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        for slot in range(MISSES):
            link.wait(link.submit(slot, slot, urgent=True))
        seconds.append((time.perf_counter() - start) / MISSES)
        if device == "cuda":
            torch.cuda.synchronize()
    return statistics.median(seconds)


def decode(args: argparse.Namespace, device: str) -> Json:
    """On-demand loading against prefetching and speculation, with a predictor that needs no training."""
    model, tokenizer = load_model(args.model, device=device), load_tokenizer(args.model)
    on_demand = OffloadConfig(slots=args.slots)
    exact = replace(on_demand, predictor="next_norm")
    runs = {
        "on_demand_no_cache": OffloadConfig(cache=False),
        "exact_no_cache": OffloadConfig(cache=False, predictor="next_norm"),
        "on_demand": on_demand,
        "exact": exact,
        "speculate": replace(exact, mode="speculate"),
    }
    if device == "cuda":
        runs = {f"{name}_{link}": replace(runs[name], link=link) for name in runs for link in ("cuda", "kernel")}
    settings = BenchSettings(new_tokens=args.new_tokens, repetitions=args.repetitions)
    return benchmark(model, tokenizer, PROMPT, runs, settings)


def graph(args: argparse.Namespace, device: str) -> Json:
    """Decode steps over the device-side link: one by one, and (with CUDA) as a graph."""
    model, tokenizer = load_model(args.model, device=device), load_tokenizer(args.model)
    prompt_ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"].to(device)
    model.set_experts_implementation(kernel_name(model))
    tokens: dict[str, list[int]] = {}
    report: Json = {}
    for name in ("eager", "graph") if device == "cuda" else ("eager",):
        tokens[name], report[f"{name}_tpot_s"] = steps(model, prompt_ids, args, captured=name == "graph")
    if "graph" in tokens:
        report["same_tokens"] = tokens["graph"] == tokens["eager"]
    return report


def steps(
    model: PreTrainedModel, prompt_ids: torch.Tensor, args: argparse.Namespace, *, captured: bool
) -> tuple[list[int], float]:
    """(tokens, median seconds per token)."""
    seconds, tokens = [], []
    with offload(model, link="kernel", slots=args.slots, predictor="next_norm") as offloaded:
        decoder = GraphDecoder(offloaded, prompt_ids.shape[1] + args.new_tokens + 8, capture=captured)
        logits_V = decoder.start(prompt_ids)
        for _ in range(args.new_tokens):
            tokens.append(int(logits_V.argmax()))
            start = time.perf_counter()
            logits_V = decoder.step()
            int(logits_V.argmax())
            seconds.append(time.perf_counter() - start)
    return tokens, statistics.median(seconds)


if __name__ == "__main__":
    raise SystemExit(main())
