"""The day a GPU is there: what to measure and check first, on a machine of half an hour without a network.

    python scripts/gpu_day.py --out benchmarks/results/gpu-DATE --minutes 9

    step         at most
    1 machine    2.5 min  versions, memory, page-locking, link rates, small uploads behind copies, a grouped product
                          beside copies, microseconds of the host
    2 tests      4 min    the tests marked `gpu`, each with a time limit, a line per test as it ends
    3 bits       2 min    the same tokens and logits over both links, with and without cache, and as a CUDA graph
    4 first-rows 7 min    Qwen3-30B-A3B's shape without a cache: on demand, and forecasts right always and 9 in 10 times
    5 rest       8 min    longer prompts, a cache, speculation, the other link, accelerate, training an estimator
    6 disk       4 min    experts in a file, mapped, read directly, coded, and by GPUDirect where kvikio is installed
    7 drafts     4 min    the bundled model with drafts: the same tokens, time per token over links of several speeds
    8 vllm       7 min    where vLLM is: the same tokens from slots, eager, compiled and as whole CUDA graphs

Each step is a process with a time limit and keeps what it finds in a file of its own from the start
(`gpu_steps/day.py` draws the folder). A call begins no step that its `--minutes` do not cover; the next call goes on
with those that have no result. Without CUDA the same steps run in a small form on the CPU.

Packages that the machine lacks come as wheels: `--list-wheels` prints the command that fetches them elsewhere,
`--wheels FOLDER` installs what is missing into a folder in there and uses it.

Exit status 0, also when steps were left out; 1 if a check or step failed; 2 with one line for bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from gpu_steps import wheels
from gpu_steps.day import DONE, FAILED, LINES, LOG_FILE, OVERRAN, ROOT, RUNNING, Step, read, write

STEPS = (
    Step(number=1, name="machine", module="gpu_steps.machine", seconds=150),
    Step(number=2, name="tests", module="gpu_steps.gpu_tests", seconds=240),
    Step(number=3, name="bits", module="gpu_steps.bits", seconds=120),
    Step(number=4, name="first-rows", module="gpu_steps.first_rows", seconds=420),
    Step(number=5, name="rest", module="gpu_steps.rest", seconds=480),
    Step(number=6, name="disk", module="gpu_steps.disk", seconds=240),
    Step(number=7, name="drafts", module="gpu_steps.drafts", seconds=240),
    Step(number=8, name="vllm", module="gpu_steps.vllm_engines", seconds=420),
)
GRACE_S = 5
"""A step ends itself at its limit; after so many seconds more it is killed."""
KEPT_LOG = 1 << 20
"""Bytes of one step's output that are kept, the last ones."""


class RefusedError(Exception):
    """Bad input, in one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, not argparse's two."""
        self.exit(2, f"gpu_day: {message}; see --help\n")


