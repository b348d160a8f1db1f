"""`expertcast collect`: run a model over text and write the traces that predictors train on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from expertcast.checkpoints.checkpoint import PredictorCheckpoint
from expertcast.commands.options import (
    Count,
    Data,
    Form,
    Model,
    OffloadedOptions,
    Option,
    Text,
    TextColumn,
    own_code,
    read_by,
)
from expertcast.commands.output import Outcome, describe_traces, folder
from expertcast.data.collect import collect
from expertcast.data.experts import experts_of, model_of
from expertcast.data.models import meta_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.processes import exclusive
from expertcast.data.text import TEXT_COLUMN, load_documents
from expertcast.data.trace_format import columns_of, row_bytes
from expertcast.data.trace_writer import check_disk
from expertcast.predictors import ExpertcastError
from expertcast.predictors.early_attention import StandIn


@dataclass(frozen=True, kw_only=True)
class Options(OffloadedOptions):
    """Options of `expertcast collect`."""

    model: Model
    data: Data
    text_column: TextColumn = TEXT_COLUMN
    """Column of --data that holds the text."""
    tokens: Count
    """Number of tokens to collect."""
    out: Annotated[Path, Option(metavar="TRACES", read=folder)]
    """Traces folder to write; an interrupted collection resumes."""
    stand_in: Annotated[str | None, Option(metavar="CKPT", read=own_code)] = None
    """Checkpoint that reads early attention: use its stand-in, so that it can be scored on these traces (default: fit a
    stand-in of --early-rank)."""
    text: Text
    """Windows and batches of the text."""

    @property
    def form(self) -> Form:
        """With a stand-in of its own rank, or a fitted one."""
        return Form("collect with --stand-in", read_by(Options, but=["early_rank"] if self.stand_in else []))


def run(options: Options) -> Outcome:
    """Collect, or resume an interrupted collection."""
    documents = load_documents(options.data, column=options.text_column, tokens=options.tokens)
    checkpoint = None if options.stand_in is None else PredictorCheckpoint.open(options.stand_in)
    stand_in = None if checkpoint is None else _stand_in(checkpoint)
    least = columns_of(find_moe_layers(meta_model(options.source_of(options.model))).shape, torch.float16)
    check_disk(options.out, options.tokens, row_bytes(least))  # before the model is loaded
    model, tokenizer = options.load(options.model)
    if checkpoint is not None:
        checkpoint.verify(experts_of(model_of(model)).view)
    with exclusive(options.out):
        traces = collect(
            model, tokenizer, documents, options.out, options.text, tokens=options.tokens, stand_in=stand_in
        )
    return dict(traces.info), describe_traces(traces)


def _stand_in(checkpoint: PredictorCheckpoint) -> StandIn:
    """Return a checkpoint's stand-in.

    Raises:
        ExpertcastError: its predictor reads no early attention, or it is damaged.
    """
    predictor = checkpoint.load()
    found = next((part for part in predictor.modules() if isinstance(part, StandIn)), None)
    if found is None:
        raise ExpertcastError(
            f"--stand-in {checkpoint.folder}: {predictor.name} reads no early attention, leave it out"
        )
    return found
