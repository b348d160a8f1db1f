"""Train the bundled reference model: a small Qwen3-MoE language model, on a CPU, from a folder of parquet files.

    python scripts/train_reference.py --corpus ../shared/corpus --out reference --minutes 100
    python scripts/train_reference.py --corpus ../shared/corpus --out reference --minutes 100 --resume
    python scripts/train_reference.py --corpus ../shared/corpus --init checkpoints/reference --evaluate

The corpus has train.parquet and validation.parquet with the columns text, domain, source, license. The output folder:

    OUT/state/checkpoint.safetensors   weights, AdamW moments and the run's position; gone at the end
    OUT/state/tokenizer/               the tokenizer in use; gone at the end
    OUT/config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json
    OUT/training.json README.md        losses, command, revision, versions; the same as a model card

With --tokens a run stopped at any moment and resumed ends in the same bits as one that was never stopped. With
--minutes the schedule follows the clock: the last checkpoint counts, not the time since.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import math
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from expertcast.checkpoints.bundled import BUNDLED
from expertcast.checkpoints.provenance import provenance
from expertcast.commands.numbers import positive, positive_number
from expertcast.data.machine import hardware
from expertcast.predictors import ExpertcastError

STATE, TOKENIZER, FINAL = "state", "tokenizer", "final"
CHECKPOINT = "checkpoint.safetensors"
END_OF_TEXT = "<|endoftext|>"
TOKENIZER_CHARACTERS = 2_000_000
"""Characters per domain that train a new tokenizer."""
ENCODE_BATCH, EVALUATION_BATCH, SHORT_VALIDATION_WINDOWS = 256, 16, 16
WEIGHT_DECAY, GRADIENT_NORM = 0.05, 1.0
ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
FIXED_ON_RESUME = ("window", "batch", "learning_rate", "warmup", "hold", "seed", "tokens")
Rows = list[dict[str, str]]
Stream = npt.NDArray[np.uint16]


def say(message: str) -> None:
    """Write one time-stamped progress line to stderr."""
    print(time.strftime("%H:%M:%S", time.gmtime()), message, file=sys.stderr, flush=True)


def read_rows(corpus: Path, split: str) -> Rows:
    """Read one split of the corpus."""
    rows: Rows = pq.read_table(corpus / f"{split}.parquet", columns=["text", "domain", "source", "license"]).to_pylist()
    return rows


def by_domain(rows: Rows) -> dict[str, list[str]]:
    """Group the texts by domain, domains in alphabetical order."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(row["domain"], []).append(row["text"])
    return dict(sorted(groups.items()))


