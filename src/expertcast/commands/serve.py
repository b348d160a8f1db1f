"""`expertcast serve`: an OpenAI-compatible server for a model with offloaded experts."""

from __future__ import annotations

import importlib.util
import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from expertcast.commands.numbers import not_negative_whole
from expertcast.commands.options import COUNT, DeploymentOptions, Model, Option
from expertcast.commands.output import Outcome, forecast_lines, offload_lines, say
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import format_bytes, install_command

if TYPE_CHECKING:
    from expertcast.runtime.offloading import OffloadedModel

_NEEDS = ("fastapi", "uvicorn", "openai", "rich", "prometheus_client")
"""Packages of the extra `serve`."""
KV_TOKENS = 16384


@dataclass(frozen=True, kw_only=True)
class Options(DeploymentOptions):
    """Options of `expertcast serve`."""

    model: Model
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all addresses of this machine."""
    port: Annotated[int, Option(metavar="N", read=not_negative_whole)] = 8000
    """Port to listen on; 0 chooses a free one."""
    served_name: Annotated[str | None, Option(metavar="NAME")] = None
    """Name of the model for clients (default: MODEL)."""
    api_key: Annotated[str | None, Option(metavar="KEY")] = None
    """Key that clients must send, as `Authorization: Bearer KEY` (default: none is needed)."""
    continuous_batching: bool = False
    """Process many requests at once, batched token by token (default: one after another)."""
    kv_tokens: Annotated[int | None, COUNT] = None
    """With --continuous-batching, tokens in all key-value caches together (default: 16384, on CUDA what fits)."""

    def __post_init__(self) -> None:
        if self.kv_tokens is not None and not self.continuous_batching:
            raise ExpertcastError("--kv-tokens needs --continuous-batching: give that too, or leave --kv-tokens out")


def run(options: Options) -> Outcome:
    """Load the model offloaded and serve it until Ctrl-C or SIGTERM."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ExpertcastError(f"serving needs {', '.join(missing)}: {install_command('serve')}")
    from expertcast.runtime.serving.handlers import MOST_AT_ONCE
    from expertcast.runtime.serving.server import ModelServer, listen

    config = options.configuration()
    if options.continuous_batching and config.draft != "none":
        raise ExpertcastError("--continuous-batching does not draft: leave out --draft or --continuous-batching")
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("expertcast.serving").setLevel(logging.INFO)
    name = options.served_name or options.model
    cache = options.kv_tokens or (KV_TOKENS if options.device_name == "cpu" else None)
    at_once = None
    if options.continuous_batching and cache is not None:
        config, at_once = replace(config, context=max(cache, config.context)), MOST_AT_ONCE
    with ExitStack() as stack:
        listening = stack.enter_context(listen(options.host, options.port))
        tokenizer = options.tokenizer(options.model)
        offloaded = options.offloaded(options.model, config, at_once)
        stack.callback(_close, offloaded)
        server = ModelServer(
            offloaded, tokenizer, name, continuous_batching=options.continuous_batching, kv_tokens=cache,
            api_key=options.api_key,
        )  # fmt: skip
        pool, store = offloaded.pool, offloaded.store
        in_slots = format_bytes(pool.nbytes)
        say(f"{pool.count} of {store.layers * store.experts} experts in slots, {in_slots}")
        for line in offload_lines(offloaded, config):
            say(line)
        server.run(listening, ready=lambda address: say(f"serving {name} on {address}"))
        server.close()
        counts, stats = server.requests.counts, offloaded.stats.as_dict()
    requests, tokens = counts.total(counts.ended), counts.total(counts.generated_tokens)
    result = {"requests": requests, "generated_tokens": tokens, "stats": stats}
    answered = f"answered {requests} requests, {tokens} tokens"
    return result, "\n".join([answered, *forecast_lines({config.mode: result})])


def _close(offloaded: OffloadedModel) -> None:
    """Close an offload; end the process if a forward does not stop, since its thread keeps the model."""
    try:
        offloaded.close()
    except ExpertcastError as error:
        say(f"ending while a forward runs: {error}")
        os._exit(1)