def main(argv: list[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    """Run what is asked for; returns the exit status."""
    begin = time.monotonic()
    args = read_options(argv, steps)
    try:
        if args.list_wheels:
            print(wheels.download(wheels.everything(args.there), wheels.PYTHON))
            return 0
        site = prepare(args.wheels)
        device = device_of(args.small)
        if args.out is None:
            raise RefusedError("give --out, a folder for the results")
        args.out.mkdir(parents=True, exist_ok=True)
        chosen = [step for step in steps if args.steps is None or step.number in args.steps]
        todo = [step for step in chosen if args.again or not has_result(step, args.out, device)]
        command = " ".join(["gpu_day.py", *(sys.argv[1:] if argv is None else argv)])
        for step in todo:
            limit = step.small_seconds if device == "cpu" else step.seconds
            if limit > args.minutes * 60 - (time.monotonic() - begin):
                print(f"{step.number} {step.name}: left out, it may take {limit:g} s; call again", flush=True)
                continue
            print(f"{step.number} {step.name}: at most {limit:g} s", flush=True)
            run_step(step, args.out, device, limit, command, site)
            print(f"{step.number} {step.name}: {account(read(step.file(args.out)))}", flush=True)
    except (RefusedError, OSError) as error:
        print(f"gpu_day: {error}", file=sys.stderr)
        return 2
    records = [read(step.file(args.out)) for step in chosen]
    return 1 if any(record is not None and not record["passed"] for record in records) else 0


def read_options(argv: list[str] | None, steps: Sequence[Step]) -> argparse.Namespace:
    """What was given."""
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the results go")
    parser.add_argument("--steps", type=int, nargs="+", choices=[step.number for step in steps], help="(default: all)")
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole call (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="also steps that have a result")
    parser.add_argument("--small", action="store_true", help="on the CPU, as where there is no CUDA")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="where missing packages come from")
    parser.add_argument("--list-wheels", action="store_true", help="print the command that fetches all wheels")
    parser.add_argument(
        "--there", type=Path, metavar="FILE", help="the machine's `pip freeze`: list only what it lacks"
    )
    return parser.parse_args(argv)


def prepare(folder: Path | None) -> Path | None:
    """See that all packages are there; the folder where missing ones were installed.

    Raises:
        RefusedError: packages are missing without which nothing runs.
    """
    if folder is not None and not folder.is_dir():
        raise RefusedError(f"--wheels {folder}: there is no such folder")
    packages, site = wheels.look(folder), None
    if packages.missing and folder is not None:
        site = wheels.install(folder, packages.missing)
        wheels.use(site)
        packages = wheels.look(folder)
    print("packages: " + ", ".join(f"{name} {version}" for name, version in sorted(packages.found.items())), flush=True)
    if packages.missing:
        names = ", ".join(packages.missing.values())
        fetch = wheels.download(packages.missing, ".".join(platform.python_version_tuple()[:2]), folder)
        if packages.stops:
            raise RefusedError(f"missing: {names}; fetch them where there is a network and give --wheels: {fetch}")
        print(f"missing, and done without: {names}", flush=True)
    return site


def device_of(small: bool) -> str:
    """`cuda`, or `cpu` for the small form.

    Raises:
        RefusedError: no torch.
    """
    try:
        import torch
    except ImportError as error:
        raise RefusedError(f"torch cannot be imported ({error}): the machine must bring it") from error
    return "cuda" if torch.cuda.is_available() and not small else "cpu"


def has_result(step: Step, out: Path, device: str) -> bool:
    """Whether the step need not run; one that was cut off must.

    Raises:
        RefusedError: the result is another device's.
    """
    record = read(step.file(out))
    if record is None:
        return False
    if record["device"] != device:
        raise RefusedError(
            f"{step.file(out)} is a result of {record['device']}, and this is {device}: give another --out"
        )
    if record["status"] != RUNNING:
        print(f"{step.number} {step.name}: {account(record)}, before; --again runs it once more", flush=True)
    return bool(record["status"] != RUNNING)


def run_step(step: Step, out: Path, device: str, seconds: float, command: str, site: Path | None) -> None:
    """Run a step and see that its file says how it ended.

    Args:
        step: which one.
        out: folder of the results.
        device: `cuda` or `cpu`.
        seconds: its limit.
        command: what this script was called with.
        site: packages that go before the interpreter's own.
    """
    words = [sys.executable, "-m", "gpu_steps.run", json.dumps(asdict(step)), "--out", str(out.resolve())]
    words += ["--device", device, "--seconds", str(seconds), "--command", command]
    log_file = out / LOG_FILE
    begin = time.monotonic()
    with log_file.open("ab") as log:
        log.write(f"\n== {step.number} {step.name}\n".encode())
        log.flush()
        before = log.tell()
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment(site), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(seconds + GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):  # its own children too
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it: go on without
                process.wait(10)
    said = last_of(log_file, before)
    record = read(step.file(out))
    if record is None:
        record = {"step": step.number, "name": step.name, "status": RUNNING, "device": device, "command": command}
    if record["status"] == RUNNING:
        over = time.monotonic() - begin >= seconds
        record |= {"status": OVERRAN if over else FAILED, "passed": False, "error": said[-LINES:]}
        write(step.file(out), record)


def environment(site: Path | None) -> dict[str, str]:
    """What a step's process sees: this repository before installed packages, and no hub."""
    folders = [*([site.resolve()] if site else []), ROOT / "scripts", ROOT / "src"]
    path = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def last_of(log_file: Path, before: int) -> list[str]:
    """The last lines that a step printed; of more than is kept the beginning is cut out of the log.

    Args:
        log_file: of all steps.
        before: bytes of those before it.
    """
    with log_file.open("rb+") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(before, size - KEPT_LOG))
        kept = log.read()
        if size - before > KEPT_LOG:
            log.seek(before)
            log.write(kept)
            log.truncate()
    return kept.decode(errors="replace").splitlines()


def account(record: dict[str, object] | None) -> str:
    """A step's file in a few words."""
    assert record is not None
    passed = ("passed" if record["passed"] else "checks failed") if record["status"] == DONE else record["status"]
    error = record.get("error")
    return f"{passed} after {record.get('seconds', 0)} s" + (
        f": {error[-1]}" if isinstance(error, list) and error else ""
    )


if __name__ == "__main__":
    raise SystemExit(main())
