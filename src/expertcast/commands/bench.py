"""`expertcast bench`: time per token of offloaded decoding (:mod:`expertcast.runtime.benchmarking.bench`)."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import torch

from expertcast.commands.bench_target import DEFAULT_PREDICTOR, Target, TargetOptions, say_if_busy
from expertcast.commands.options import COUNT, POLICIES_HELP, Count, Fields, Option, policies_of
from expertcast.commands.output import Outcome, forecast_lines, runs_table, say
from expertcast.commands.predictors import is_checkpoint
from expertcast.predictors.messages import Json

if TYPE_CHECKING:
    from expertcast.runtime.benchmarking.bench import BenchSettings
    from expertcast.runtime.config import OffloadConfig
    from expertcast.runtime.policies.settings import FORECASTS

# Text of the result: one table per prompt


def describe(result: Json) -> str:
    """Return the result as text."""
    shape = ", ".join(f"{key}={value}" for key, value in result["shape"].items())
    lines = [
        f"{result['target']} ({shape}; {result['dtype']}), {result['new_tokens']} new tokens, "
        f"{result['repetitions']} repetitions, {result['hardware']['threads']} threads",
        f"experts {result['experts_form']}: {result['block_bytes']:,} bytes each, "
        f"{result['weight_bits']:.3g} bits a weight",
    ]
    for prompt in result["prompts"].values():
        speed = f"{prompt['bandwidth'] / 1e9:.3g} GB/s emulated" if "bandwidth" in prompt else "the machine's own link"
        compared = f"identical means as {prompt['compared_with']}"
        lines += ["", f"prompt of {prompt['prompt_tokens']} tokens, {speed}, {compared}"]
        lines += [runs_table(prompt["runs"]), *forecast_lines(prompt["runs"])]
        if prompt["resident"] is not None:
            lines.append(f"resident model: {prompt['resident']['tpot_s'] * 1e3:.2f} ms per token")
        lines += speed_lines(prompt["runs"])
    return "\n".join(lines)


def speed_lines(runs: Json) -> list[str]:
    """Return a line for each cache setting that ran on demand and otherwise: how many times as fast its fastest mode
    is."""
    lines = []
    for cache in ("", "_cache"):
        on_demand = f"on_demand{cache}"
        others = [name for name in runs if name != on_demand and name.endswith("_cache") == bool(cache)]
        if on_demand in runs and others:
            fastest = min(others, key=lambda name: float(runs[name]["tpot_s"]))
            times = runs[on_demand]["tpot_s"] / runs[fastest]["tpot_s"]
            same = "yes" if runs[fastest]["identical"] else "no"
            lines.append(f"{fastest} is {times:.2f} times as fast as {on_demand}; identical: {same}")
    return lines


WAYS = ("on_demand", "exact", "speculate", "hybrid")


@dataclass(frozen=True, kw_only=True)
class Options(TargetOptions):
    """Options of `expertcast bench`."""

    mode: Annotated[tuple[str, ...], Option(choices=WAYS)] = ()
    """Modes to run (default: all)."""
    cache: Annotated[str, Option(choices=("both", "with", "without"))] = "both"
    """Whether experts stay in their slots after their layer."""
    ahead: Count = 1
    """Layers ahead."""
    policies: Annotated[tuple[str, ...], Option(metavar="KIND=P", help=POLICIES_HELP)] = ()
    """Policies of the runs with forecasts; runs on demand keep lru."""
    forecasts: Annotated[str, Option(choices=FORECASTS)] = "auto"
    """Forecasts of the runs: auto (the fastest, or none), always, never."""
    prompt_tokens: tuple[Count, ...] = (1024,)
    """Lengths of the prompts in tokens."""
    settings: Annotated[BenchSettings, Fields(new_tokens=COUNT, repetitions=COUNT)]
    """Amount of measurement."""

    def __post_init__(self) -> None:
        from expertcast.runtime.config import OffloadConfig

        TargetOptions.__post_init__(self)
        self.forecasting(OffloadConfig())

    def forecasting(self, config: OffloadConfig) -> OffloadConfig:
        """Return a configuration with the options that all runs with forecasts share."""
        policies = policies_of(self.policies) if self.policies else None
        return replace(config, policies=policies, forecasts=self.forecasts)


def run(options: Options) -> Outcome:
    """Measure all prompts, one after another."""
    say_if_busy()
    target, link = Target.load(options), None
    prompts: dict[str, Json] = {}
    for tokens in options.prompt_tokens:
        link, prompts[str(tokens)] = bench_prompt(options, target, tokens, link)
    target.store.give_back(torch.device("cpu"))
    result = {
        **target.heading(),
        "new_tokens": options.settings.new_tokens,
        "repetitions": options.settings.repetitions,
        **prompts[str(options.prompt_tokens[0])],
        "prompts": prompts,
    }
    return result, describe(result)


def bench_prompt(options: Options, target: Target, tokens: int, link: Json | None) -> tuple[Json, Json]:
    """Measure all runs on one prompt; return the link and the report.

    Args:
        options: the options of the command.
        target: the model.
        tokens: length of the prompt.
        link: link of earlier prompts, whose speed is kept; None: choose it.
    """
    from expertcast.runtime.benchmarking.bench import decode_resident, measure

    prompt_ids, resident = target.prompt(tokens), None
    if target.store.fits:
        say(f"{tokens} tokens: resident model")
        with target.store.resident():
            resident = decode_resident(target.model, prompt_ids, options.settings.new_tokens)
    link = link or target.link(prompt_ids, options.settings.new_tokens)
    runs = ways(options, target, link)
    measured = measure(target.model, prompt_ids, runs, options.settings, resident=resident, say=say)
    whole = resident and {"tpot_s": statistics.median(resident.steps_s), "ttft_s": resident.ttft_s}
    return link, {
        "prompt_tokens": prompt_ids.shape[1],
        **link,
        "link_rate": measured.link_rate,
        "compared_with": "on_demand" if resident is None else "resident",
        "resident": whole,
        "runs": measured.reports,
    }


def ways(options: Options, target: Target, link: Json) -> dict[str, OffloadConfig]:
    """Return configurations by name: each mode without cache, then with cache (`_cache`).

    Args:
        options: modes and caches to run.
        target: the model.
        link: link of all runs.
    """
    from expertcast.runtime.benchmarking.bench import usual_runs

    trained = options.predictor is not None and is_checkpoint(options.predictor)
    # without a checkpoint recall is unknown: every second layer executes a forecast
    layers, on_demand = None if trained else range(options.ahead, len(target.view), 2), target.config(link)
    runs = usual_runs(replace(on_demand, ahead=options.ahead), options.predictor or DEFAULT_PREDICTOR, layers)
    modes = {name: options.forecasting(config) for name, config in runs.items()} | {"on_demand": on_demand}
    return {
        f"{mode}_cache" if cache else mode: replace(modes[mode], cache=cache)
        for cache in {"both": (False, True), "without": (False,), "with": (True,)}[options.cache]
        for mode in modes
        if not options.mode or mode in options.mode
    }
