"""The process of one run: our sides, the resident model, the disk alone. Started by `children.run`.

It joins its control groups before torch is loaded, loads its side, says `ready`, waits until the limits are set, and
reads a given text token by token, each step timed. All sides read the same prompt at once (time to first token) and
then the same tokens, not their own. The keys and values of the prompt are replaced by the resident model's: a prompt
needs more experts than slots hold, and is summed in another order then; from there on every bit can be compared.

N tokens behind the prompt, V vocabulary.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


def begin() -> dict[str, Any]:
    """The description of the run, which the command line names; this process is in its groups from here on."""
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    for group in spec["groups"]:
        (Path(group) / "cgroup.procs").write_text("0")
    return spec


SPEC = begin()  # before torch is loaded, so that its pages count

# ruff: noqa: E402
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.disk_sides import DISK, OWN, PROCESS, described
from expertcast.data.models import meta_model
from expertcast.data.moe_layers import experts_implementation, find_moe_layers
from expertcast.predictors import MoEView, PredictorConfig
from expertcast.predictors.messages import Json
from expertcast.runtime import OffloadConfig, OffloadedModel, load_offloaded
from expertcast.runtime.benchmarking.routing import RoutingOptions, RoutingProcess, RoutingTables, TablePredictor, drawn
from expertcast.runtime.engine.kernels import kernel_name
from expertcast.runtime.storage.memory import HostMemory
from expertcast.runtime.storage.reader import PIECE, DirectReader, Read

_BUFFERS = 8


def ready() -> None:
    """All is loaded: return when the cage is set."""
    print("ready", flush=True)
    if sys.stdin.readline() != "go\n":
        raise SystemExit(1)


def finish(spec: dict[str, Any], found: dict[str, Any]) -> None:
    """Leave what was found, with this process's own peak of resident memory."""
    Path(spec["out"]).write_text(json.dumps({**found, "peak_resident_bytes": peak_resident()}))


def bytes_read() -> int:
    """Bytes that this process has had read from disks so far, by requests and by page faults."""
    return _status("/proc/self/io", "read_bytes:")


def peak_resident() -> int:
    """Most bytes that were resident at a time."""
    return _status("/proc/self/status", "VmHWM:") * 1024


