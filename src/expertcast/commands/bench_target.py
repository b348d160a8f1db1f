"""What `expertcast bench` and `advise` run, from their options: model, routing, forecasts, link, prompt."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.checkpoints.provenance import provenance
from expertcast.commands.options import add_options, bandwidth, not_negative, positive, positive_number
from expertcast.commands.output import say
from expertcast.commands.shared import BANDWIDTH_HELP, MODEL_HELP, ModelOptions, device_of
from expertcast.data.discovery import find_moe_layers
from expertcast.data.models import REFERENCE, load_model, load_tokenizer
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, MoEView, Predictor
from expertcast.runtime.benchmarking.bench import layer_seconds
from expertcast.runtime.benchmarking.hardware import hardware
from expertcast.runtime.benchmarking.lent_store import LentStore, without_experts_to
from expertcast.runtime.benchmarking.routing_process import RoutingProcess
from expertcast.runtime.benchmarking.routing_tables import RoutingOptions, drawn, replayed
from expertcast.runtime.benchmarking.shapes import SHAPES, build_shape, check_shape

DEFAULT_PREDICTOR = "next_norm"
"""For models with routers of their own: it needs no training."""
COPY_OVER_COMPUTE = 5.0
"""Copies are then 83% of the time per token when all is loaded on demand; 84 to 88% were measured on GPUs (row B17)."""
PROCESS_OPTIONS = ("persistence", "skew", "accuracy")


@dataclass(slots=True)
class Target:
    """What is measured."""

    name: str
    model: PreTrainedModel
    view: MoEView
    random: bool
    """Weights are random, so routing has to be given."""
    store: LentStore
    """Of all runs."""

    @property
    def device(self) -> torch.device:
        return self.store.device


def load_target(args: argparse.Namespace) -> Target:
    """The model or shape that `args.target` names.

    Raises:
        ExpertcastError: neither, or no room for it.
    """
    name, device, random = args.target, torch.device(device_of(args.device)), has_random_weights(args)
    if random:
        say(f"building {name} with random weights")
        model = build_shape(name, layers=args.layers, dtype=args.dtype, seed=args.seed)
    else:
        model = _load_model(name, args.dtype)
    view = find_moe_layers(model)
    return Target(name, without_experts_to(model, device), view, random, LentStore(view, device))


def _load_model(name: str, dtype: str) -> PreTrainedModel:
    try:
        return load_model(name, dtype=dtype)
    except ExpertcastError as error:
        if "/" in name or Path(name).exists():
            raise
        raise ExpertcastError(f"{name!r} is no shape ({', '.join(SHAPES)}) and {error}") from error


def has_random_weights(args: argparse.Namespace) -> bool:
    """Whether the target is a shape; `reference` is the bundled model unless --layers cuts it."""
    name = args.target
    return name in SHAPES and not Path(name).exists() and (name != REFERENCE or args.layers is not None)


def check_options(args: argparse.Namespace) -> None:
    """Before anything is built or loaded.

    Raises:
        ExpertcastError: options that rule each other out, or out of range.
    """
    if args.layers is not None and not has_random_weights(args):
        raise ExpertcastError(f"--layers cuts shapes, not models: {args.target!r} is none of {', '.join(SHAPES)}")
    if args.bandwidth is not None and args.copy_over_compute is not None:
        raise ExpertcastError("--bandwidth and --copy-over-compute both set the link's speed: give one of them")
    emulated = torch.device(device_of(args.device)).type == "cpu" and args.link in ("auto", "emulated")
    if not emulated and (args.bandwidth is not None or args.copy_over_compute is not None or args.latency):
        raise ExpertcastError(f"the emulated link is for the CPU and --link auto or emulated, not {args.link!r}")
    if has_random_weights(args):
        check_shape(args.target, layers=args.layers, dtype=args.dtype)
    if args.replay is not None:
        TraceDataset.open(args.replay)
    options = routing_options(args)
    if options is not None and args.predictor is not None:
        raise ExpertcastError(
            "--predictor reads hidden states, which tell nothing of routing that is drawn or replayed: leave it out; "
            "forecasts come with --accuracy"
        )
    if args.replay is not None and (args.persistence is not None or args.skew is not None):
        raise ExpertcastError("--replay takes its routing from traces: leave --persistence and --skew out")


def routing_options(args: argparse.Namespace) -> RoutingOptions | None:
    """What a routing process is asked for; None where the model routes by itself.

    Raises:
        ExpertcastError: a number out of range.
    """
    given = {name: getattr(args, name) for name in PROCESS_OPTIONS if getattr(args, name) is not None}
    if not has_random_weights(args) and not given and args.replay is None:
        return None
    return RoutingOptions(**given, seed=args.seed)


def routing_process(args: argparse.Namespace, target: Target, tokens: int) -> RoutingProcess | None:
    """The process that routes in place of the model, where weights are random or an option asks for one.

    Raises:
        ExpertcastError: traces of another model, or too few.
    """
    options = routing_options(args)
    if options is None:
        return None
    lengths = {"prompt": tokens, "new_tokens": args.new_tokens, "options": options}
    shape = target.view.shape
    tables = drawn(shape, **lengths) if args.replay is None else replayed(args.replay, shape, **lengths)
    return RoutingProcess(target.model, target.view, tables)


def routing_source(process: RoutingProcess | None) -> str:
    return "the model's own routers" if process is None else process.tables.source


def forecaster(args: argparse.Namespace, process: RoutingProcess | None) -> str | Predictor:
    """The predictor of all runs that have one."""
    return args.predictor or DEFAULT_PREDICTOR if process is None else process.predictor((args.ahead,))


def ways(args: argparse.Namespace, target: Target, process: RoutingProcess | None) -> dict[str, dict[str, Any]]:
    """Runs by name: each mode without cache, then with one (`_cache`)."""
    predictor = forecaster(args, process)
    from_checkpoint = args.predictor is not None and Path(args.predictor).exists()
    hybrid: dict[str, Any] = {"predictor": predictor, "mode": "hybrid"}
    if not from_checkpoint:  # nothing says where forecasts are good: every second layer executes one
        hybrid["layers"] = list(range(args.ahead, len(target.view), 2))
    modes: dict[str, dict[str, Any]] = {
        "on_demand": {},
        "exact": {"predictor": predictor},
        "speculate": {"predictor": predictor, "mode": "speculate"},
        "hybrid": hybrid,
    }
    caches = {"both": (False, True), "without": (False,), "with": (True,)}[args.cache]
    return {
        f"{mode}_cache" if cache else mode: {**modes[mode], "cache": cache}
        for cache in caches
        for mode in modes
        if mode in args.mode
    }


def link_arguments(args: argparse.Namespace, target: Target, prompt_ids: Tensor) -> dict[str, Any]:
    """Arguments of `offload` about the link; on the CPU an emulated one, of the bandwidth that is asked for.

    On CUDA `auto` is the copy engine's link here: it times every copy, which the kernel's link cannot.
    """
    if target.device.type != "cpu" or args.link not in ("auto", "emulated"):
        return {"link": "cuda" if args.link == "auto" else args.link}
    found: dict[str, Any] = {"link": "emulated", "latency": args.latency}
    if args.bandwidth is not None:
        return {**found, "bandwidth": args.bandwidth}
    ratio = COPY_OVER_COMPUTE if args.copy_over_compute is None else args.copy_over_compute
    say("measuring a layer's computation, for the link's speed")
    layer_s = layer_seconds(target.model, prompt_ids, args.new_tokens, target.store)
    size = target.view.shape.top_k * target.store.layout.block_bytes
    return {**found, "bandwidth": size / (layer_s * ratio), "copy_over_compute": ratio, "layer_compute_s": layer_s}


def shared_arguments(args: argparse.Namespace, target: Target, link: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `offload` that all runs have."""
    given: dict[str, Any] = {key: link[key] for key in ("link", "bandwidth", "latency") if key in link}
    return {"slots": args.slots, "memory": args.memory, "store": target.store, **given}


