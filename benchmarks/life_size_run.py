"""Child process of one run of `benchmarks.life_size`: a command, and what it took."""

from __future__ import annotations

import io
import json
import re
import resource
import time
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.child import begin, end
from expertcast.predictors.messages import Json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from expertcast.runtime.offloading import OffloadedModel

_RECORDED, _OF_TOP_K = 128, 6 / 8
"""Recorded tokens, and their experts over those of the model."""


def follow_recorded() -> list[int]:
    """Let models that are loaded from now on route as Qwen3-30B-A3B did for 128 tokens, the same ones again and again.

    Returns:
        A list that gets the number of experts read before each forward.
    """
    from benchmarks.timed.routing import PrescribedRouting, recorded
    from expertcast.data.moe_layers import find_moe_layers
    from expertcast.runtime import loading

    reads, offload = list[int](), loading.offload
    tables = recorded("qwen3-30b-a3b", prompt=1, new_tokens=_RECORDED - 1, accuracy=1.0)
    again = replace(tables, ids_PLK=tables.ids_PLK.repeat(4, 1, 1))

    def offload_routed(model: PreTrainedModel, *args: Any, **options: Any) -> OffloadedModel:
        PrescribedRouting(model, find_moe_layers(model), again).__enter__()
        offloaded = offload(model, *args, **options)
        model.base_model.register_forward_pre_hook(lambda *_: reads.append(offloaded.stats.total.misses))
        return offloaded

    loading.offload = offload_routed
    return reads


def command(words: list[str], result: str, recorded: bool) -> Json:
    """Run the command line; return the times of a result of `generate`, its reads and those of its plan."""
    from expertcast.cli import main as command_line

    before = follow_recorded() if recorded else []
    with redirect_stderr(io.StringIO()) as said:
        status = command_line(words)
    if status:
        return {"refused": said.getvalue().strip().splitlines()[-1]}
    if not Path(result).exists() or "timing" not in (written := json.loads(Path(result).read_text())):
        return {}
    timing, planned = written["timing"], re.search(r"reads about (\d+) of its", said.getvalue())
    return {
        "first_token_s": age() - (timing["new_tokens"] - 1) / timing["tokens_per_s"],
        "token_ms": 1e3 / timing["tokens_per_s"],
        "reads": written["stats"]["misses"] / timing["new_tokens"],
        "later_reads": (written["stats"]["misses"] - before[_RECORDED]) / len(before[_RECORDED:]) if before else None,
        "planned_reads": int(planned[1]) * (_OF_TOP_K if recorded else 1) if planned else None,
    }


def age() -> float:
    """Return the seconds since this process began."""
    return time.time() - psutil.Process().create_time()


def main() -> None:
    """Join the control groups, run, and write time and memory."""
    spec = begin()
    found = command(spec["words"], spec["result"], spec["recorded"])
    used = resource.getrusage(resource.RUSAGE_SELF)
    found |= {"processor_s": used.ru_utime + used.ru_stime, "wall_s": age(), "disk_bytes": used.ru_inblock * 512}
    end(spec, found)


if __name__ == "__main__":
    main()
