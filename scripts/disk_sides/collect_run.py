"""The process of one run over a text: a command of expertcast, or plain forwards. Started by `runs.py`."""

from __future__ import annotations

import time

from disk_sides.child import begin, bytes_read, finish, ready

SPEC = begin()  # before torch is loaded, so that its pages count

# ruff: noqa: E402
import torch

from expertcast.cli import main
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.plan import make_plan, window_batches
from expertcast.data.text import load_documents
from expertcast.predictors import ExpertcastError


def command() -> None:
    """
    Raises:
        ExpertcastError: the command failed; its own line is on standard error.
    """
    if main(SPEC["arguments"]):
        raise ExpertcastError(f"expertcast {SPEC['arguments'][0]} failed")


@torch.no_grad()
def forwards() -> None:
    """The model loaded, and run over the windows that a collection runs it over, in the batches of a plain one."""
    model = load_model(SPEC["model"])
    plan = make_plan(load_documents(SPEC["data"]), load_tokenizer(SPEC["model"]), tokens=SPEC["tokens"])
    for batch in window_batches(plan.windows_of(plan.documents), SPEC["batch_size"]):
        model.base_model(input_ids=batch.input_ids_BS, attention_mask=batch.mask_BS, use_cache=False)


if __name__ == "__main__":
    torch.set_num_threads(SPEC["threads"])
    ready()
    before, start = bytes_read(), time.perf_counter()
    command() if "arguments" in SPEC else forwards()
    finish(SPEC, {"seconds": time.perf_counter() - start, "bytes_read": bytes_read() - before})