def timed_part(spec: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The tokens of the text that are read as the prompt, and those that follow one by one."""
    text: Sequence[int] = spec["tokens"]
    return list(text[: spec["prompt"]]), list(text[spec["prompt"] : spec["prompt"] + spec["warm"] + spec["timed"]])


def _status(path: str, name: str) -> int:
    lines = Path(path).read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


@dataclass(slots=True)
class Followed:
    """One text, read."""

    ttft_s: float
    steps_s: list[float]
    """Of the timed steps."""
    logits_NV: Tensor
    """Of all tokens behind the prompt, the untimed ones first."""
    bytes_read: int
    """By the timed steps."""
    prompt_bytes: int
    cache: DynamicCache
    link: Json

    def as_dict(self) -> Json:
        """Plain values, per token where that can be."""
        timed = len(self.steps_s)
        return {
            "ttft_s": self.ttft_s, "steps_s": self.steps_s, "tpot_s": statistics.median(self.steps_s),
            "tpot_mean_s": statistics.fmean(self.steps_s), "bytes_read": self.bytes_read / timed,
            "prompt_bytes_read": self.prompt_bytes, **self.link,
        }  # fmt: skip


@torch.no_grad()
def follow(
    model: PreTrainedModel, spec: Json, truth: dict[str, Tensor] | None, offloaded: OffloadedModel | None = None
) -> Followed:
    """Read the text of a run.

    Args:
        model: offloaded or not.
        spec: of the run.
        truth: what :func:`remembered` gives; None keeps the prompt's own keys and values.
        offloaded: whose counters are read.
    """
    prompt, rest = timed_part(spec)
    cache, before = DynamicCache(config=model.config), bytes_read()
    start = time.perf_counter()
    model(input_ids=torch.tensor([prompt]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    ttft_s, prompt_bytes = time.perf_counter() - start, bytes_read() - before
    if truth is not None:
        cache = DynamicCache(config=model.config)
        for layer in range(model.config.num_hidden_layers):
            cache.update(truth[f"keys.{layer}"], truth[f"values.{layer}"], layer)
    logits, steps_s, read = [], [], 0
    for number, token in enumerate(rest):
        if number == spec["warm"]:
            read = bytes_read()
            if offloaded is not None:
                offloaded.reset_stats()
        start = time.perf_counter()
        found = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits.append(found.logits[0, -1])
        steps_s.append(time.perf_counter() - start)
    read = bytes_read() - read
    steps_s = steps_s[spec["warm"] :]
    link = {} if offloaded is None else _counted(offloaded, read, len(steps_s))
    return Followed(ttft_s, steps_s, torch.stack(logits), read, prompt_bytes, cache, link)


def remember(followed: Followed, spec: Json, path: Path) -> None:
    """Keep what a run computed, and the prompt's keys and values, for others to be compared with."""
    kept = {"logits": followed.logits_NV}
    for layer, each in enumerate(followed.cache.layers):
        kept[f"keys.{layer}"] = each.keys[:, :, : spec["prompt"]].contiguous()
        kept[f"values.{layer}"] = each.values[:, :, : spec["prompt"]].contiguous()
    save_file(kept, path)


def remembered(path: Path) -> dict[str, Tensor]:
    """What :func:`remember` kept."""
    return load_file(path)


def compared(logits_NV: Tensor, truth: dict[str, Tensor]) -> Json:
    """`identical`: whether all logits are the same bits; `same_tokens`: the share of the same largest one."""
    own_NV = truth["logits"][: len(logits_NV)]
    same = (own_NV.argmax(-1) == logits_NV.argmax(-1)).float().mean()
    return {"identical": bool(torch.equal(own_NV, logits_NV)), "same_tokens": float(same)}


def _counted(offloaded: OffloadedModel, read: int, tokens: int) -> Json:
    """What the offload counted in the timed steps."""
    stats: dict[str, Any] = offloaded.stats.as_dict()
    link, waited = offloaded.link, stats["waited_s"]
    reads = link.name == "disk"  # the instant link's copies come when nobody is said to wait
    alone = reads and offloaded.predictor is None  # with forecasts bytes also come while nobody waits
    return {
        "hit_rate": stats["hit_rate"],
        "waited_s": waited / tokens,
        "link_bytes": link.bytes_moved / tokens,
        "link_busy_s": link.busy_s / tokens,
        "rate_waiting": read / waited if alone and waited and read else None,
        "rate_busy": read / link.busy_s if reads and link.busy_s and read else None,
        "slots": offloaded.pool.count,
    }


def tables_of(view: MoEView, spec: Json) -> RoutingTables:
    """Routing of the workload `process`."""
    return drawn(
        view.shape,
        prompt=spec["prompt"],
        new_tokens=spec["warm"] + spec["timed"],
        options=RoutingOptions(**spec["process"]),
    )


def ours(spec: Json) -> Json:
    """Offloaded from the disk."""
    config = OffloadConfig.from_dict({"store_folder": spec["store_folder"], **spec["options"]})
    truth = None if spec["truth"] is None else remembered(Path(spec["truth"]))
    predictor = None
    if spec["forecasts"]:
        predictor = TablePredictor(PredictorConfig(ahead=(1,)), find_moe_layers(meta_model(spec["model"])).shape)
    with ExitStack() as stack:
        offloaded = stack.enter_context(
            load_offloaded(spec["model"], replace(config, predictor=predictor), device="cpu")
        )
        if spec["workload"] == PROCESS:
            process = RoutingProcess(offloaded.model, offloaded.view, tables_of(offloaded.view, spec))
            stack.enter_context(process)
            _first(offloaded)
            if predictor is not None:
                predictor.follow(process)
        ready()
        followed = follow(offloaded.model, spec, truth, offloaded)
    if spec["remember"] is not None:
        remember(followed, spec, Path(spec["remember"]))
    return followed.as_dict() | ({} if truth is None else compared(followed.logits_NV, truth))


def _first(offloaded: OffloadedModel) -> None:
    """Let the hooks that were added last run first: the offload's own must see what the process routes to."""
    for layer in offloaded.view:
        hooks = layer.router._forward_hooks
        hooks.move_to_end(next(reversed(hooks)), last=False)
    before = offloaded.model.base_model._forward_pre_hooks
    before.move_to_end(next(reversed(before)), last=False)


def resident(spec: Json) -> Json:
    """The whole model in memory, over both workloads: what all are compared with."""
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype="auto").eval()
    view, found = find_moe_layers(model), {}
    ready()
    for workload in (OWN, PROCESS):
        with ExitStack() as stack:
            stack.enter_context(experts_implementation(model, kernel_name(model)))
            if workload == PROCESS:
                tables = tables_of(view, spec)
                stack.enter_context(RoutingProcess(model, view, tables))
                routed, source = tables.ids_PLK.tolist(), tables.source
            else:
                recorded = stack.enter_context(recorded_routing(view))
                source = "the model's own"
            followed = follow(model, spec, None)
            if workload == OWN:
                routed = torch.cat([torch.stack(ids_LTK, 1) for ids_LTK in recorded()]).tolist()
        remember(followed, spec, Path(spec["remember"]) / f"{workload}.safetensors")
        found[workload] = {"source": source, **described(routed[spec["prompt"] :], view.shape.experts, spec["shares"])}
        found[workload] |= {"resident_tpot_s": followed.as_dict()["tpot_s"], "ids": routed}
    return found


@contextmanager
def recorded_routing(view: MoEView) -> Iterator[Callable[[], list[list[torch.Tensor]]]]:
    """Gives a function that returns, per forward, the ids [T, K] of each layer."""
    seen: list[torch.Tensor] = []
    handles = [layer.router.register_forward_hook(lambda _m, _i, out: seen.append(out[2].clone())) for layer in view]
    yield lambda: [seen[at : at + len(view)] for at in range(0, len(seen), len(view))]
    for handle in handles:
        handle.remove()


def disk(spec: Json) -> Json:
    """The rate of sequential direct reads."""
    path = next(Path(spec["store_folder"]).glob("*.safetensors"))
    count = min(spec["disk_bytes"], path.stat().st_size) // PIECE
    buffers = HostMemory(_BUFFERS * PIECE).bytes.view(_BUFFERS, PIECE)
    reader = DirectReader(path)
    ready()
    reads = [Read(target=buffers[number % _BUFFERS], offset=number * PIECE) for number in range(count)]
    start = time.perf_counter()
    for read in reads:
        reader.submit(read)
    for read in reads:
        read.wait()
    seconds = time.perf_counter() - start
    reader.close()
    return {"rate": count * PIECE / seconds, "read": count * PIECE, "direct": reader.direct}


KINDS: dict[str, Callable[[Json], Json]] = {"ours": ours, "resident": resident, DISK: disk}


def main() -> None:
    """Run and leave what was found."""
    torch.set_num_threads(SPEC["threads"])
    warnings.filterwarnings("ignore", message=".*is made again.*")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    found = KINDS[SPEC["kind"]](SPEC)
    finish(SPEC, found)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
