"""What a user asks for: options of an :class:`OffloadConfig`, by vLLM's own ways.

    vllm serve MODEL --additional-config '{"expertcast": {"memory": "8GB", "predictor": "checkpoint"}}'
    EXPERTCAST_VLLM='{"slots": 512}' vllm serve MODEL
    EXPERTCAST_VLLM=1 vllm serve MODEL                   # every option's default
    EXPERTCAST_VLLM=offload.json vllm serve MODEL        # what OffloadConfig.save wrote

Options in --additional-config win over the environment's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import JsonValue

from expertcast.predictors.artefacts import read_json
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.runtime.config import OffloadConfig

OFFLOAD = "expertcast"
"""Among what vLLM hands to a model's operators."""
STATISTICS = "expertcast_statistics"
"""Method of workers: counters as plain values. `llm.collective_rpc(STATISTICS)` gives each worker's."""
METRICS = "expertcast_metrics"
"""Method of workers: the same as a page for Prometheus."""


VARIABLE = "EXPERTCAST_VLLM"
KEY = "expertcast"
"""In --additional-config."""
SWITCHES = {"": False, "0": False, "false": False, "1": True, "true": True}

_OFFLOAD = (
    "predictor", "slots", "memory", "cache", "bandwidth", "latency", "link", "policies", "overfetch", "forecasts",
    "ahead", "reach", "drift", "store", "store_folder",
)  # fmt: skip
"""Fields of an OffloadConfig that mean something under vLLM."""
_OWN = ("collect", "collect_tokens", "collect_window")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is asked for.

    Raises:
        ExpertcastError: an option that does not exist or does not work under vLLM.
    """

    offload: OffloadConfig
    collect: str | None = None
    """Folder of a trace dataset that live traffic is recorded into."""
    collect_tokens: int = 1_000_000
    """Tokens after which collecting ends."""
    collect_window: int = 1024
    """Tokens of one request at most, its first ones."""

    @classmethod
    def of(cls, additional_config: object) -> Self | None:
        """What vLLM's additional config and the environment ask for; None: nothing."""
        given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
        where = f"--additional-config {KEY}"
        if given is None:
            given, where = os.environ.get(VARIABLE, "").strip(), VARIABLE
        options = _options(given, where)
        return None if options is None else cls.from_dict(options)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """From options by name.

        Raises:
            ExpertcastError: as the class.
        """
        defaults, known = OffloadConfig().as_dict(), (*_OFFLOAD, *_OWN)
        for name, value in options.items():
            if name not in known and name not in defaults:
                raise ExpertcastError(f"unknown option {name!r}: choose from {', '.join(known)}")
            if name not in known and value != defaults[name]:  # a whole file of options names them all
                raise ExpertcastError(
                    f"option {name!r} does nothing under vLLM: leave it out, choose from {', '.join(known)}"
                )
        config = OffloadConfig.from_dict({name: value for name, value in options.items() if name in _OFFLOAD})
        if config.resolved_policies().lossy:
            raise ExpertcastError("lossy policies change what is computed, and under vLLM nothing may: choose others")
        settings = cls(offload=config, **{name: options[name] for name in _OWN if name in options})
        if settings.collect is not None and not isinstance(settings.collect, str):
            raise ExpertcastError(f"collect={settings.collect!r}: give the folder that traces are written to")
        for name in ("collect_tokens", "collect_window"):
            count = getattr(settings, name)
            if not isinstance(count, int) or count < 1:
                raise ExpertcastError(f"{name}={count!r}: give a number of tokens")
        return settings

    def as_dict(self) -> Json:
        """All options by name, as :meth:`from_dict` takes them."""
        offload = {name: value for name, value in self.offload.as_dict().items() if name in _OFFLOAD}
        return offload | {name: getattr(self, name) for name in _OWN}


def _options(given: object, where: str) -> Mapping[str, Any] | None:
    if isinstance(given, str):
        given = SWITCHES.get(given.lower(), given)
    if given is None or given is False:
        return None
    if given is True:
        return {}
    if isinstance(given, str) and not given.startswith("{"):
        return read_json(Path(given), dict[str, JsonValue], "give 1, a JSON object, or what OffloadConfig.save wrote")
    try:
        options = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        options = None
    if not isinstance(options, Mapping):
        raise ExpertcastError(f'{where}: give 1, a JSON object such as {{"slots": 512}}, or a file of such options')
    return options