def prompt_of(target: Target, tokens: int, seed: int) -> Tensor:
    """Token ids [1, T]: the bundled text for a model, random ids where weights are random."""
    if target.random:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(target.model.config.vocab_size, (1, tokens), generator=generator)
        return ids.to(target.device)
    tokenizer = load_tokenizer(target.name)
    ids_list: list[int] = []
    for document in load_documents(REFERENCE):
        ids_list += tokenizer(document.text)["input_ids"]
        if len(ids_list) >= tokens:
            return torch.tensor([ids_list[:tokens]], device=target.device)
    raise ExpertcastError(f"--prompt-tokens {tokens}: the bundled text has {len(ids_list)} tokens; give fewer")


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


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """What `bench` and `advise` both need to run something offloaded."""
    parser.add_argument(
        "target", metavar="MODEL|SHAPE", help=MODEL_HELP + "; or a shape with random weights: " + ", ".join(SHAPES)
    )
    parser.add_argument("--layers", type=positive, metavar="N", help="cut a shape to N MoE layers")
    parser.add_argument("--slots", type=positive, metavar="S", help="experts that fit on the device")
    parser.add_argument("--memory", metavar="BYTES", help="device memory for experts instead of --slots, such as 2GB")
    parser.add_argument("--bandwidth", type=bandwidth, metavar="BYTES/S", help=BANDWIDTH_HELP)
    parser.add_argument(
        "--copy-over-compute",
        type=positive_number,
        metavar="R",
        help="emulate a link on which K copies take R layers' time (default: 5)",
    )
    parser.add_argument("--latency", type=not_negative, default=0.0, metavar="S", help="of the emulated link, per copy")
    parser.add_argument(
        "--link",
        default="auto",
        metavar="NAME",
        help="instant, emulated, cuda or kernel (default: emulated, or cuda on a GPU)",
    )
    parser.add_argument("--predictor", metavar="NAME|CKPT", help="for a model's own routing (default: next_norm)")
    process = parser.add_argument_group(
        "routing", "random weights route at random: a process routes a shape instead, and a model where it is asked for"
    )
    process.add_argument("--persistence", type=float, metavar="P", help="chance that an expert stays (default: 0.3)")
    process.add_argument("--skew", type=float, metavar="Z", help="Zipf exponent of experts' popularity (default: 0.8)")
    process.add_argument("--accuracy", type=float, metavar="A", help="chance of a right forecast (default: 0.9)")
    process.add_argument("--replay", type=Path, metavar="TRACES", help="route as recorded in a traces folder")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    add_options(parser, ModelOptions)
