"""Servers to compare: their commands, and how to start, query and end them."""

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json

ONE_BY_ONE, BATCHED, VLLM = SERVERS = ("transformers, one by one", "transformers, batched", "vLLM")
RESIDENT, ON_DEMAND, EXACT = KINDS = ("resident", "on demand", "exact")
_PLUGIN = "/expertcast/metrics"


@dataclass(frozen=True)
class Setting:
    """Common settings of all servers."""

    model: Path
    predictor: str
    slots: int
    bandwidth: float
    threads: int
    vllm: str | None = None
    """Interpreter of an environment with vLLM and the plug-in."""


@dataclass(frozen=True)
class Side:
    """One server: its command without the port, and additional environment variables."""

    server: str
    kind: str
    command: Sequence[str]
    environment: Json = field(default_factory=dict)
    metrics: str | None = None
    """Route of its Prometheus page; None for resident experts."""

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"{self.server}: {self.kind}"

    @property
    def like(self) -> str:
        """Resident side with the expected texts."""
        return f"{self.server}: {RESIDENT}"


def sides(setting: Setting) -> list[Side]:
    """Return all sides that can run here."""
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
    """Return the sides whose name contains one of the words, with their resident sides; all without words."""
    named = [side for side in every if not words or any(word in side.name for word in words)]
    return [side for side in every if side in named or any(side.name == one.like for one in named)]


def place(name: str) -> tuple[int, int]:
    """Return a side's position in tables."""
    server, _, kind = name.rpartition(": ")
    return SERVERS.index(server), KINDS.index(kind)


def _vllm(setting: Setting, python: str) -> list[Side]:
    served = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(setting.model), "--dtype", "float32"]
    # without --shutdown-timeout it kills its engine at once
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


STARTS_S, ENDS_S = 180.0, 30.0
"""Time limits for a server's start and end."""
_HITS, _MISSES = "expertcast_expert_hits_total", "expertcast_expert_misses_total"
_LAST_LINES = 3


@dataclass(frozen=True)
class Running:
    """A running server."""

    side: Side
    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def counts(self) -> tuple[float, float] | None:
        """Return expert hits and misses since the start; None for resident experts.

        Raises:
            ExpertcastError: the page has no expert counts, so nothing is offloaded.
        """
        side = self.side
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
        return hits, misses

    def last_lines(self) -> str:
        """Return the end of its log."""
        return " / ".join(self.log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:])


@contextmanager
def running(side: Side, setting: Setting, log: Path) -> Iterator[Running]:
    """Run a side's server inside this context.

    Raises:
        ExpertcastError: the server ended before it answered, or did not answer in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": str(setting.threads), **side.environment}
    if side.command[0] == setting.vllm:
        environment.pop("PYTHONPATH", None)  # that environment has its own packages
    with log.open("wb") as lines:
        process = subprocess.Popen(
            [*side.command, "--port", str(port)], env=environment, stdout=lines, stderr=lines, start_new_session=True
        )
        server = Running(side, f"http://127.0.0.1:{port}", process, log)
        try:
            _wait_for(server)
            yield server
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server, the leader of its own session, with SIGTERM, and its processes after `ENDS_S` with SIGKILL."""
    until, children = time.monotonic() + ENDS_S, list[psutil.Process]()
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
    while process.poll() is None or not all(map(_gone, children)):
        if time.monotonic() > until:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return
        time.sleep(0.01)


def _gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE  # a zombie was not waited for
    except psutil.NoSuchProcess:
        return True


def _wait_for(server: Running) -> None:
    until = time.monotonic() + STARTS_S
    while True:
        try:
            with urllib.request.urlopen(f"{server.address}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if server.process.poll() is not None or time.monotonic() > until:
                raise ExpertcastError(f"{server.side.name} does not answer: {server.last_lines()}") from None
            time.sleep(0.1)
