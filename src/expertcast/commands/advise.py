"""`expertcast advise`: whether prefetching pays here, and the configuration that follows from it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from expertcast.commands.bench_target import Target, TargetOptions
from expertcast.commands.options import Count, Option
from expertcast.commands.output import Outcome, new_file, say
from expertcast.predictors import ExpertcastError
from expertcast.runtime.advising.advise import advise
from expertcast.runtime.benchmarking.bench import BenchSettings


@dataclass(frozen=True, kw_only=True)
class Options(TargetOptions):
    """What `expertcast advise` takes.

    Raises:
        ExpertcastError: as the class that it extends; too few tokens; a process, which has no predictor to save.
    """

    prompt_tokens: Count = 64
    """Length of the prompt."""
    new_tokens: Count = 32
    """Tokens decoded per run."""
    save: Annotated[Path | None, Option(metavar="FILE", read=new_file)] = None
    """Write what is advised there, for `expertcast generate --config`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        BenchSettings(new_tokens=self.new_tokens)
        if self.save is not None and self.routing is not None:
            raise ExpertcastError("--save needs a model that routes by itself: a process has no predictor to deploy")


def run(options: Options) -> Outcome:
    """Short runs on demand and with forecasts, and what they lead to."""
    target = Target.load(options)
    prompt_ids = target.prompt(options.prompt_tokens)
    process = target.routing_process(options.prompt_tokens, options.new_tokens)
    with process if process is not None else nullcontext():
        link = target.link(prompt_ids, options.new_tokens)
        config = target.config(link)
        say("short runs, on demand and with forecasts")
        predictors = [target.forecaster(process)]
        advice = advise(target.model, prompt_ids, config, predictors=predictors, new_tokens=options.new_tokens)
    result = {**target.heading(process), **link.as_dict(), **advice.as_dict()}
    text = f"{options.target}, routing: {result['routing']}\n{advice.text()}"
    if options.save is not None:
        chosen = replace(advice.config(config), slots=advice.slots, memory=None, store="memory")
        chosen.save(options.save)
        text += f"\nwrote {options.save}"
    return result, text
