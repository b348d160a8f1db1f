"""`expertcast serve`: an OpenAI server over a model whose experts are offloaded."""

from __future__ import annotations

import importlib.util
import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated

from expertcast.commands.deployment import DeploymentOptions, WarmOptions
from expertcast.commands.generate_text import held
from expertcast.commands.numbers import not_negative_whole
from expertcast.commands.options import COUNT, Model, Option
from expertcast.commands.output import Outcome, say
from expertcast.data.models import load_tokenizer
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import size_text
from expertcast.runtime.drafts.names import NONE
from expertcast.runtime.loading import load_offloaded
from expertcast.runtime.offloading import OffloadedModel

_NEEDS = ("fastapi", "uvicorn", "openai", "rich", "prometheus_client")
"""Packages of the extra."""
KV_TOKENS = 16384


@dataclass(frozen=True, kw_only=True)
class Options(WarmOptions, DeploymentOptions):
    """What `expertcast serve` takes."""

    model: Model
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of this machine's."""
    port: Annotated[int, Option(metavar="N", read=not_negative_whole)] = 8000
    """Port to listen on; 0 finds a free one."""
    served_name: Annotated[str | None, Option(metavar="NAME")] = None
    """What clients call the model (default: MODEL)."""
    continuous_batching: bool = False
    """Take many requests at once, batched token by token (default: one after the other)."""
    kv_tokens: Annotated[int | None, COUNT] = None
    """With continuous batching, tokens that all requests' caches have room for (default: 16384, on CUDA what fits)."""

    def __post_init__(self) -> None:
        if self.kv_tokens is not None and not self.continuous_batching:
            raise ExpertcastError("--kv-tokens is of continuous batching: give --continuous-batching, or leave it out")


def run(options: Options) -> Outcome:
    """Load the model offloaded and serve it until Ctrl-C or SIGTERM."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ExpertcastError(f"serving needs {', '.join(missing)}: pip install 'expertcast[serve]'")
    from expertcast.runtime.serving.server import ModelServer, listen

    config, prompts = options.configuration(), options.prompts()
    if options.continuous_batching and config.draft != NONE:
        raise ExpertcastError("batches are written without a draft: leave --draft or --continuous-batching out")
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("expertcast.serving").setLevel(logging.INFO)
    name = options.served_name or options.model
    cache = options.kv_tokens or (KV_TOKENS if options.device_name == "cpu" else None)
    with ExitStack() as stack:
        listening = stack.enter_context(listen(options.host, options.port))
        given = options.passed_on(options.model)
        tokenizer = load_tokenizer(options.model, **given)
        offloaded = load_offloaded(options.model, config, device=options.device_name, dtype=options.dtype, **given)
        stack.callback(_close, offloaded)
        for line in stack.enter_context(options.warmed(offloaded, tokenizer, prompts)):
            say(line)
        server = ModelServer(
            offloaded, tokenizer, name, continuous_batching=options.continuous_batching, kv_tokens=cache
        )
        where = held(offloaded)
        say(f"{where['slots']} of {where['experts']} experts in slots, {size_text(where['device_bytes'])}")
        server.run(listening, ready=lambda address: say(f"serving {name} on {address}"))
        server.close()
        counts, stats = server.requests.counts, offloaded.stats.as_dict()
    requests, tokens = counts.total(counts.ended), counts.total(counts.generated_tokens)
    result = {"requests": requests, "generated_tokens": tokens, "stats": stats}
    return result, f"answered {requests} requests, {tokens} tokens"


def _close(offloaded: OffloadedModel) -> None:
    """Close it; end the process where a forward would not stop, for its thread keeps the model."""
    try:
        offloaded.close()
    except ExpertcastError as error:
        say(f"ending with a forward under way: {error}")
        os._exit(1)
