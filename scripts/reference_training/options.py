"""The command line of the training script: one dataclass field per flag."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, NoReturn

AT_LEAST_ONE = (
    *("threads", "window", "warmup", "checkpoint_every", "validate_every", "log_every", "tokenizer_characters"),
    *("layers", "experts", "experts_per_token", "expert_width", "hidden", "heads"),
)
VOCABULARY = range(257, 2**16 + 1)


def flag(default: Any, help_text: str) -> Any:
    """Declare a field that is also a flag."""
    return dataclasses.field(default=default, metadata={"help": help_text})


@dataclasses.dataclass(kw_only=True, frozen=True, slots=True)
class Options:
    """One run of the script. Raises ValueError for values that cannot work together."""

    corpus: str = flag("", "folder with train.parquet and validation.parquet")
    out: str = flag("", "folder to write the model to; new or empty")
    init: str = flag("", "continue from this model and its tokenizer")
    resume: bool = flag(False, "go on from the checkpoint in --out")
    evaluate: bool = flag(False, "only print the validation loss of --init")
    tokens: int = flag(0, "budget in training tokens (this or --minutes)")
    minutes: float = flag(0.0, "budget in minutes of training (this or --tokens)")
    device: str = flag("auto", "cpu, cuda or auto")
    threads: int = flag(1, "CPU threads")
    batch: int = flag(0, "windows per step; 0: 16 on CPU, 256 on CUDA")
    window: int = flag(256, "tokens per window")
    learning_rate: float = flag(4e-3, "peak learning rate")
    weight_decay: float = flag(0.05, "weight decay of matrices")
    warmup: int = flag(60, "steps of linear warm-up")
    hold: float = flag(0.3, "share of the budget before the linear decay")
    seed: int = flag(0, "seed of the first weights and of the window order")
    compile: bool = flag(False, "torch.compile each decoder layer")
    checkpoint_every: int = flag(200, "steps between checkpoints")
    validate_every: int = flag(400, "steps between short validations")
    log_every: int = flag(20, "steps between log lines")
    layers: int = flag(12, "decoder layers of a new model")
    experts: int = flag(64, "experts per layer of a new model")
    experts_per_token: int = flag(4, "experts per token of a new model")
    expert_width: int = flag(32, "inner width of an expert of a new model")
    hidden: int = flag(192, "hidden size of a new model")
    heads: int = flag(6, "attention heads of a new model; a third as many key-value heads")
    vocab: int = flag(4096, "vocabulary of a new tokenizer")
    tokenizer_characters: int = flag(2_000_000, "characters per domain that train a new tokenizer")

    def __post_init__(self) -> None:
        if not self.corpus:
            raise ValueError("--corpus is missing: name a folder with train.parquet and validation.parquet")
        for name in AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}: it must be at least 1")
        if self.evaluate:
            if not self.init:
                raise ValueError("--evaluate scores a model: name it with --init DIR")
            return
        if not self.out:
            raise ValueError("--out is missing: name the folder the model is written to")
        if (self.tokens > 0) == (self.minutes > 0):
            raise ValueError("the budget is one of --tokens N and --minutes M, above 0: give exactly one")
        self._check_ranges()

    def _check_ranges(self) -> None:
        if not 0 <= self.hold < 1:
            raise ValueError(f"--hold is {self.hold}: it must be at least 0 and below 1")
        if self.batch < 0:
            raise ValueError(f"--batch is {self.batch}: give at least 1, or 0 for the default of the device")
        if self.vocab not in VOCABULARY:
            raise ValueError(f"--vocab is {self.vocab}: a byte-level BPE needs 257 to 65536")
        if self.experts_per_token > self.experts:
            raise ValueError(f"--experts-per-token {self.experts_per_token} is above --experts {self.experts}")
        if self.hidden % (2 * self.heads):
            raise ValueError(f"--hidden {self.hidden} is no multiple of twice --heads {self.heads}")
        if self.heads % self.key_value_heads:
            raise ValueError(f"--heads {self.heads} is no multiple of its {self.key_value_heads} key-value heads")

    @property
    def key_value_heads(self) -> int:
        """Key-value heads of a new model."""
        return max(1, self.heads // 3)


class OneLineParser(argparse.ArgumentParser):
    """A parser that raises ValueError instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see --help)")


def parse_options(description: str, arguments: list[str]) -> Options:
    """Read the command line; the flags are the fields of `Options`."""
    parser = OneLineParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for field in dataclasses.fields(Options):
        name, help_text = "--" + field.name.replace("_", "-"), field.metadata["help"]
        if isinstance(field.default, bool):
            parser.add_argument(name, action="store_true", help=help_text)
        else:
            parser.add_argument(name, type=type(field.default), default=field.default, help=help_text)
    return Options(**vars(parser.parse_args(arguments)))
