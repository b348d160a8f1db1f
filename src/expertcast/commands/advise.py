"""`expertcast advise`: measure link and layers, and say whether and how to prefetch."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

from expertcast.commands.bench_target import (
    add_target_options,
    check_options,
    forecaster,
    heading,
    link_arguments,
    load_target,
    prompt_of,
    routing_process,
    routing_source,
    shared_arguments,
)
from expertcast.commands.options import positive
from expertcast.commands.output import Outcome, say
from expertcast.runtime.advising.advise import advise as advise_model
from expertcast.runtime.benchmarking.bench import check_lengths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_options(parser)
    parser.set_defaults(ahead=1)
    parser.add_argument("--prompt-tokens", type=positive, default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--new-tokens", type=positive, default=32, metavar="N", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> Outcome:
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
            predictors=[forecaster(args, process)],
            new_tokens=args.new_tokens,
            **shared_arguments(args, target, link),
        )
    routing = routing_source(process)
    result = {**heading(target), "routing": routing, **link, **advice.as_dict()}
    return result, f"{target.name}, routing: {routing}\n{advice.text()}"
