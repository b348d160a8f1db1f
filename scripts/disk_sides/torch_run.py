"""The process of one run in torch: our sides, the resident model, accelerate, the disk alone. Started by `runs.py`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from disk_sides.child import begin, finish, ready

SPEC = begin()  # before torch is loaded, so that its pages count

# ruff: noqa: E402
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from disk_sides.following import compared, follow, remember, remembered
from disk_sides.routing import described
from disk_sides.sides import ACCELERATE, DISK, OWN, PROCESS
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


def accelerate(spec: Json) -> Json:
    """accelerate's disk_offload; the index names the checkpoint's own file, as `device_map="disk"` has it."""
    from accelerate import disk_offload, init_empty_weights

    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(spec["model"]), dtype=torch.bfloat16)
    model.eval()
    folder, file = Path(spec["index"]), str(Path(spec["model"]) / "model.safetensors")
    folder.mkdir(exist_ok=True)
    index = {name: {"safetensors_file": file, "weight_name": name} for name, _ in model.named_parameters()}
    (folder / "index.json").write_text(json.dumps(index))
    disk_offload(model, folder, execution_device=torch.device("cpu"))
    ready()
    with experts_implementation(model, kernel_name(model)):
        truth = remembered(Path(spec["truth"]))
        followed = follow(model, spec, truth)
    return followed.as_dict() | compared(followed.logits_NV, truth)


def disk(spec: Json) -> Json:
    """The rate of sequential direct reads."""
    path = next(Path(spec["store_folder"]).glob("*.safetensors"))
    count = min(spec["disk_bytes"], path.stat().st_size) // PIECE
    buffers = HostMemory(_BUFFERS * PIECE).bytes.view(_BUFFERS, PIECE)
    reader = DirectReader(path)
    ready()
    reads = [Read(buffers[number % _BUFFERS], offset=number * PIECE) for number in range(count)]
    start = time.perf_counter()
    for read in reads:
        reader.submit(read)
    for read in reads:
        read.wait()
    seconds = time.perf_counter() - start
    reader.close()
    return {"rate": count * PIECE / seconds, "read": count * PIECE, "direct": reader.direct}


KINDS: dict[str, Callable[[Json], Json]] = {"ours": ours, "resident": resident, ACCELERATE: accelerate, DISK: disk}


def main() -> None:
    """Run and leave what was found."""
    torch.set_num_threads(SPEC["threads"])
    warnings.filterwarnings("ignore", message=".*is made again.*")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    found = KINDS[SPEC["kind"]](SPEC)
    if SPEC["kind"] == ACCELERATE:
        found["version"] = importlib.metadata.version("accelerate")
    finish(SPEC, found)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
