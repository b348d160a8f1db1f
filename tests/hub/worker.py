"""Runs commands and code, one after the other, in a process whose huggingface_hub knows another hub.

huggingface_hub reads its environment when it is imported, and importing everything takes seconds: so one process takes
many commands. A line of JSON in, `{"argv": [...]}` or `{"code": "..."}`, with `env` to change; a line of JSON out.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Done:
    """What a command or code left."""

    status: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line of a command that was refused."""
        assert self.status == 2, self
        lines = [line for line in self.err.strip().splitlines() if line.startswith("expertcast: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0]


class Worker:
    """The process, seen from the tests."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hub.worker", str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, **env}, cwd=Path(__file__).resolve().parents[2],
        )  # fmt: skip

    def run(self, *argv: str, token: str = "") -> Done:
        """A command of expertcast; with a token the user is logged in."""
        return self._ask({"argv": argv, "env": {"HF_TOKEN": token}})

    def code(self, text: str, token: str = "") -> Done:
        """Python, as a script would run it."""
        return self._ask({"code": text, "env": {"HF_TOKEN": token}})

    def _ask(self, request: dict[str, Any]) -> Done:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Done(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from expertcast.cli import main

    os.environ.update(request["env"])
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            sys.argv = ["expertcast", *request.get("argv", [])]
            status = main(request["argv"]) if "argv" in request else int(bool(exec(request["code"], {})))
        except SystemExit as stop:
            status = int(stop.code or 0)
        except BaseException:
            traceback.print_exc(file=err)
            status = 1
    return {"status": status, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    replies, sys.stdout = sys.stdout, sys.stderr
    os.chdir(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=replies, flush=True)
