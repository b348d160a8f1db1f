"""The process of one run of llama.cpp, started by `children.run` with an interpreter that has `xllamacpp` alone.

The server in the wheel reads a text token by token: each request is the text so far, whose beginning it keeps, so that
one token is computed. Times are the server's own.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from benchmarks.child import begin, end, follow, ready

SPEC = begin()

# ruff: noqa: E402
import xllamacpp  # after the groups, so that its pages count


def main() -> None:
    """Load, read the text, and write the results."""
    server, tokens = xllamacpp.Server(_options()), SPEC["tokens"]
    ready()
    found = follow(SPEC, lambda first, last: _read(server, tokens[:last], last - first), lambda: None)
    length = SPEC["prompt"]
    found["again_s"] = _read(server, tokens[:length][::-1], length)[0] if SPEC["again"] else None
    found["version"] = f"xllamacpp {xllamacpp.__version__}, {xllamacpp.get_system_info().strip(' |')}"
    end(SPEC, found)
    sys.stdout.flush()
    os._exit(0)  # its threads need not end


def _options() -> Any:
    """Parameters of a run; `SPEC["options"]` holds attributes, enumerations by name."""
    params = xllamacpp.CommonParams()
    params.model.path = SPEC["model"]
    params.n_gpu_layers, params.n_ctx, params.n_parallel = 0, len(SPEC["tokens"]) + 16, 1
    params.fit_params, params.warmup, params.verbosity = False, False, -1
    params.cache_ram_mib = params.n_ctx_checkpoints = 0
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


if __name__ == "__main__":
    main()
