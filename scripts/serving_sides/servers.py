"""Servers as processes: the same model behind transformers' server and vLLM's, resident and offloaded."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from expertcast.predictors import ExpertcastError
from expertcast.predictors.plain import Json

STARTS_S, ENDS_S = 180.0, 30.0
"""Within which a server answers, and is gone when it is told to end."""
_PLUGIN = "/expertcast/metrics"
_HITS, _MISSES = "expertcast_expert_hits_total", "expertcast_expert_misses_total"


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

    name: str
    like: str
    """The resident side whose texts it must give."""
    command: Sequence[str]
    environment: Json = field(default_factory=dict)
    metrics: str | None = None
    """Route of its page that says what its experts did; None: they are resident."""


def sides(setting: Setting) -> list[Side]:
    """All that can run here, resident ones first."""
    found, model = list[Side](), str(setting.model)
    offload = ["--slots", str(setting.slots), "--bandwidth", str(setting.bandwidth)]
    own = [sys.executable, "-m", "expertcast.cli", "serve", model, "--dtype", "fp32", *offload]
    theirs = [sys.executable, "-m", "transformers.cli.transformers", "serve", model, "--device", "cpu"]
    theirs += ["--dtype", "float32"]
    for mode, own_options, their_options in (
        ("one by one", [], []),
        ("batched", ["--continuous-batching", "--kv-tokens", "16384"],
         ["--continuous-batching", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "1024"]),
    ):  # fmt: skip
        resident = f"transformers, {mode}: resident"
        found += [
            Side(resident, resident, [*theirs, *their_options]),
            Side(f"transformers, {mode}: on demand", resident, [*own, *own_options], metrics="/metrics"),
            Side(f"transformers, {mode}: exact", resident, [*own, *own_options, "--predictor", setting.predictor],
                 metrics="/metrics"),
        ]  # fmt: skip
    if setting.vllm is None:
        return found
    served = [setting.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "float32"]
    served += ["--max-model-len", "1024", "--enforce-eager"]
    cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
           "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
    resident, options = "vLLM: resident", {"slots": setting.slots, "bandwidth": setting.bandwidth}
    plugin = {**cpu, "VLLM_PLUGINS": "expertcast"}
    exact = {**options, "predictor": setting.predictor}
    return [
        *found,
        Side(resident, resident, served, {**cpu, "EXPERTCAST_VLLM": "0"}),
        Side("vLLM: on demand", resident, served, {**plugin, "EXPERTCAST_VLLM": json.dumps(options)}, _PLUGIN),
        Side("vLLM: exact", resident, served, {**plugin, "EXPERTCAST_VLLM": json.dumps(exact)}, _PLUGIN),
    ]


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    address: str
    process: psutil.Process

    def hit_rate(self, side: Side) -> float | None:
        """Share of the requests of experts that found a slot; None where all are resident.

        Raises:
            ExpertcastError: the side is to be offloaded, and its page says nothing of experts: it is not.
        """
        if side.metrics is None:
            return None
        try:
            with urllib.request.urlopen(self.address + side.metrics, timeout=30) as page:
                lines = page.read().decode().splitlines()
        except urllib.error.URLError as error:
            raise ExpertcastError(f"{side.name}: no {side.metrics}, so nothing is offloaded: {error}") from error
        hits, misses = (
            sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)) for name in (_HITS, _MISSES)
        )
        if not hits + misses:
            raise ExpertcastError(f"{side.name}: its page counts no experts, so nothing is offloaded")
        return hits / (hits + misses)

    def resident_bytes(self) -> int:
        """Memory of its processes that is its own."""
        every = [self.process, *self.process.children(recursive=True)]
        return sum(each.memory_full_info().uss for each in every if each.is_running())


@contextmanager
def running(side: Side, setting: Setting, log: Path) -> Iterator[Running]:
    """A side's server; it is gone behind the block.

    Raises:
        ExpertcastError: it ended before it answered, or did not answer in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": str(setting.threads), **side.environment}
    if side.command[0] == setting.vllm:
        environment.pop("PYTHONPATH", None)  # it has its own packages
    with log.open("wb") as lines:
        process = subprocess.Popen(
            [*side.command, "--port", str(port)], env=environment, stdout=lines, stderr=lines, start_new_session=True
        )
        try:
            address = f"http://127.0.0.1:{port}"
            _answering(address, process, side, log)
            yield Running(address, psutil.Process(process.pid))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(ENDS_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _answering(address: str, process: subprocess.Popen[bytes], side: Side, log: Path) -> None:
    until = time.monotonic() + STARTS_S
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if process.poll() is not None or time.monotonic() > until:
                last = log.read_text(errors="replace").strip().splitlines()[-3:]
                raise ExpertcastError(f"{side.name} does not answer: {' / '.join(last)}") from None
            time.sleep(0.1)
