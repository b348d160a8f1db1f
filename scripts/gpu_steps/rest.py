"""Step 5: what can wait. A cache, longer prompts, speculation, accelerate as peer, and training an estimator."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch

from expertcast.commands.bench import Prompt, bench_prompt, peer
from expertcast.data.models import load_tokenizer
from expertcast.data.online import OnlineTraces
from expertcast.data.plan import TextOptions
from expertcast.data.text import Document
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.runtime.benchmarking.shapes import build_shape
from expertcast.training.fit import fit
from gpu_steps.day import Day
from gpu_steps.rows import build, cut, identical, options_of, shape_of

MOST_LAYERS = 24
"""So that several prompts and accelerate fit the time."""
FULL = ("--prompt-tokens", "1024", "4096", "16384", "--new-tokens", "32", "--repetitions", "3", "--no-advice")
SMALL = ("--prompt-tokens", "8", "16", "--new-tokens", "3", "--repetitions", "1", "--no-advice")
PEER_S, TRAINING_S = 60, 150
"""Kept back for them; the small form keeps nothing back."""
TOKENS, SMALL_TOKENS = 40_000, 1_500
DOCUMENT = 512
"""Tokens of a random document."""


def run(day: Day) -> bool:
    """One after another, each kept as it is found; what there is no time for is named."""
    reserve = 0 if day.small else PEER_S + TRAINING_S
    found = cut(day, day.left() - reserve, None if day.small else MOST_LAYERS)
    words = SMALL if day.small else FULL
    options = options_of(day, found.layers, *words)
    target, built = build(options)
    day.save(
        bench=" ".join(words),
        fewer_layers_because=found.because,
        left_out=[],
        **built,
        shape=target.view.shape.as_dict(),
    )
    prompts: list[Prompt] = []
    last = 0.0
    for tokens in options.prompt_tokens:
        if prompts and day.left() < reserve + 2 * last:
            day.save(left_out=[*day.result["left_out"], f"{tokens} tokens"])
            continue
        start = time.monotonic()
        prompts.append(bench_prompt(options, target, tokens, prompts[0].link if prompts else None))
        last = time.monotonic() - start
        day.save(prompts={str(prompt.ids.shape[1]): prompt.as_dict() for prompt in prompts})
    passed = all(identical(prompt.as_dict()) for prompt in prompts)
    target.store.give_back(torch.device("cpu"))
    if day.small or day.left() > reserve:
        found_peer = peer(options, target, prompts[0])
        day.save(peer=found_peer)
        passed = passed and found_peer.get("identical") is not False
    else:
        day.save(left_out=[*day.result["left_out"], "accelerate"])
    del target, prompts
    if day.small or day.left() > TRAINING_S:
        day.save(training=train(day))
    else:
        day.save(left_out=[*day.result["left_out"], "training"])
    return bool(passed)


def train(day: Day) -> dict[str, Any]:
    """Fit an estimator of the shape online, over random weights and text: its time, not its recall, means something."""
    count = SMALL_TOKENS if day.small else TOKENS
    config = EstimatorConfig(parameters=20_000, steps=20, step_tokens=128) if day.small else EstimatorConfig()
    start = time.monotonic()
    model = training_model(day)
    built = time.monotonic()
    tokenizer = load_tokenizer("reference")
    source = OnlineTraces(model, tokenizer, random_text(tokenizer, count), TextOptions())
    fitted = fit("estimator", source, config=config)
    return {
        "layers": source.view.shape.layers,
        "tokens": source.token_count("train"),
        "config": asdict(config),
        "build_s": built - start,
        "fit_s": time.monotonic() - built,
        "report": fitted.report,
    }


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
