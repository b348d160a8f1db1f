"""Servers as processes: started, asked what their experts did and what they hold, and gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from expertcast.predictors import ExpertcastError
from serving_sides.sides import Setting, Side

STARTS_S, ENDS_S = 180.0, 30.0
"""Within which a server answers, and is gone when it is told to end."""
_HITS, _MISSES = "expertcast_expert_hits_total", "expertcast_expert_misses_total"
_LAST_LINES = 3


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    side: Side
    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def counts(self) -> tuple[float, float] | None:
        """Requests of experts that found a slot, and those that did not, since it began; None where all are resident.

        Raises:
            ExpertcastError: the side is to be offloaded, and its page says nothing of experts: it is not.
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

    def resident_bytes(self) -> int:
        """Memory of its processes that is its own."""
        own = psutil.Process(self.process.pid)
        every = [own, *own.children(recursive=True)]
        return sum(each.memory_full_info().uss for each in every if each.is_running())

    def last_lines(self) -> str:
        """What it wrote last."""
        return " / ".join(self.log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:])


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
        server = Running(side, f"http://127.0.0.1:{port}", process, log)
        try:
            _wait_for(server)
            yield server
        finally:
            end(process)


def end(process: subprocess.Popen[bytes], seconds: float = ENDS_S) -> bool:
    """Tell a server to end, and wait until its processes are gone.

    Args:
        process: it, at the head of a session of its own.
        seconds: after which they are killed.

    Returns:
        whether they went by themselves.
    """
    until, children = time.monotonic() + seconds, list[psutil.Process]()
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
    while process.poll() is None or not all(map(_gone, children)):
        if time.monotonic() > until:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False
        time.sleep(0.01)
    return True


def _gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE  # if nobody asks how it ended
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
