"""Child process of one run: an offloaded side, the resident model, or the disk alone. Started by `children.run`.

It joins its control groups before it loads torch, loads its side, prints `ready`, waits until the limits are set, and
reads a text token by token with every step timed. All sides read the same prompt at once (time to first token) and then
the same tokens, not their own output. The prompt's keys and values are replaced by the resident model's: a prompt needs
more experts than there are slots, so its sums have another order. All later results are compared bit for bit.

N tokens after the prompt, V vocabulary.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any


def begin() -> dict[str, Any]:
    """Read the run's description and join its control groups."""
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    for group in spec["groups"]:
        (Path(group) / "cgroup.procs").write_text("0")
    return spec


SPEC = begin()  # before torch is loaded, so that torch's pages count

# ruff: noqa: E402
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from expertcast.data.moe_layers import experts_implementation, find_moe_layers
from expertcast.predictors import MoEView
from expertcast.predictors.messages import Json
from expertcast.runtime import OffloadConfig, OffloadedModel, load_offloaded
from expertcast.runtime.advising.disk import disk_rate
from expertcast.runtime.engine.kernels import kernel_name

_READ_AT_ONCE = 2 << 20
Truth = dict[str, Tensor]
"""Results of the resident model: `logits` [N, V] and, by layer, `keys.L` and `values.L` of the prompt."""


def ready() -> None:
    """Report that everything is loaded, and wait until the limits are set."""
    print("ready", flush=True)
    if sys.stdin.readline() != "go\n":
        raise SystemExit(1)


def bytes_read() -> int:
    """Return the bytes that this process has read from disks so far, including page faults."""
    return _status("/proc/self/io", "read_bytes:")


def _status(path: str, name: str) -> int:
    lines = Path(path).read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


@torch.no_grad()
def follow(
    model: PreTrainedModel, spec: Json, truth: Truth | None, offloaded: OffloadedModel | None = None
) -> tuple[Json, Truth]:
    """Run a model over the text.

    Args:
        model: the model, offloaded or not.
        spec: description of the run.
        truth: results of the resident model; None keeps the prompt's own keys and values.
        offloaded: offload whose counters to read.

    Returns:
        Times and bytes per token, and the results to compare.
    """
    length, timed = spec["prompt"], spec["timed"]
    cache, before = DynamicCache(config=model.config), bytes_read()
    start = time.perf_counter()
    model(
        input_ids=torch.tensor([spec["tokens"][:length]]), past_key_values=cache, use_cache=True, logits_to_keep=1
    )  # fmt: skip
    ttft_s, prompt_bytes = time.perf_counter() - start, bytes_read() - before
    if truth is not None:
        cache = DynamicCache(config=model.config)
        for layer in range(model.config.num_hidden_layers):
            cache.update(truth[f"keys.{layer}"], truth[f"values.{layer}"], layer)
    logits, steps_s, read = [], [], 0
    for number, token in enumerate(spec["tokens"][length : length + spec["warm"] + timed]):
        if number == spec["warm"]:
            read = bytes_read()
            if offloaded is not None:
                offloaded.reset_stats()
        start = time.perf_counter()
        found = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits.append(found.logits[0, -1])
        steps_s.append(time.perf_counter() - start)
    read, steps_s = bytes_read() - read, steps_s[spec["warm"] :]
    counted = {} if offloaded is None else _counted(offloaded, read, timed)
    start = time.perf_counter()
    if spec.get("again"):
        model(input_ids=torch.tensor([spec["tokens"][:length][::-1]]), logits_to_keep=1)
        counted["again_s"] = time.perf_counter() - start
    computed = {"logits": torch.stack(logits)}
    for layer, each in enumerate(cache.layers):
        computed[f"keys.{layer}"] = each.keys[:, :, :length].contiguous()
        computed[f"values.{layer}"] = each.values[:, :, :length].contiguous()
    result: Json = {
        "ttft_s": ttft_s, "steps_s": steps_s, "tpot_s": statistics.median(steps_s),
        "tpot_mean_s": statistics.fmean(steps_s), "bytes_read": read / timed, "prompt_bytes_read": prompt_bytes,
        "largest": computed["logits"].argmax(-1).tolist(),
    }  # fmt: skip
    return result | counted, computed


