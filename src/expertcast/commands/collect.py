"""`expertcast collect`: run a model over text and write the traces that predictors train on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from expertcast.commands.options import Count, Data, Model, OffloadedOptions, Option, Text, TextColumn
from expertcast.commands.output import Outcome, describe_traces, folder
from expertcast.data.collect import collect
from expertcast.data.processes import exclusive
from expertcast.data.text import TEXT_COLUMN, load_documents


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
    text: Text
    """Windows and batches of the text."""


def run(options: Options) -> Outcome:
    """Collect, or resume an interrupted collection."""
    documents = load_documents(options.data, column=options.text_column, tokens=options.tokens)
    model, tokenizer = options.load(options.model)
    with exclusive(options.out):
        traces = collect(model, tokenizer, documents, options.out, options.text, tokens=options.tokens)
    return dict(traces.info), describe_traces(traces)
