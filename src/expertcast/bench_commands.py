"""`expertcast bench` and `expertcast advise`. What is measured is in :mod:`expertcast.runtime.benchmarking.bench`."""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertcast.bench_target import (
    Target,
    check_options,
    forecaster,
    link_arguments,
    load_target,
    prompt_of,
    routing_process,
    routing_source,
    say,
    shared_arguments,
    ways,
)
from expertcast.bench_text import describe
from expertcast.checkpoints.provenance import provenance
from expertcast.commands import Outcome
from expertcast.predictors import ExpertcastError
from expertcast.runtime.advising.advise import advice_errors, advice_from
from expertcast.runtime.advising.advise import advise as advise_model
from expertcast.runtime.advising.survey import survey
from expertcast.runtime.benchmarking.bench import Bench, check_lengths, decode_resident, measure
from expertcast.runtime.benchmarking.hardware import hardware
from expertcast.runtime.benchmarking.peer import measure_peer
from expertcast.runtime.benchmarking.random_weights import weight_bytes
from expertcast.runtime.benchmarking.routing_process import RoutingProcess
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.recording.timeline import draw_steps
from expertcast.runtime.recording.timeline import write_timeline as write_trace

PEER_TOKENS = 4


@dataclass(slots=True)
class Prompt:
    """One prompt with everything measured on it."""

    ids: Tensor
    bench: Bench
    process: RoutingProcess | None
    link: dict[str, Any]
    advice: dict[str, Any] | None
    """What the event model expected, and how far it was off."""
    peer: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        resident = self.bench.resident
        found: dict[str, Any] = {
            "prompt_tokens": self.ids.shape[1],
            **self.link,
            "link_rate": self.bench.link_rate,
            "compared_with": "on_demand" if resident is None else "resident",
            "resident": None
            if resident is None
            else {"tpot_s": statistics.median(resident.steps_s), "ttft_s": resident.ttft_s},
            "runs": self.bench.reports,
        }
        if self.process is not None:
            found["measured_routing"] = self.process.tables.measured()
        if self.advice is not None:
            found["advice"] = self.advice
        if self.peer is not None:
            found["peer"] = self.peer
        return found


def bench(args: argparse.Namespace) -> Outcome:
    """`expertcast bench`."""
    check_options(args)
    check_lengths(args.new_tokens, args.repetitions)
    check_timeline(args.timeline)
    begin = time.monotonic()
    prompts: list[Prompt] = []
    target = load_target(args)
    for tokens in args.prompt_tokens:
        if prompts and time.monotonic() - begin > args.minutes * 60:
            say(f"{tokens} tokens: left out, {args.minutes:g} minutes are over")
            continue
        prompts.append(bench_prompt(args, target, tokens, prompts[0].link if prompts else None))
    target.store.give_back(torch.device("cpu"))
    if args.peer:  # last: it moves the model
        prompts[0].peer = peer(args, target, prompts[0])
    result = {
        **heading(target),
        "routing": routing_source(prompts[0].process),
        "new_tokens": args.new_tokens,
        "repetitions": args.repetitions,
        "hybrid_layers": hybrid_layers(prompts[0].bench),
        **prompts[0].as_dict(),
        "prompts": {str(prompt.ids.shape[1]): prompt.as_dict() for prompt in prompts},
    }
    if args.timeline is not None:
        result["timeline"] = write_timeline(args.timeline, prompts[0].bench)
    return result, describe(result)


def advise(args: argparse.Namespace) -> Outcome:
    """`expertcast advise`."""
    check_options(args)
    check_lengths(args.new_tokens, 1)
    target = load_target(args)
    prompt_ids, process = (
        prompt_of(target, args.prompt_tokens, args.seed),
        routing_process(args, target, args.prompt_tokens),
    )
    with process if process is not None else nullcontext():
        link = link_arguments(args, target, prompt_ids)
        say("short runs, on demand and with forecasts")
        advice = advise_model(
            target.model,
            prompt_ids,
            OffloadConfig(**shared_arguments(args, target, link)),
            predictors=[forecaster(args, process)],
            new_tokens=args.new_tokens,
        )
    routing = routing_source(process)
    result = {**heading(target), "routing": routing, **link, **advice.as_dict()}
    return result, f"{target.name}, routing: {routing}\n{advice.text()}"


