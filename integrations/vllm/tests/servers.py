"""vLLM's server in a separate process.

It is started by its module because the command `vllm serve` reads the version of a distribution called vllm, which the
CPU distribution lacks.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import psutil
from engines import REFERENCE
from expertcast_vllm.settings import VARIABLE
from one_run import QUIET
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

NAME = "served"
SECONDS = 150
"""Timeout of a start or an end."""
_SHARED = re.compile(r"\s(/dev/shm/\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Server:
    """A started server."""

    process: subprocess.Popen[bytes]
    url: str
    log_file: Path
    seen: list[psutil.Process] = field(default_factory=list)
    """All processes of the server seen so far."""
    shared: set[str] = field(default_factory=set)
    """Its files in shared memory."""

    def wait(self) -> None:
        """Wait until it answers."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urlopen(self.url + "/health").close()
                return
            except URLError:
                time.sleep(0.3)
        raise AssertionError(self.log())

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the server."""
        main = psutil.Process(self.process.pid)
        found = [main, *main.children(recursive=True)]
        self.seen.extend(each for each in found if each not in self.seen)
        return found

    def named(self, name: str) -> list[psutil.Process]:
        """Return the processes with this text in their title."""
        return [each for each in self.processes() if name in " ".join(each.cmdline())]

    def shared_files(self) -> set[str]:
        """Return the processes' files in shared memory."""
        maps = (Path(f"/proc/{each.pid}/maps").read_text() for each in self.processes())
        self.shared.update(found for text in maps for found in _SHARED.findall(text))
        return self.shared

    def ended(self) -> bool:
        """Return whether all processes have ended after at most :data:`SECONDS`."""
        _, alive = psutil.wait_procs(self.seen, timeout=SECONDS)
        return not alive

    def stop(self) -> None:
        """Terminate it and wait."""
        self.processes()
        self.process.send_signal(signal.SIGTERM)
        assert self.ended(), self.log()

    def log(self) -> str:
        """Return the log."""
        return self.log_file.read_text()


@contextmanager
def serve(
    folder: Path, options: Mapping[str, object] | None, *arguments: str, model: str = REFERENCE,
    temporary: str | None = None,
) -> Iterator[Server]:  # fmt: skip
    """Start a server on the loopback interface.

    Args:
        folder: folder of its log.
        options: options of expertcast; None without expertcast.
        arguments: further options of vLLM.
        model: the model.
        temporary: folder for its temporary files.
    """
    with closing(socket.socket()) as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    environment |= {**QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_PLUGINS": "expertcast"}
    if temporary is not None:
        compiled = Path(default_cache_dir())  # torch's cache, shared with other runs
        compiled.mkdir(exist_ok=True)
        (Path(temporary) / compiled.name).symlink_to(compiled)
        environment["TMPDIR"] = temporary
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--enforce-eager",
        "--max-model-len", "512",
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME,
        "--no-enable-prefix-caching", *arguments,
    ]  # fmt: skip
    if options is not None:
        command += ["--additional-config", json.dumps({"expertcast": options})]
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        server = Server(process, f"http://127.0.0.1:{port}", log)
        try:
            yield server
        finally:
            if process.poll() is None:
                server.shared_files()
                process.kill()
            process.wait()
            for each in server.seen:
                if each.is_running():
                    each.kill()
            for name in server.shared:
                Path(name).unlink(missing_ok=True)
