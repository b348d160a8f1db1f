"""One vLLM engine in a separate process: options on standard input, generated tokens on standard output."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from pathlib import Path

QUIET = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}
ENGINE = {
    "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 512, "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False, "tensor_parallel_size": 1,
}  # fmt: skip


RESULT = "result: "
"""Prefix of the result's line."""


def main() -> None:
    """Generate greedily and print tokens, memory and counters."""
    asked = json.load(sys.stdin)
    os.environ.update({**QUIET, **asked["environment"]})
    from vllm import LLM, SamplingParams

    memory = Memory()
    memory.start()
    engine_options = {**ENGINE, **asked["engine"]}
    engine = LLM(asked["model"], **engine_options)
    loaded = memory.peak
    outputs = engine.generate(asked["prompts"], SamplingParams(temperature=0, max_tokens=asked["tokens"]))
    given = {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}
    given["memory"] = {"before": memory.before, "loading": loaded, "after": memory_of_its_own()}
    if asked["counted"]:
        given["workers"] = engine.collective_rpc("expertcast_statistics")
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and "distributed_executor_backend" not in engine_options:
        given["layers"] = sorted({type(module).__name__ for module in _modules(engine)})
    print("\n" + RESULT + json.dumps(given))


def memory_of_its_own() -> int:
    """Return the bytes of this process that are not backed by a file."""
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(int(kib) for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", status, re.MULTILINE))


class Memory(threading.Thread):
    """Samples this process's memory every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.peak = memory_of_its_own()

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, memory_of_its_own())
            time.sleep(0.01)


def _modules(engine: object) -> list[object]:
    worker = getattr(engine, "llm_engine").model_executor.driver_worker  # noqa: B009
    return list(worker.worker.model_runner.model.modules())


if __name__ == "__main__":
    main()
