"""The process of one run of llama.cpp, started by `children.run` with an interpreter that has `xllamacpp` alone.

The server in the wheel reads a text token by token: each request is the text so far, whose beginning it keeps, so that
one token is computed. Times are the server's own.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

SPEC: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
for group in SPEC["groups"]:
    (Path(group) / "cgroup.procs").write_text("0")

# ruff: noqa: E402
import xllamacpp  # after the groups, so that its pages count


def main() -> None:
    """Load, read the prompt at once, then token by token."""
    server = xllamacpp.Server(_options())
    print("ready", flush=True)
    if sys.stdin.readline() != "go\n":
        raise SystemExit(1)
    tokens, length = SPEC["tokens"], SPEC["prompt"]
    before = _bytes_read()
    ttft_s, _ = _read(server, tokens[:length], length)
    prompt_bytes = _bytes_read() - before
    steps_s, largest = [], []
    for number in range(length, length + SPEC["warm"] + SPEC["timed"]):
        if number == length + SPEC["warm"]:
            before = _bytes_read()
        seconds, token = _read(server, tokens[: number + 1], 1)
        steps_s.append(seconds)
        largest.append(token)
    read, steps_s = _bytes_read() - before, steps_s[SPEC["warm"] :]
    again_s = _read(server, tokens[:length][::-1], length)[0] if SPEC["again"] else None
    version = f"xllamacpp {xllamacpp.__version__}, {xllamacpp.get_system_info().strip(' |')}"
    found = {
        "ttft_s": ttft_s, "prompt_bytes_read": prompt_bytes, "steps_s": steps_s, "tpot_s": statistics.median(steps_s),
        "tpot_mean_s": statistics.fmean(steps_s), "bytes_read": read / len(steps_s), "largest": largest,
        "again_s": again_s, "version": version, "peak_resident_bytes": _resident(),
    }  # fmt: skip
    Path(SPEC["out"]).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # its threads need not end


def _options() -> Any:
    """Parameters of a run; `SPEC["options"]` holds attributes, enumerations by name."""
    params = xllamacpp.CommonParams()
    params.model.path = SPEC["model"]
    params.n_gpu_layers, params.n_ctx, params.n_parallel = 0, len(SPEC["tokens"]) + 16, 1
    params.fit_params, params.warmup, params.cache_ram_mib, params.n_ctx_checkpoints, params.verbosity = (
        False,
        False,
        0,
        0,
        -1,
    )
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = SPEC["threads"]
    for name, value in SPEC["options"].items():
        kind = getattr(xllamacpp, f"llama_{name}", None)
        setattr(params, name, value if kind is None else kind[f"LLAMA_{name.upper()}_{value}"])
    return params


def _read(server: Any, tokens: list[int], new: int) -> tuple[float, int]:
    """Seconds for the new tokens at the end, and the token that would be next."""
    asked = {"prompt": tokens, "n_predict": 1, "temperature": 0, "cache_prompt": True, "n_probs": 1}
    answer = server.handle_completions(asked)
    timings = answer["timings"]
    if timings["prompt_n"] != new:
        raise SystemExit(f"{timings['prompt_n']} tokens were computed, not {new}")
    likeliest = (answer["choices"][0]["logprobs"] or {}).get("content") or [{"id": -1}]  # none at the end of a text
    return timings["prompt_ms"] / 1e3, likeliest[0]["id"]


def _bytes_read() -> int:
    return int(next(line for line in Path("/proc/self/io").read_text().splitlines() if "read_bytes" in line).split()[1])


def _resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


if __name__ == "__main__":
    main()
