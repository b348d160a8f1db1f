"""Who is compared: the same model behind transformers' server and vLLM's, resident and offloaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from expertcast.predictors.messages import Json

ONE_BY_ONE, BATCHED, VLLM = SERVERS = ("transformers, one by one", "transformers, batched", "vLLM")
RESIDENT, ON_DEMAND, EXACT = KINDS = ("resident", "on demand", "exact")
_PLUGIN = "/expertcast/metrics"


@dataclass(frozen=True)
class Setting:
    """What all servers have in common."""

    model: Path
    predictor: str
    slots: int
    bandwidth: float
    threads: int
    vllm: str | None = None
    """Python of an environment with vLLM and the plug-in."""


@dataclass(frozen=True)
class Side:
    """One server: its command without the port, and its environment beside this process's."""

    server: str
    kind: str
    command: Sequence[str]
    environment: Json = field(default_factory=dict)
    metrics: str | None = None
    """Route of its page that says what its experts did; None: they are resident."""

    @property
    def name(self) -> str:
        """In tables."""
        return f"{self.server}: {self.kind}"

    @property
    def like(self) -> str:
        """The resident side whose texts it must give."""
        return f"{self.server}: {RESIDENT}"


def sides(setting: Setting) -> list[Side]:
    """All that can run here, resident ones first."""
    model, found = str(setting.model), list[Side]()
    offload = ["--slots", str(setting.slots), "--bandwidth", str(setting.bandwidth)]
    own = [sys.executable, "-m", "expertcast.cli", "serve", model, "--dtype", "fp32", *offload]
    theirs = [sys.executable, "-m", "transformers.cli.transformers", "serve", model, "--device", "cpu"]
    theirs += ["--dtype", "float32"]
    for server, own_options, their_options in (
        (ONE_BY_ONE, [], []),
        (BATCHED, ["--continuous-batching", "--kv-tokens", "16384"],
         ["--continuous-batching", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "1024"]),
    ):  # fmt: skip
        forecasts = ["--predictor", setting.predictor]
        found += [
            Side(server, RESIDENT, [*theirs, *their_options]),
            Side(server, ON_DEMAND, [*own, *own_options], metrics="/metrics"),
            Side(server, EXACT, [*own, *own_options, *forecasts], metrics="/metrics"),
        ]
    return found if setting.vllm is None else [*found, *_vllm(setting, setting.vllm)]


def chosen(every: Sequence[Side], words: Sequence[str]) -> list[Side]:
    """Those with any of these words in their name, and the resident sides that they are compared with; all without
    words."""
    named = [side for side in every if not words or any(word in side.name for word in words)]
    return [side for side in every if side in named or any(side.name == one.like for one in named)]


def place(name: str) -> tuple[int, int]:
    """Where a side stands in tables."""
    server, _, kind = name.rpartition(": ")
    return SERVERS.index(server), KINDS.index(kind)


def _vllm(setting: Setting, python: str) -> list[Side]:
    served = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(setting.model), "--dtype", "float32"]
    # without the last it kills its engine at once when it is told to end
    served += ["--max-model-len", "1024", "--enforce-eager", "--shutdown-timeout", "10"]
    cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
           "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
    options = {"slots": setting.slots, "bandwidth": setting.bandwidth}
    exact = {**options, "predictor": setting.predictor}
    plugin = {**cpu, "VLLM_PLUGINS": "expertcast"}
    return [
        Side(VLLM, RESIDENT, served, {**cpu, "EXPERTCAST_VLLM": "0"}),
        Side(VLLM, ON_DEMAND, served, {**plugin, "EXPERTCAST_VLLM": json.dumps(options)}, _PLUGIN),
        Side(VLLM, EXACT, served, {**plugin, "EXPERTCAST_VLLM": json.dumps(exact)}, _PLUGIN),
    ]
