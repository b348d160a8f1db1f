"""Step 8: vLLM with the plug-in: the tokens of vLLM without it, eager, compiled, and as whole CUDA graphs.

Every engine is a process of its own, of the Python that `EXPERTCAST_VLLM_PYTHON` names (its environment has vLLM),
else of this one, else of `.venv-vllm`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gpu_steps.day import LINES, ROOT, Day

VARIABLE = "EXPERTCAST_VLLM_PYTHON"
PLUGIN = ROOT / "integrations" / "vllm"
ENGINE_RUN = PLUGIN / "tests" / "one_run.py"
MODEL = ROOT / "checkpoints" / "reference"
PROMPTS = [
    "It is a truth universally acknowledged, that", "The sea was", "Once upon a time there was a", "def main():",
    "He said to her that",
]  # fmt: skip
SLOTS = 192
"""Of 768 experts, and more than one layer's 64: what a whole graph needs."""
TOKENS, SMALL_TOKENS = 48, 8
ENGINE_S = 150

_EAGER: dict[str, Any] = {"enforce_eager": True}
_PIECEWISE: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "PIECEWISE"}}
_GRAPHS: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}
_DECODE_GRAPHS: dict[str, Any] = {
    "enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
}  # fmt: skip

SIDES: dict[str, tuple[str | None, dict[str, Any], dict[str, Any]]] = {
    "resident eager": (None, {}, _EAGER),
    "host eager": ("resident eager", {"link": "cuda"}, _EAGER),
    "device eager": ("resident eager", {"link": "kernel", "predictor": "next_norm"}, _EAGER),
    "device decode graphs": ("resident eager", {"link": "kernel", "predictor": "next_norm"}, _DECODE_GRAPHS),
    "resident graphs": (None, {}, _GRAPHS),
    "device graphs": ("resident graphs", {"link": "kernel", "predictor": "router_input"}, _GRAPHS),
    "host piecewise": ("resident graphs", {"link": "cuda", "predictor": "router_input"}, _PIECEWISE),
}
"""By name: whose tokens it must give, options of expertcast (with these slots), and of vLLM."""
SMALL_SIDES = ("resident eager", "device eager")


def run(day: Day) -> bool:
    """Every side on the same prompts; what has no vLLM is left out, and says so."""
    python = next((each for each in pythons() if has_vllm(each)), None)
    if python is None:
        day.save(left_out=f"no vLLM: give its environment's Python as {VARIABLE}")
        return True
    day.save(python=Path(python).name, slots=SLOTS, sides={})
    names = SMALL_SIDES if day.small else tuple(SIDES)
    passed = [day.attempt(name, partial(side, day, python, name)) for name in names]
    return all(passed)


def pythons() -> Iterator[str]:
    """Those that may have vLLM."""
    named = os.environ.get(VARIABLE)
    if named:
        yield named
        return
    yield sys.executable
    made = ROOT / ".venv-vllm" / "bin" / "python"
    if made.exists():
        yield str(made)


def has_vllm(python: str) -> bool:
    """Whether it can be imported there."""
    done = subprocess.run([python, "-c", "import vllm"], capture_output=True, env=_environment(), check=False)
    return not done.returncode


def side(day: Day, python: str, name: str) -> bool:
    """Run one engine; whether its tokens are those that they must be."""
    like, options, engine = SIDES[name]
    asked = {
        "model": str(MODEL), "prompts": PROMPTS, "tokens": SMALL_TOKENS if day.small else TOKENS,
        "engine": {**engine, **({} if day.small else {"moe_backend": "triton", "gpu_memory_utilization": 0.5})},
        "environment": {"EXPERTCAST_VLLM": json.dumps({"slots": SLOTS, **options}) if options else "0"},
        "counted": bool(options), "rounds": 2,
    }  # fmt: skip
    done = subprocess.run(
        [python, str(ENGINE_RUN)], input=json.dumps(asked), capture_output=True, text=True, env=_environment(),
        timeout=min(ENGINE_S, max(1.0, day.left())), check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr, sep="\n", flush=True)
    line = next((each for each in done.stdout.splitlines() if each.startswith("result: ")), None)
    if done.returncode or line is None:
        raise RuntimeError("\n".join((done.stdout + done.stderr).splitlines()[-LINES:]))
    given = json.loads(line.removeprefix("result: "))
    found = {name: given[name] for name in ("tokens", "seconds", "memory")}
    if options:
        (found["counters"],) = given["workers"]
    if like is not None:
        found["identical"] = given["tokens"] == day.result["sides"][like]["tokens"]
    day.save(sides={**day.result["sides"], name: found})
    return bool(found.get("identical", True)) and (not options or found["counters"]["requests"] > 0)


def _environment() -> dict[str, str]:
    """This repository and its plug-in before installed packages; nothing of the step's own packages."""
    path = os.pathsep.join(str(folder) for folder in (ROOT / "src", PLUGIN))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
