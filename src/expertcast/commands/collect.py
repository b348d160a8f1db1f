"""`expertcast collect`: run a model over text and keep what predictors are trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from expertcast.commands.options import Count, Data, Model, OffloadedOptions, Option, Text, TextColumn
from expertcast.commands.output import Outcome, describe_traces
from expertcast.data.collect import collect
from expertcast.data.processes import exclusive
from expertcast.data.text import TEXT_COLUMN, load_documents


@dataclass(frozen=True, kw_only=True)
class Options(OffloadedOptions):
    """What `expertcast collect` takes."""

    model: Model
    data: Data
    text_column: TextColumn = TEXT_COLUMN
    """Column of --data that holds the text."""
    tokens: Count
    """Tokens to collect."""
    out: Annotated[Path, Option(metavar="TRACES")]
    """Folder to write; resumed if begun."""
    text: Text
    """In which portions the text is run."""


def run(options: Options) -> Outcome:
    """Collect, or finish a collection that was begun."""
    documents = load_documents(options.data, column=options.text_column, tokens=options.tokens)
    model, tokenizer = options.load(options.model)
    with exclusive(options.out):
        traces = collect(model, tokenizer, documents, options.out, options.text, tokens=options.tokens)
    return dict(traces.info), describe_traces(traces)
