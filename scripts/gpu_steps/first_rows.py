"""Step 4: the rows that decide first. No cache, one prompt: on demand, and forecasts right always and 9 times in 10."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from expertcast.commands.bench import bench_prompt
from expertcast.commands.options import Given
from gpu_steps.day import Day
from gpu_steps.rows import build, cut, identical, options_of

ACCURACIES = (1.0, 0.9)
WORDS = ("--cache", "without", "--mode", "on_demand", "exact", "--no-advice")
FULL = ("--prompt-tokens", "1024", "--new-tokens", "32", "--repetitions", "3")
SMALL = ("--prompt-tokens", "8", "--new-tokens", "4", "--repetitions", "1")


def run(day: Day) -> bool:
    """Build the shape once, and decode with each accuracy; a row is kept as soon as it is measured."""
    found = cut(day, day.left())
    words = (*WORDS, *(SMALL if day.small else FULL))
    options = options_of(day, found.layers, *words)
    target, built = build(options)
    day.save(bench=" ".join(words), fewer_layers_because=found.because, **built)
    link, rows = None, dict[str, Any]()
    for accuracy in ACCURACIES:
        chosen = replace(options, process=Given({"accuracy": accuracy}))
        prompt = bench_prompt(chosen, replace(target, options=chosen), options.prompt_tokens[0], link)
        link = prompt.link
        rows[f"{accuracy:g}"] = prompt.as_dict()
        day.save(rows=rows)
    return all(map(identical, rows.values()))