def _counted(offloaded: OffloadedModel, read: int, tokens: int) -> Json:
    """Return the offload's counters for the timed steps."""
    stats: dict[str, Any] = offloaded.stats.as_dict()
    link, waited = offloaded.link, stats["waited_s"]
    reads = link.name == "disk"  # the instant link's reads do not count as waiting
    return {
        "hit_rate": stats["hit_rate"],
        "waited_s": waited / tokens,
        "link_bytes": link.bytes_moved / tokens,
        "link_busy_s": link.busy_s / tokens,
        "rate_waiting": read / waited if reads and waited and read else None,
        "rate_busy": read / link.busy_s if reads and link.busy_s and read else None,
        "slots": offloaded.pool.count,
    }


def ours(spec: Json) -> Json:
    """Run the model offloaded from the disk.

    Returns:
        The results, with `identical` (all logits equal the resident model's bit for bit) and `same_tokens` (share of
        steps with the same argmax).
    """
    own = {"store_folder": spec["store_folder"], "context": len(spec["tokens"])}
    config = OffloadConfig.from_dict({**own, **spec["options"]})
    truth = None if spec["truth"] is None else load_file(spec["truth"])
    config = replace(config, predictor=spec.get("predictor"))
    with load_offloaded(spec["model"], config, device="cpu", dtype=spec.get("dtype")) as offloaded:
        ready()
        result, computed = follow(offloaded.model, spec, truth, offloaded)
    if truth is not None:
        own_NV, right_NV = computed["logits"], truth["logits"]
        same_N = right_NV.argmax(-1) == own_NV.argmax(-1)
        result |= {"identical": torch.equal(own_NV, right_NV), "same_tokens": float(same_N.float().mean())}
    return result


def resident(spec: Json) -> Json:
    """Run the whole model in memory: the reference for all sides, and the text's routing."""
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype="auto").eval()
    ready()
    with experts_implementation(model, kernel_name(model)), recorded_routing(find_moe_layers(model)) as ids:
        result, computed = follow(model, spec, None)
    save_file(computed, spec["remember"])
    return {"resident_tpot_s": result["tpot_s"], "ids": ids()}


@contextmanager
def recorded_routing(view: MoEView) -> Iterator[Callable[[], Any]]:
    """Record the routing; yield a function that returns the ids [T, L, K] of all forward passes."""
    seen: list[Tensor] = []
    handles = [layer.router.register_forward_hook(lambda _m, _i, out: seen.append(out[2].clone())) for layer in view]

    def ids() -> Any:
        return torch.cat([torch.stack(seen[at : at + len(view)], 1) for at in range(0, len(seen), len(view))]).tolist()

    yield ids
    for handle in handles:
        handle.remove()


def disk(spec: Json) -> Json:
    """Measure the bandwidth of sequential direct reads."""
    path = next(Path(spec["store_folder"]).glob("*.safetensors"))
    ready()
    return {"rate": disk_rate(path, _READ_AT_ONCE, most=spec["disk_bytes"])}


def main() -> None:
    """Run, and write the results with this process's peak resident memory."""
    torch.set_num_threads(SPEC["threads"])
    warnings.filterwarnings("ignore", message=".*is rebuilt.*")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    found = {"ours": ours, "resident": resident, "disk": disk}[SPEC["kind"]](SPEC)
    peak = _status("/proc/self/status", "VmHWM:") * 1024
    Path(SPEC["out"]).write_text(json.dumps({**found, "peak_resident_bytes": peak}))


if __name__ == "__main__":
    main()
