"""Child process of one run of `benchmarks.life_size`: a command, or one of the functions here, and what it took."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from expertcast.predictors.messages import Json


def command(words: list[str], result: str | None = None) -> Json:
    """Run the command line; return the time to the first token of a result of `generate`."""
    from expertcast.cli import main as command_line

    assert command_line(words) == 0
    if result is None:
        return {}
    timing = json.loads(Path(result).read_text())["timing"]
    return {"first_token_s": age() - (timing["new_tokens"] - 1) / timing["tokens_per_s"]}


def reads(path: str, tokens: int = 96) -> Json:
    """Decode sampled tokens after as many that fill the slots; compare what they read with the plan's line."""
    from expertcast import load_offloaded

    with load_offloaded(path, device="cpu") as offloaded:
        store, held = offloaded.store, offloaded.pool.count / (offloaded.store.layers * offloaded.store.experts)
        _, cache = _decoded(offloaded, torch.tensor([[1355, 220, 2218]]), tokens)
        offloaded.reset_stats()
        begin = time.perf_counter()
        _decoded(offloaded, torch.tensor([[6196]]), tokens, cache)
        return {
            "slots": offloaded.pool.count, "token_s": (time.perf_counter() - begin) / tokens,
            "planned_bytes": (1 - held) * store.layers * store.top_k * store.layout.block_bytes,
            "read_bytes": offloaded.stats.total.bytes_moved / tokens,
        }  # fmt: skip


def prompts(path: str, share: float = 0.75, length: int = 512, tokens: int = 64) -> Json:
    """Run prompts of one text, each followed by decode steps, with a share of the experts in slots."""
    from expertcast import load_offloaded
    from expertcast.data.models import load_config

    config = load_config(path)
    everything = config.num_hidden_layers * config.num_experts
    text = torch.randint(0, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {"moved": [], "hits": []}
    slots = int(share * everything)
    with load_offloaded(path, device="cpu", slots=slots, store="disk", in_place=True) as offloaded:
        for _ in range(3):
            offloaded.reset_stats()
            first, cache = _decoded(offloaded, text, 1)
            found["moved"].append(offloaded.stats.total.misses / everything)
            offloaded.reset_stats()
            _decoded(offloaded, first[:, None], tokens, cache)
            total = offloaded.stats.total
            found["hits"].append(total.hits / total.requests)
    return found


@torch.no_grad()
def _decoded(offloaded: Any, ids: torch.Tensor, tokens: int, cache: Any = None) -> Any:
    """Run forwards of `ids` and of the tokens sampled after them; return the last token and the cache."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(tokens):
        output = offloaded(ids, past_key_values=cache, logits_to_keep=1)
        cache, ids = output.past_key_values, output.logits[:, -1].float().softmax(-1).multinomial(1, generator=draw)
    return ids[:, 0], cache


def age() -> float:
    """Return the seconds since this process began."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def main() -> int:
    """Join the control groups, run, and write time and memory."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    for group in spec["groups"]:
        (Path(group) / "cgroup.procs").write_text("0")
    found = {"command": command, "reads": reads, "prompts": prompts}[spec["run"]](**spec["given"])
    used = resource.getrusage(resource.RUSAGE_SELF)
    found |= {
        "processor_s": used.ru_utime + used.ru_stime,
        "wall_s": age(),
        "peak_resident_bytes": used.ru_maxrss * 1024,
        "disk_bytes": used.ru_inblock * 512,
    }
    Path(spec["out"]).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
