"""`expertcast collect`: run a model over text and keep what predictors are trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from expertcast.commands.options import Count, Option
from expertcast.commands.output import Outcome, describe_traces
from expertcast.commands.shared import Data, Model, ModelOptions, WindowOptions
from expertcast.data.collector import collect
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.text import load_documents


@dataclass(frozen=True, kw_only=True)
class Options(WindowOptions, ModelOptions):
    """What `expertcast collect` takes."""

    model: Model
    data: Data
    tokens: Count
    """Tokens to collect."""
    out: Annotated[Path, Option(metavar="TRACES")]
    """Folder to write; resumed if begun."""


def run(options: Options) -> Outcome:
    """Collect, or finish a collection that was begun."""
    documents = load_documents(options.data)
    traces = collect(
        load_model(options.model, dtype=options.dtype, device=options.device_name),
        load_tokenizer(options.model),
        documents,
        options.out,
        tokens=options.tokens,
        window=options.window,
        batch_size=options.batch_size,
    )
    return dict(traces.info), describe_traces(traces)