def bench_prompt(args: argparse.Namespace, target: Target, tokens: int, link: dict[str, Any] | None) -> Prompt:
    """All runs on one prompt.

    Args:
        link: of the prompts before this one: the link's speed is chosen once.
    """
    prompt_ids, process = prompt_of(target, tokens, args.seed), routing_process(args, target, tokens)
    with process if process is not None else nullcontext():
        resident = None
        if target.store.fits:
            say(f"{tokens} tokens: resident model")
            with target.store.resident():
                resident = decode_resident(target.model, prompt_ids, args.new_tokens)
        link = link_arguments(args, target, prompt_ids) if link is None else link
        measured = measure(
            target.model,
            prompt_ids,
            runs=ways(args, target, process),
            shared={"ahead": args.ahead, **shared_arguments(args, target, link)},
            new_tokens=args.new_tokens,
            repetitions=args.repetitions,
            resident=resident,
            say=say,
        )
        no_advice = args.no_advice or args.link == "kernel"  # the event model has no books of a device's own
        advice = None if no_advice else check_advice(args, target, prompt_ids, process, link, measured)
    return Prompt(prompt_ids, measured, process, link, advice)


def check_advice(
    args: argparse.Namespace,
    target: Target,
    prompt_ids: Tensor,
    process: RoutingProcess | None,
    link: dict[str, Any],
    measured: Bench,
) -> dict[str, Any]:
    """What `expertcast advise` would have said before the runs, and how far it was from them."""
    say(f"{prompt_ids.shape[1]} tokens: what advise says")
    found = survey(
        target.model,
        prompt_ids,
        OffloadConfig(**shared_arguments(args, target, link)),
        predictors=[forecaster(args, process)],
        new_tokens=args.new_tokens,
        repetitions=1,
    )
    runs = {
        name: OffloadConfig(**{**run.arguments, "slots": run.slots, "memory": None})
        for name, run in measured.runs.items()
    }
    errors = advice_errors(found, runs, {name: run.tpot_s for name, run in measured.runs.items()})
    return {**advice_from(found).as_dict(), "errors": errors}


def heading(target: Target) -> dict[str, Any]:
    """What was run, on what."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        **provenance(),
        "target": target.name,
        "random_weights": target.random,
        "shape": target.view.shape.as_dict(),
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "block_bytes": target.store.layout.block_bytes,
    }


def peer(args: argparse.Namespace, target: Target, prompt: Prompt) -> dict[str, Any]:
    """accelerate's offload with the device memory that the cached runs take: everything but experts, and the slots."""
    whole, experts = weight_bytes(target.model), sum(weight_bytes(layer.experts) for layer in target.view)
    memory = whole - experts + max(run.slots for run in prompt.bench.runs.values()) * target.store.layout.block_bytes
    say(f"{prompt.ids.shape[1]} tokens: accelerate")
    with prompt.process if prompt.process is not None else nullcontext():
        found = measure_peer(
            target.model,
            prompt.ids,
            memory=memory,
            new_tokens=min(PEER_TOKENS, args.new_tokens),
            bandwidth=prompt.link.get("bandwidth"),
            truth=prompt.bench.truth,
        )
    return {"memory": memory, **found}


def hybrid_layers(measured: Bench) -> list[int] | None:
    """Layers that the hybrid runs were told to execute forecasts at; None where a checkpoint's recall chose them."""
    hybrid = next((run for name, run in measured.runs.items() if name.startswith("hybrid")), None)
    return None if hybrid is None else hybrid.arguments.get("layers")


def check_timeline(path: Path | None) -> None:
    """
    Raises:
        ExpertcastError: the folder does not exist; said before a long run, not after it.
    """
    if path is not None and not path.parent.is_dir():
        raise ExpertcastError(f"--timeline {path}: there is no folder {path.parent}; make it first")


def write_timeline(path: Path, measured: Bench) -> dict[str, str]:
    """Chrome trace of the last repetition of every run, and a PNG of two decode steps, on demand above prefetch."""
    recorders = {name: run.recorder for name, run in measured.runs.items() if run.recorder is not None}
    write_trace(path, recorders)
    written = {"trace": str(path)}
    for above, below in (("on_demand", "exact"), ("on_demand_cache", "exact_cache")):
        if above in recorders and below in recorders:
            picture = path.with_suffix(".png")
            draw_steps({above: recorders[above], below: recorders[below]}, picture, steps=2)
            written["picture"] = str(picture)
            break
    return written
