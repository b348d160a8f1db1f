"""Step 5: what can wait. A cache, longer prompts, speculation, the other link, accelerate, training an estimator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from expertcast.commands.bench import Options, Prompt, bench_prompt, peer
from expertcast.commands.bench_target import Target
from expertcast.data.models import load_tokenizer
from expertcast.data.online import OnlineTraces
from expertcast.data.plan import TextOptions
from expertcast.data.text import Document
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.runtime.benchmarking.shapes import build_shape
from expertcast.training.fit import fit
from gpu_steps.bits import graph_steps
from gpu_steps.day import Day
from gpu_steps.rows import build, cut, identical, options_of, shape_of

MOST_LAYERS = 24
"""So that several prompts and accelerate fit the time."""
FULL = ("--prompt-tokens", "1024", "4096", "16384", "--new-tokens", "32", "--repetitions", "3", "--no-advice")
SMALL = ("--prompt-tokens", "8", "16", "--new-tokens", "3", "--repetitions", "1", "--no-advice")
OTHER_LINK = ("--cache", "without", "--mode", "on_demand", "exact", "--link")
PEER_S, TRAINING_S, LINK_S = 60, 150, 30
"""Kept back for them, in the full form."""
TOKENS, SMALL_TOKENS = 40_000, 1_500
DOCUMENT = 512
"""Tokens of a random document."""


def run(day: Day) -> bool:
    """One after another, each kept as it is found; what there is no time for is named in `left_out`."""
    day.save(left_out=[])
    passed = day.attempt("rows", lambda: offloaded(day))
    if enough(day, "training", TRAINING_S):
        passed = day.attempt("training", lambda: train(day)) and passed
    return passed


def offloaded(day: Day) -> bool:
    """All that runs on one shape with its experts in host memory."""
    reserve = 0 if day.small else PEER_S + TRAINING_S
    found = cut(day, day.left() - reserve, None if day.small else MOST_LAYERS)
    words = SMALL if day.small else FULL
    options = options_of(day, found.layers, *words)
    target, built = build(options)
    day.save(bench=" ".join(words), fewer_layers_because=found.because, **built)
    prompts, passed = run_prompts(day, options, target, reserve)
    if enough(day, "the other link", reserve + LINK_S):
        passed = day.attempt("other_link", lambda: other_link(day, target, words)) and passed
    target.store.give_back(torch.device("cpu"))
    if enough(day, "accelerate", reserve):
        passed = day.attempt("peer", lambda: accelerate(day, options, target, prompts[0])) and passed
    return passed


def enough(day: Day, what: str, seconds: float) -> bool:
    """Whether so much time is left; else `what` is left out. The small form has none to save."""
    if day.small or day.left() > seconds:
        return True
    day.save(left_out=[*day.result["left_out"], what])
    return False


def run_prompts(day: Day, options: Options, target: Target, reserve: float) -> tuple[list[Prompt], bool]:
    """All ways of running on each prompt, the next one only if twice the last one's time is left beside the reserve.

    Args:
        day: whose time counts.
        options: with the prompts' lengths.
        target: what is measured.
        reserve: seconds kept for what comes after.

    Returns:
        The prompts, and whether every run decoded the bits that it must.
    """
    prompts: list[Prompt] = []
    last = 0.0
    for tokens in options.prompt_tokens:
        if prompts and not enough(day, f"{tokens} tokens", reserve + 2 * last):
            continue
        start = time.monotonic()
        prompts.append(bench_prompt(options, target, tokens, prompts[0].link if prompts else None))
        last = time.monotonic() - start
        day.save(prompts={str(prompt.ids.shape[1]): prompt.as_dict() for prompt in prompts})
    return prompts, all(identical(prompt.as_dict()) for prompt in prompts)


def other_link(day: Day, target: Target, words: Sequence[str]) -> bool:
    """The shortest prompt over the other link (the CPU's is no kernel), and decode steps as a graph, with a cache.

    Args:
        day: that keeps what is found.
        target: what is measured.
        words: the options so far.
    """
    assert target.options.layers is not None
    options = options_of(day, target.options.layers, *words, *OTHER_LINK, "instant" if day.small else "kernel")
    tokens = options.prompt_tokens[0]
    prompt = bench_prompt(options, replace(target, options=options), tokens, None)
    day.save(other_link=prompt.as_dict())
    slots = target.store.layers * target.store.experts // 4
    graph = graph_steps(target.model, prompt.ids, options.settings.new_tokens, store=target.store, slots=slots)
    day.save(graph={"slots": slots, **graph})
    return identical(prompt.as_dict()) and bool(graph.get("same_tokens", True))


def accelerate(day: Day, options: Options, target: Target, prompt: Prompt) -> bool:
    """The first prompt under accelerate's offload, with as much memory as the cached runs had.

    Args:
        day: that keeps what is found.
        options: of the runs.
        target: whose store has been given back.
        prompt: with its runs.
    """
    day.save(peer=peer(options, target, prompt))
    return day.result["peer"].get("identical") is not False


def train(day: Day) -> bool:
    """Fit an estimator of the shape online, over random weights and text: its time, not its recall, means something."""
    count = SMALL_TOKENS if day.small else TOKENS
    config = EstimatorConfig(parameters=20_000, steps=20, step_tokens=128) if day.small else EstimatorConfig()
    start = time.monotonic()
    model = training_model(day)
    built = time.monotonic()
    tokenizer = load_tokenizer("reference")
    source = OnlineTraces(model, tokenizer, random_text(tokenizer, count), TextOptions())
    fitted = fit("estimator", source, config=config)
    day.save(
        training={
            "layers": source.view.shape.layers,
            "tokens": source.token_count("train"),
            "config": asdict(config),
            "build_s": built - start,
            "fit_s": time.monotonic() - built,
            "report": fitted.report,
        }
    )
    return True


def training_model(day: Day) -> Any:
    """The whole shape where it computes, or half of it where memory is short."""
    name = shape_of(day)
    if day.small:
        return build_shape(name, layers=2)
    torch.cuda.empty_cache()
    try:
        return build_shape(name, device=day.device)
    except ExpertcastError:
        return build_shape(name, layers=MOST_LAYERS, device=day.device)


def random_text(tokenizer: Any, tokens: int) -> list[Document]:
    """Documents of random tokens, about as many as asked for."""
    generator = torch.Generator().manual_seed(0)
    documents = []
    for index in range(-(-tokens // DOCUMENT)):
        ids = torch.randint(len(tokenizer), (DOCUMENT,), generator=generator).tolist()
        documents.append(Document(index, tokenizer.decode(ids, skip_special_tokens=True)))
    return documents
