"""The process of one run of accelerate's offload to a disk, started by `children.run`."""

from __future__ import annotations

from benchmarks.child import begin, end, follow, reader, ready

SPEC = begin()  # before torch is loaded, so that torch's pages count

# ruff: noqa: E402
import accelerate
import torch
from transformers import AutoModelForCausalLM


@torch.no_grad()
def main() -> None:
    """Load layers into a share of the memory, leave the others in the mapped file, run, and write the results."""
    torch.set_num_threads(SPEC["threads"])
    places = {"offload_folder": SPEC["store"]}
    if SPEC["limit"] is not None:
        places["max_memory"] = {"cpu": int(SPEC["options"]["share"] * SPEC["limit"])}
    model = AutoModelForCausalLM.from_pretrained(SPEC["model"], dtype="auto", device_map="auto", **places)
    ready()
    found = follow(SPEC, reader(model, SPEC["tokens"]), lambda: None)
    end(SPEC, {**found, "version": f"accelerate {accelerate.__version__}"})


if __name__ == "__main__":
    main()
