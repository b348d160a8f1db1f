"""`expertcast serve`: an OpenAI server over a model whose experts are offloaded."""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from expertcast.commands.deployment import DeploymentOptions
from expertcast.commands.generate_text import held
from expertcast.commands.options import COUNT, Model, Option, not_negative_whole
from expertcast.commands.output import Outcome, new_file, say
from expertcast.data.models import load_tokenizer
from expertcast.predictors import ExpertcastError
from expertcast.predictors.plain import size_text
from expertcast.runtime.loading import load_offloaded

if TYPE_CHECKING:
    from expertcast.runtime.serving.hot_experts import HotExperts

_NEEDS = ("fastapi", "uvicorn", "openai", "rich", "prometheus_client")
"""Packages of the extra."""
KV_TOKENS = 16384


@dataclass(frozen=True, kw_only=True)
class Options(DeploymentOptions):
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
    warm: Annotated[Path | None, Option(metavar="FILE")] = None
    """Prompts to run before the first request, so that slots hold what they use: one per line, or .jsonl."""
    hot_experts: Annotated[Path | None, Option(metavar="FILE", read=new_file)] = None
    """Fill slots with the experts that were used most in the last run, and write them there at the end."""

    def __post_init__(self) -> None:
        if self.kv_tokens is not None and not self.continuous_batching:
            raise ExpertcastError("--kv-tokens is of continuous batching: give --continuous-batching, or leave it out")


def run(options: Options) -> Outcome:
    """Load the model offloaded and serve it until Ctrl-C or SIGTERM."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ExpertcastError(f"serving needs {', '.join(missing)}: pip install 'expertcast[serve]'")
    from expertcast.runtime.serving.hot_experts import HotExperts  # only here: other commands do without the packages
    from expertcast.runtime.serving.server import ModelServer, listen
    from expertcast.runtime.serving.warm import prepare, read_prompts

    config = options.configuration()
    prompts = [] if options.warm is None else read_prompts(options.warm)
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("expertcast.serving").setLevel(logging.INFO)
    name = options.served_name or options.model
    with listen(options.host, options.port) as listening:
        tokenizer = load_tokenizer(options.model)
        offloaded = load_offloaded(options.model, config, device=options.device_name, dtype=options.dtype)
        hot = None if options.hot_experts is None else HotExperts(options.hot_experts, offloaded)
        for line in prepare(offloaded, tokenizer, prompts, hot):
            say(line)
        cache = options.kv_tokens or (KV_TOKENS if options.device_name == "cpu" else None)
        server = ModelServer(
            offloaded, tokenizer, name, continuous_batching=options.continuous_batching, kv_tokens=cache
        )
        where = held(offloaded)
        say(f"{where['slots']} of {where['experts']} experts in slots, {size_text(where['device_bytes'])}")
        server.run(listening, ready=lambda address: say(f"serving {name} on {address}"))
        requests, tokens = sum(server.requests.counts.ended.values()), server.requests.counts.generated_tokens
        stats = offloaded.stats.as_dict()
        stopped = server.close()
        if hot is not None:
            _keep(hot)
        if not stopped:
            say("a generation did not stop in time: ending without it")
            os._exit(1)
        offloaded.close()
    result = {"requests": requests, "generated_tokens": tokens, "stats": stats}
    return result, f"answered {requests} requests, {tokens} tokens"


def _keep(hot: HotExperts) -> None:
    try:
        hot.save()
    except ExpertcastError as error:
        say(f"hot experts are not kept: {error}")
