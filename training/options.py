"""What fitting any predictor takes, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError, Predictor
from expertcast.predictors.plain import Json

NO_TRAINING = "no tokens in the train split to fit from: collect more text"
NO_VALIDATION = "no tokens in the validation split to choose by: collect more text, in more documents"


@dataclass(kw_only=True)
class FitOptions:
    """How a predictor is fitted; what it is, is its own config."""

    tokens: int | None = None
    """Tokens of the train split to learn from; all of them when not given. On the command line, with MODEL: tokens of
    the text that it is run over, all splits together."""
    validation_tokens: int | None = None
    """Tokens of the validation split to choose by; all of them when not given."""
    batch_size: int = 4096
    """Tokens per batch where order and size do not matter to the result (counts, sums, scores)."""
    seed: int = 0
    """Order of tokens and initial weights."""
    log_folder: Path | None = None
    """Where TensorBoard logs go; nothing is logged when not given."""
    progress: bool = True
    """Whether stages that take some seconds show on standard error how far they are."""
    resume_folder: Path | None = None
    """Where trainings keep their state against a kill (:mod:`expertcast.training.resume`); nowhere when not given."""

    def __post_init__(self) -> None:
        for name in ("tokens", "validation_tokens", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ExpertcastError(f"{name}={value}: give at least 1")


@dataclass(kw_only=True)
class Fitted:
    """A fitted predictor and how it came about."""

    predictor: Predictor
    """Bound to the source's model, in eval mode."""
    report: Json = field(default_factory=dict)
    """Plain values: seconds, tokens, and what was chosen on validation. Goes into the checkpoint's config.json."""


def train_tokens(source: TraceSource, options: FitOptions) -> int:
    """How many tokens of the train split a fit uses."""
    available = source.token_count("train")
    return available if options.tokens is None else min(options.tokens, available)


def validation_tokens(source: TraceSource, options: FitOptions) -> int:
    """How many tokens of the validation split a fit chooses by."""
    available = source.token_count("validation")
    return available if options.validation_tokens is None else min(options.validation_tokens, available)