def train_tokenizer(rows: Rows, vocabulary: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE in which `<|endoftext|>` has id 0, on documents spread evenly over each domain."""
    sample = []
    for texts in by_domain(rows).values():
        sample += texts[:: max(1, round(sum(map(len, texts)) / TOKENIZER_CHARACTERS))]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(sample, trainer)
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=max_length, **special)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Stream:
    """Encode documents to one stream of token ids, each document followed by end-of-text."""
    parts = []
    for start in range(0, len(texts), ENCODE_BATCH):
        for encoding in tokenizer.backend_tokenizer.encode_batch(texts[start : start + ENCODE_BATCH]):
            parts.append(np.array([*encoding.ids, tokenizer.eos_token_id], dtype=np.uint16))
    return np.concatenate(parts)


def encode_domains(tokenizer: PreTrainedTokenizerFast, rows: Rows) -> dict[str, Stream]:
    """Encode rows to one stream per domain."""
    return {domain: encode(tokenizer, texts) for domain, texts in by_domain(rows).items()}


class WindowOrder:
    """The training windows, in an order that is a function of the seed and the position alone.

    Every epoch cuts the stream at another random offset and visits its windows in another random order,
    so a resumed run needs to know no more than the number of windows already seen.
    """

    def __init__(self, stream: Stream, window: int, seed: int) -> None:
        self.stream, self.window, self.seed = stream, window, seed
        self.per_epoch = len(stream) // window - 1
        if self.per_epoch < 1:
            raise ExpertcastError(f"the corpus has {len(stream)} tokens: --window {window} needs {2 * window}")
        self._epoch = -1

    def batch(self, position: int, size: int) -> torch.Tensor:
        """Return windows `position` to `position + size` as ids_BT."""
        return torch.stack([self._window(index) for index in range(position, position + size)])

    def _window(self, index: int) -> torch.Tensor:
        epoch, place = divmod(index, self.per_epoch)
        if epoch != self._epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._offset = int(generator.integers(self.window))
            self._order, self._epoch = generator.permutation(self.per_epoch), epoch
        start = self._offset + int(self._order[place]) * self.window
        return torch.from_numpy(self.stream[start : start + self.window].astype(np.int64))


def new_model(config: Path, seed: int) -> Qwen3MoeForCausalLM:
    """Build an untrained model of the sizes in a config.json, in fp32."""
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig.from_pretrained(config)).float()


def load_model(folder: Path) -> Qwen3MoeForCausalLM:
    """Load a Qwen3-MoE model in fp32."""
    return choose_kernels(Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32))


def choose_kernels(model: Qwen3MoeForCausalLM) -> Qwen3MoeForCausalLM:
    """Choose the kernels that train fastest.

    Measured on one CPU core, batch 16: grouped_mm experts train 1.3 to 1.8 times as fast as eager ones, eager attention
    1.2 times as fast as sdpa, layers compiled by --compile another 1.2 times.
    """
    model.set_experts_implementation("grouped_mm")
    model.set_attn_implementation("eager")
    return model


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory for the next step.

    Giving large activations back to the kernel and taking them again made a CPU step an eighth slower.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_max = -1, -4
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)


def domain_loss(model: Qwen3MoeForCausalLM, stream: Stream, window: int, limit: int = 0) -> tuple[float, int]:
    """Sum the cross-entropy over a stream cut into windows, the last one as long as the stream leaves it.

    Returns nats and predicted tokens. `limit` keeps about so many windows, evenly spread; 0 keeps all.
    """
    starts = list(range(0, len(stream) - 1, window))
    if limit:
        starts = starts[:: math.ceil(len(starts) / limit)]
    full = [start for start in starts if start + window <= len(stream)]
    groups = [full[i : i + EVALUATION_BATCH] for i in range(0, len(full), EVALUATION_BATCH)]
    groups += [[start] for start in starts[len(full) :]]
    nats, count = 0.0, 0
    for group in groups:
        ids_BT = torch.stack([torch.from_numpy(stream[s : s + window].astype(np.int64)) for s in group])
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
        target_N = ids_BT[:, 1:].reshape(-1)
        nats += F.cross_entropy(logits_BTV[:, :-1].float().flatten(0, 1), target_N, reduction="sum").item()
        count += target_N.numel()
    return nats, count


@torch.no_grad()
def validate(model: Qwen3MoeForCausalLM, streams: dict[str, Stream], window: int, limit: int = 0) -> dict[str, float]:
    """Mean loss in nats per token for each domain, and over all tokens as `all`."""
    was_training = model.training
    model.eval()
    sums = {domain: domain_loss(model, stream, window, limit) for domain, stream in streams.items()}
    model.train(was_training)
    losses = {domain: nats / count for domain, (nats, count) in sums.items() if count}
    losses["all"] = sum(nats for nats, _ in sums.values()) / sum(count for _, count in sums.values())
    return losses


@dataclasses.dataclass(kw_only=True, slots=True)
class Progress:
    """Position of a run and its logs."""

    step: int = 0
    seconds: float = 0.0
    train_log: list[dict[str, float]] = dataclasses.field(default_factory=list)
    validation_log: list[dict[str, float]] = dataclasses.field(default_factory=list)


class Trainer:
    """Trains `model` on the windows of `order` until the budget of `options` is spent."""

    def __init__(self, model: Qwen3MoeForCausalLM, order: WindowOrder, options: argparse.Namespace) -> None:
        self.model, self.order, self.options = model, order, options
        decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)
        self.progress = Progress()
        self.checkpoint = options.out / STATE / CHECKPOINT
        self._losses: list[torch.Tensor] = []

    @property
    def tokens(self) -> int:
        """Training tokens seen so far."""
        return self.progress.step * self.options.batch * self.options.window

    def fraction(self) -> float:
        """Share of the budget that is spent, 0 to 1."""
        if self.options.tokens:
            return min(1.0, self.tokens / self.options.tokens)
        return min(1.0, self.progress.seconds / (60 * self.options.minutes))

    def learning_rate(self) -> float:
        """Linear warm-up, then constant, then linear decay to 0 at the end of the budget."""
        warm = min(1.0, (self.progress.step + 1) / self.options.warmup)
        decay = min(1.0, (1 - self.fraction()) / (1 - self.options.hold))
        return self.options.learning_rate * warm * decay

    def run(self, streams: dict[str, Stream]) -> None:
        """Train from `progress` to the end of the budget; `streams` are for validation."""
        options, progress = self.options, self.progress
        while self.fraction() < 1:
            start = time.monotonic()
            self._losses.append(self.train_step())
            if progress.step % options.log_every == 0:
                self._log()
            if progress.step % options.validate_every == 0:
                self._validate(streams)
            progress.seconds += time.monotonic() - start
            if progress.step % options.checkpoint_every == 0:
                self.save()

    def train_step(self) -> torch.Tensor:
        """Take one step on the next batch and return its cross-entropy in nats per token."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        ids_BT = self.order.batch(self.progress.step * self.options.batch, self.options.batch)
        with torch.autocast("cpu", torch.bfloat16):
            output = self.model(input_ids=ids_BT, labels=ids_BT, output_router_logits=True, use_cache=False)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress.step += 1
        loss: torch.Tensor = output.loss - self.model.config.router_aux_loss_coef * output.aux_loss
        return loss.detach()

    def _log(self) -> None:
        loss = torch.stack(self._losses).mean().item()
        self._losses = []
        if not math.isfinite(loss):
            raise ExpertcastError(f"the loss is {loss} at step {self.progress.step}: lower --learning-rate")
        rate = self.optimizer.param_groups[0]["lr"]
        entry = {"step": self.progress.step, "tokens": self.tokens, "loss": loss, "learning_rate": rate}
        self.progress.train_log.append({**entry, "seconds": self.progress.seconds})
        speed = self.tokens / max(1e-9, self.progress.seconds)
        say(
            f"step {self.progress.step} loss {loss:.3f} tokens {self.tokens} lr {rate:.2e} "
            f"{self.fraction():.1%} of the budget {speed:.0f} tokens/s"
        )

    def _validate(self, streams: dict[str, Stream]) -> None:
        losses = validate(self.model, streams, self.options.window, limit=SHORT_VALIDATION_WINDOWS)
        self.progress.validation_log.append({"step": self.progress.step, "tokens": self.tokens, **losses})
        say("short validation " + " ".join(f"{domain} {loss:.3f}" for domain, loss in losses.items()))

    def save(self) -> None:
        """Write weights, AdamW moments and position to OUT/state/checkpoint.safetensors, atomically."""
        tensors = {}
        for name, parameter in self.model.named_parameters():
            tensors[f"weight.{name}"] = parameter.detach()
            for moment in ADAM_MOMENTS:
                tensors[f"{moment}.{name}"] = self.optimizer.state[parameter][moment]
        progress = json.dumps(dataclasses.asdict(self.progress))
        partial = self.checkpoint.with_suffix(".partial")
        save_file(tensors, partial, metadata={"progress": progress, "run": json.dumps(self.identity())})
        os.replace(partial, self.checkpoint)

    def load(self) -> None:
        """Read a checkpoint of `save`. Raises ExpertcastError if it is damaged or has other settings."""
        try:
            with safe_open(self.checkpoint, "pt") as checkpoint:
                metadata = checkpoint.metadata()
                self._check_identity(json.loads(metadata["run"]))
                self.progress = Progress(**json.loads(metadata["progress"]))
                for name, parameter in self.model.named_parameters():
                    parameter.data.copy_(checkpoint.get_tensor(f"weight.{name}"))
                    moments = {moment: checkpoint.get_tensor(f"{moment}.{name}") for moment in ADAM_MOMENTS}
                    step = torch.tensor(float(self.progress.step))
                    self.optimizer.state[parameter] = {"step": step, **moments}
        except SafetensorError as error:
            raise ExpertcastError(f"{self.checkpoint} is damaged ({error}): start in a new folder") from error

    def identity(self) -> dict[str, Any]:
        """Return the settings that must not change on resume."""
        chosen = {name: getattr(self.options, name) for name in FIXED_ON_RESUME}
        shapes = {name: list(parameter.shape) for name, parameter in self.model.named_parameters()}
        return {**chosen, "corpus_tokens": len(self.order.stream), "shapes": shapes}

    def _check_identity(self, stored: dict[str, Any]) -> None:
        for name, value in self.identity().items():
            if value != stored.get(name, value):
                was, now = ("another", "this") if name == "shapes" else (stored[name], value)
                raise ExpertcastError(
                    f"the checkpoint's {name} is {was}, not {now}: resume with the same settings or choose a new --out"
                )


def training_report(trainer: Trainer, losses: dict[str, float], rows: Rows, started: dict[str, Any]) -> dict[str, Any]:
    """Return the content of training.json; `started` is the run's first provenance."""
    options, progress = trainer.options, trainer.progress
    sources = sorted({(row["domain"], row["source"], row["license"]) for row in rows})
    return {
        **started,
        "hardware": hardware(),
        "initialised_from": options.init.name if options.init else "random weights",
        "seed": options.seed,
        "steps": progress.step,
        "tokens": trainer.tokens,
        "corpus_tokens": len(trainer.order.stream),
        "seconds": progress.seconds,
        "batch_windows": options.batch,
        "window": options.window,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "data": [list(source) for source in sources],
        "validation_loss": losses,
        "train_log": progress.train_log,
        "validation_log": progress.validation_log,
    }


CARD = """# Reference model

A small Qwen3-MoE causal language model of {millions:.1f} M parameters (sizes: config.json), with a byte-level BPE in
which `<|endoftext|>` is 0. It exists so that tools and tests run on routers that learned something. Its text is poor,
and it is not meant to be read.

## Training

- command: `{command}`
- started from: {initialised_from}
- {steps} steps of {batch_windows} windows of {window} tokens, drawn from a corpus of {corpus_tokens} tokens
- {minutes:.0f} minutes, seed {seed}, git revision {git_revision}
- bf16 autocast, AdamW (betas .9 and .95), gradient norm 1.0, router auxiliary loss .01; hardware, versions and the
  losses along the way are in training.json

## Validation loss

Cross-entropy in nats per token on the validation split of the corpus, fp32 arithmetic on the saved bf16 weights,
windows of {window} tokens cut within each domain.

{losses}

## Data and licences

{sources}
"""


def model_card(report: dict[str, Any]) -> str:
    """Write the model card from the report."""
    losses = [[domain, f"{loss:.3f}"] for domain, loss in report["validation_loss"].items()]
    return CARD.format(
        **report,
        millions=report["parameters"] / 1e6,
        minutes=report["seconds"] / 60,
        losses=table(["domain", "loss"], losses),
        sources=table(["domain", "source", "licence"], report["data"]),
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    """Write a Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows])


def prepare_output(options: argparse.Namespace) -> None:
    """Create OUT, or accept it on resume; refuse a folder that holds anything else."""
    out, checkpoint = options.out, options.out / STATE / CHECKPOINT
    if options.resume:
        if not checkpoint.is_file():
            raise ExpertcastError(f"there is no {STATE}/{CHECKPOINT} in {out}: start without --resume")
    elif out.exists() and (checkpoint.exists() or any(path.name != STATE for path in out.iterdir())):
        raise ExpertcastError(f"{out} is not empty: choose a new --out, or --resume if it holds an unfinished run")
    (out / STATE).mkdir(parents=True, exist_ok=True)


def start_tokenizer(rows: Rows, config: Qwen3MoeConfig, options: argparse.Namespace) -> PreTrainedTokenizerFast:
    """Return the run's tokenizer: the one in OUT/state on resume, that of --init, or a new one."""
    kept = options.out / STATE / TOKENIZER
    if options.resume or options.init:
        tokenizer = AutoTokenizer.from_pretrained(kept if options.resume else options.init)
    else:
        tokenizer = train_tokenizer(rows, config.vocab_size, config.max_position_embeddings)
    tokenizer.save_pretrained(kept)
    return tokenizer


def finish(
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerFast,
    streams: dict[str, Stream],
    rows: Rows,
    started: dict[str, Any],
) -> None:
    """Save model and tokenizer, score what was saved, write log and card, and drop the training state."""
    out = trainer.options.out
    final = out / STATE / FINAL
    shutil.rmtree(final, ignore_errors=True)
    export = Qwen3MoeForCausalLM(trainer.model.config)
    export.load_state_dict(trainer.model.state_dict())
    export.to(torch.bfloat16).save_pretrained(final)
    tokenizer.save_pretrained(final)
    losses = validate(load_model(final), streams, trainer.options.window)
    say("validation " + " ".join(f"{domain} {loss:.3f}" for domain, loss in losses.items()))
    report = training_report(trainer, losses, rows, started)
    (final / "README.md").write_text(model_card(report), encoding="utf-8")
    (final / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for path in sorted(final.iterdir()):
        os.replace(path, out / path.name)
    shutil.rmtree(out / STATE)


def train(options: argparse.Namespace) -> None:
    """Train or resume, and write the finished model to --out."""
    started = provenance()
    rows, validation_rows = read_rows(options.corpus, "train"), read_rows(options.corpus, "validation")
    model = load_model(options.init) if options.init else choose_kernels(new_model(options.config, options.seed))
    model.train()
    prepare_output(options)
    tokenizer = start_tokenizer(rows, model.config, options)
    streams = encode_domains(tokenizer, validation_rows)
    order = WindowOrder(encode(tokenizer, [row["text"] for row in rows]), options.window, options.seed)
    say(f"{len(order.stream)} training tokens in {order.per_epoch} windows")
    if options.compile:
        for layer in model.model.layers:
            layer.compile()
    trainer = Trainer(model, order, options)
    if options.resume:
        trainer.load()
    trainer.run(streams)
    trainer.save()
    finish(trainer, tokenizer, streams, rows, started)


def evaluate(options: argparse.Namespace) -> None:
    """Print the validation loss of --init as JSON."""
    tokenizer = AutoTokenizer.from_pretrained(options.init)
    streams = encode_domains(tokenizer, read_rows(options.corpus, "validation"))
    print(json.dumps(validate(load_model(options.init), streams, options.window), indent=1))


def read_options(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="folder with train.parquet and validation.parquet")
    add("--out", type=Path, help="folder to write the model to; new or empty")
    add("--init", type=Path, help="continue from this model and its tokenizer")
    add("--config", type=Path, default=BUNDLED, help="sizes of a new model: a config.json (default: the bundled one)")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    add("--evaluate", action="store_true", help="only print the validation loss of --init")
    add("--tokens", type=positive, help="budget in training tokens (this or --minutes)")
    add("--minutes", type=positive_number, help="budget in minutes of training (this or --tokens)")
    add("--threads", type=positive, default=1, help="CPU threads (default: %(default)s)")
    add("--batch", type=positive, default=16, help="windows per step (default: %(default)s)")
    add("--window", type=positive, default=256, help="tokens per window (default: %(default)s)")
    add("--learning-rate", type=positive_number, default=4e-3, help="peak learning rate (default: %(default)s)")
    add("--warmup", type=positive, default=60, help="steps of linear warm-up (default: %(default)s)")
    add("--hold", type=float, default=0.3, help="share of the budget before the linear decay (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and window order (default: %(default)s)")
    add("--compile", action="store_true", help="torch.compile each decoder layer")
    add("--checkpoint-every", type=positive, default=200, help="steps between checkpoints (default: %(default)s)")
    add("--validate-every", type=positive, default=400, help="steps between short validations (default: %(default)s)")
    add("--log-every", type=positive, default=20, help="steps between log lines (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.evaluate:
        if not options.init:
            parser.error("--evaluate scores a model: name it with --init DIR")
    elif not options.out or (options.tokens is None) == (options.minutes is None):
        parser.error("a training needs --out, and either --tokens or --minutes")
    if not 0 <= options.hold < 1:
        parser.error(f"--hold is {options.hold}: it must be at least 0 and below 1")
    return options


def main(arguments: list[str]) -> int:
    """Run the command line; return 0, or 2 after one line on standard error."""
    options = read_options(arguments)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    try:
        evaluate(options) if options.evaluate else train(options)
    except ExpertcastError as error:
        print(f"train_reference: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
