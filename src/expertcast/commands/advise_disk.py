"""`expertcast advise --store-folder`: how experts that lie on a disk are best kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from expertcast.checkpoints.provenance import provenance
from expertcast.commands.bench_target import Target, TargetOptions
from expertcast.commands.output import Outcome, say
from expertcast.commands.predictors import learned_documents
from expertcast.data.models import load_tokenizer
from expertcast.data.text import bundled_ids
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError
from expertcast.runtime.advising.disk import DiskFindings, advise_disk
from expertcast.runtime.advising.disk_survey import Run, survey_disk
from expertcast.runtime.loading import load_offloaded
from expertcast.runtime.offloaded import OffloadedModel
from expertcast.runtime.offloading import offload
from expertcast.runtime.option_values import size_bytes
from expertcast.runtime.recording.observer import Observer
from expertcast.runtime.simulation.load import Texts, load_trace
from expertcast.runtime.simulation.trace import Trace
from expertcast.runtime.storage.coded_file import packed_codec

TOKENS = 1000
"""Of traces, that are replayed."""


def check_disk(options: TargetOptions) -> None:
    """
    Raises:
        ExpertcastError: options of a link to memory, of forecasts, or of a GPU.
    """
    config = options.offload
    given = {
        "link": config.link != "auto",
        "latency": config.latency,
        "predictor": options.predictor,
        "copy_over_compute": options.copy_over_compute,
    }
    wrong = ", ".join("--" + name.replace("_", "-") for name, value in given.items() if value)
    if wrong:
        raise ExpertcastError(f"{wrong}: of another question, and --store-folder asks about a disk: leave one out")
    if options.device_name != "cpu":
        raise ExpertcastError("--store-folder asks about a model on the CPU: give --device cpu, or leave it out")


def advise_on_disk(
    options: TargetOptions, folder: Path, *, prompt_tokens: int, new_tokens: int, save: Path | None
) -> Outcome:
    """A short run from the store that lies there, or with the experts in memory, and what it leads to.

    Args:
        options: of model and memory.
        folder: of the store.
        prompt_tokens, new_tokens: of the short run.
        save: write what is advised there.

    Raises:
        ExpertcastError: no such model, traces of another one, a folder that cannot be written.
    """
    replayed = None if options.replay is None else (str(options.replay), _replayed(options.replay))
    codec = packed_codec(folder)
    say("a short run on demand; reading and decoding some experts")
    tokens = prompt_tokens, new_tokens
    if codec is None or options.random:
        found = _from_memory(options, folder, tokens, replayed)
    else:
        found = _from_store(options, folder, codec, tokens, replayed)
    advice = advise_disk(found)
    heading = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **provenance(), "target": options.target}
    text = f"{options.target}, experts in {folder}\n{advice.text()}"
    if save is not None:
        advice.config(options.offload, folder).save(save)
        text += f"\nwrote {save}"
        if advice.chosen.store == "disk" and advice.chosen.codec != codec:
            text += f"; pack with: expertcast store {options.target} --store-folder {folder} --codec "
            text += advice.chosen.codec
    return {**heading, "packed": codec, **advice.as_dict()}, text


def _replayed(traces: Path) -> Trace:
    return load_trace(TraceDataset.open(traces), Texts(tokens=TOKENS))


def _from_store(
    options: TargetOptions, folder: Path, codec: str, tokens: tuple[int, int], replayed: tuple[str, Trace] | None
) -> DiskFindings:
    """The model as it will run, its experts never whole in memory."""
    config = replace(options.offload, store="disk", store_folder=str(folder), codec=codec)
    name, given = options.target, options.passed_on(options.target)
    ids = bundled_ids(load_tokenizer(name, **given), tokens[0], learned_documents([options.predictor]))

    def run(observers: Sequence[Observer]) -> OffloadedModel:
        return load_offloaded(name, config, device="cpu", dtype=options.dtype, observers=observers, **given)

    return _found(options, folder, run, torch.tensor([ids]), tokens[1], replayed)


def _from_memory(
    options: TargetOptions, folder: Path, tokens: tuple[int, int], replayed: tuple[str, Trace] | None
) -> DiskFindings:
    """A model whose experts are loaded, as there is no store yet; or a shape with random weights, which has none."""
    target = Target.load(options)
    process = target.routing_process(*tokens) if options.replay is None else None
    config = replace(options.offload, store=target.store, link="instant", bandwidth=None)

    def run(observers: Sequence[Observer]) -> OffloadedModel:
        return offload(target.model, config, observers=observers)

    with process if process is not None else nullcontext():
        found = _found(options, folder, run, target.prompt(tokens[0]), tokens[1], replayed)
    return found if process is None else replace(found, routing=process.tables.source)


def _found(
    options: TargetOptions, folder: Path, run: Run, prompt_ids: Tensor, new_tokens: int,
    replayed: tuple[str, Trace] | None,
) -> DiskFindings:  # fmt: skip
    memory = options.offload.memory
    return survey_disk(
        run, prompt_ids, folder, new_tokens=new_tokens, bandwidth=options.offload.bandwidth,
        budget=None if memory is None else size_bytes(memory), replayed=replayed,
    )  # fmt: skip
