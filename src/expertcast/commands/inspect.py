"""`expertcast inspect`: describe a model, traces folder or checkpoint, or verify the digests of its files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from expertcast.checkpoints import checkpoint as files
from expertcast.checkpoints.bundled import resolve_model
from expertcast.checkpoints.checkpoint import PredictorCheckpoint, holds_predictor
from expertcast.checkpoints.results import Table, ladder_table
from expertcast.commands.options import CheckpointOptions, Form, Option, own_code, read_by
from expertcast.commands.output import Outcome, describe_traces, table
from expertcast.data.inspection import OpenModel
from expertcast.data.machine import available_memory
from expertcast.data.source import ModelSource
from expertcast.data.trace_format import TRACE_FILE
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError
from expertcast.predictors.hybrid import Hybrid
from expertcast.predictors.messages import Json, format_bytes


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `expertcast inspect`."""

    target: Annotated[str, Option(positional=True, metavar="MODEL|TRACES|CKPT|STORE", read=own_code)]
    """Folder, GGUF file or hub id to describe."""
    memory: Annotated[str | None, Option(metavar="BYTES")] = None
    """Memory for the experts of a model, such as 8GB, in which slots are counted (default: what is available)."""
    verify: bool = False
    """Compare all files of traces, a checkpoint or a store folder with their digests."""
    revision: Annotated[str | None, Option(metavar="REV")] = None
    """Branch, tag or commit of a model on the hub (default: main)."""
    trust_remote_code: bool = False
    """Run Python code from the model's repository."""

    @property
    def form(self) -> Form:
        """Whether files are verified, or artefacts or a model described."""
        if self.verify:
            return Form("--verify", {"target", "verify"})
        if (Path(self.target) / TRACE_FILE).is_file() or holds_predictor(Path(self.target)):
            return Form(f"{self.target}, which is no model", {"target"})
        return Form("a model", read_by(Options, but={"verify"}))


def run(options: Options) -> Outcome:
    """Describe the target without reading weights, or verify all its files."""
    folder = Path(options.target)
    if options.verify:
        checked = _verify(folder)
        return {"target": options.target, "checked": checked}, "\n".join(f"{what}: right" for what in checked)
    if (folder / TRACE_FILE).is_file():
        traces = TraceDataset.open(folder)
        return dict(traces.info), describe_traces(traces)
    if holds_predictor(folder):
        checkpoint = PredictorCheckpoint.open(folder)
        recall = checkpoint.metrics.get("recall_at_k", {}).get(checkpoint.name)
        shown = {key: value for key, value in checkpoint.config.items() if key != "tap_point"}
        text = table({**shown, "recall_at_k": recall})
        text += f"\n  reads {checkpoint.config['tap_point']}"
        if checkpoint.name == Hybrid.name:
            checkpoint.predictor()  # its config is right
            text += f"\n\n{ladder_table(checkpoint.config).text()}"
        return checkpoint.config, text
    model = Path(resolve_model(options.target))
    if model.is_dir() and not (model / files.CONFIG).is_file():
        raise ExpertcastError(
            f"{folder} has neither config.json (model, checkpoint) nor trace.json (traces): give such a folder, or a "
            "store with --verify"
        )
    given = CheckpointOptions(revision=options.revision, trust_remote_code=options.trust_remote_code)
    passed = given.passed_on(options.target)
    with OpenModel(ModelSource.of(options.target, passed)) as opened:
        report = asdict(opened.report())
        if not report["supported"]:
            raise ExpertcastError(f"{options.target} ({report['architecture']}) is not supported: {report['reason']}")
        forms, sizes = _forms(opened, options.memory)
    shown = {key: value for key, value in report.items() if value != "" and key != "not_early"}
    shown["early_attention"] = f"at {report['early_attention']} of {report['layers']} layers"
    early = [f"  no early attention at {line}" for line in report["not_early"]]
    return {**report, **forms}, "\n".join([table(shown), *early, "", sizes])


def _forms(opened: OpenModel, memory: str | None) -> tuple[Json, str]:
    """Return the sizes of the experts in each form, as values and as a table."""
    from expertcast.runtime.benchmarking.forms import form_sizes
    from expertcast.runtime.config import size_bytes

    room = available_memory() if memory is None else size_bytes(memory)
    forms = form_sizes(opened, room)
    given = "" if room is None else f", slots in {format_bytes(room)} for experts alone"
    notes = [f"  {form.form}: {form.note}" for form in forms if form.note]
    shown = Table(
        headings=("experts", "bits/weight", "bytes/expert", "all experts", "slots"), rows=[form.cells for form in forms]
    )
    text = "\n".join([f"forms of the experts (--experts){given}", shown.text(), *notes])
    values = [{name: value for name, value in asdict(form).items() if value is not None} for form in forms]
    return {"memory": room, "forms": values}, text


def _verify(folder: Path) -> list[str]:
    """Verify the files of a folder; return the kinds of files.

    Raises:
        ExpertcastError: a file differs from its digest, or the folder has no files of expertcast.
    """
    if (folder / TRACE_FILE).is_file():
        traces = TraceDataset.open(folder)
        traces.verify()
        early = [] if traces.stand_in is None else ["stand-in"]
        return ["trace.json", "shards", "skeleton", "default vectors", *early]
    if holds_predictor(folder):
        checkpoint = PredictorCheckpoint.open(folder)
        checkpoint.load()
        return [files.CONFIG, files.METRICS, files.WEIGHTS, files.DOCUMENTS]
    from expertcast.runtime.storage.expert_file import FILE_NAME, verify_store

    if (folder / FILE_NAME).is_file():
        verify_store(folder / FILE_NAME)
        return [FILE_NAME]
    raise ExpertcastError(f"--verify: {folder} is no folder of traces, a checkpoint or a store: give one of these")
