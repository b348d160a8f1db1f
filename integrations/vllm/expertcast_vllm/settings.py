"""Options of the plug-in: fields of an :class:`OffloadConfig` plus options for collecting traffic.

    vllm serve MODEL --additional-config '{"expertcast": {"memory": "8GB", "predictor": "checkpoint"}}'
    EXPERTCAST_VLLM='{"slots": 512}' vllm serve MODEL
    EXPERTCAST_VLLM=1 vllm serve MODEL                   # every option's default
    EXPERTCAST_VLLM=offload.json vllm serve MODEL        # a file of OffloadConfig.save

Options in --additional-config override the environment's.
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
"""Key of the offload in vLLM's forward context."""
STATISTICS = "expertcast_statistics"
"""Worker method that returns its counters as plain values: `llm.collective_rpc(STATISTICS)`."""
METRICS = "expertcast_metrics"
"""Worker method that returns its counters as a Prometheus page."""


VARIABLE = "EXPERTCAST_VLLM"
KEY = "expertcast"
"""Key in --additional-config."""
SWITCHES = {"": False, "0": False, "false": False, "1": True, "true": True}

_OFFLOAD = (
    "predictor", "slots", "memory", "cache", "bandwidth", "latency", "link", "policies", "forecasts", "ahead",
    "store", "store_folder",
)  # fmt: skip
"""Supported fields of an OffloadConfig."""
_OWN = ("collect", "collect_tokens", "collect_window")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of the plug-in.

    Raises:
        ExpertcastError: an option is unknown, invalid or has no effect under vLLM.
    """

    offload: OffloadConfig
    collect: str | None = None
    """Folder of the trace dataset that records live traffic; None for no recording."""
    collect_tokens: int = 100_000
    """Total tokens to collect: 22 GB at 48 layers, 128 experts and a hidden size of 2048."""
    collect_window: int = 1024
    """Number of first tokens to collect per request."""

    @classmethod
    def of(cls, additional_config: object) -> Self | None:
        """Read the options from vLLM's additional config or else from the environment; None if neither has any.

        Raises:
            ExpertcastError: as for the class.
        """
        given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
        where = f"--additional-config {KEY}"
        if given is None:
            given, where = os.environ.get(VARIABLE, "").strip(), VARIABLE
        options = _options(given, where)
        return None if options is None else cls.from_dict(options)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Create settings from options by name.

        Raises:
            ExpertcastError: as for the class.
        """
        defaults, known = OffloadConfig().as_dict(), (*_OFFLOAD, *_OWN)
        for name, value in options.items():
            if name not in known and name not in defaults:
                raise ExpertcastError(f"unknown option {name!r}: choose from {', '.join(known)}")
            if name not in known and value != defaults[name]:  # a saved OffloadConfig names all options
                raise ExpertcastError(
                    f"option {name!r} has no effect under vLLM: leave it out, or choose from {', '.join(known)}"
                )
        config = OffloadConfig.from_dict({name: value for name, value in options.items() if name in _OFFLOAD})
        if config.resolved_policies().lossy:
            raise ExpertcastError("lossy policies are not supported under vLLM: choose exact ones")
        settings = cls(offload=config, **{name: options[name] for name in _OWN if name in options})
        if settings.collect is not None and not isinstance(settings.collect, str):
            raise ExpertcastError(f"collect={settings.collect!r} is not a folder's name: use a string")
        for name in ("collect_tokens", "collect_window"):
            count = getattr(settings, name)
            if not isinstance(count, int) or count < 1:
                raise ExpertcastError(f"{name}={count!r} is out of range: use 1 or more tokens")
        return settings

    def as_dict(self) -> Json:
        """Return all options by name, as :meth:`from_dict` takes them."""
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
        return read_json(Path(given), dict[str, JsonValue], "use 1, a JSON object, or a file of OffloadConfig.save")
    try:
        options = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        options = None
    if not isinstance(options, Mapping):
        raise ExpertcastError(f'{where}: no options found: use 1, JSON such as {{"slots": 512}}, or a file of options')
    return options
