"""Train the bundled reference model: a small Qwen3-MoE language model, from a folder of parquet files.

    python scripts/train_reference.py --corpus ../shared/corpus --out reference --minutes 100
    python scripts/train_reference.py --corpus ../shared/corpus --out reference --minutes 100 --resume
    python scripts/train_reference.py --corpus ../shared/corpus --init checkpoints/reference --evaluate

The output folder:

    OUT/state/checkpoint.safetensors   weights, AdamW moments and the run's position; gone at the end
    OUT/state/tokenizer/               the tokenizer in use; gone at the end
    OUT/config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json
    OUT/training.json README.md        losses, command, revision, versions; the same as a model card

With --tokens a run stopped at any moment and resumed ends in the same bits as one that was never stopped
(on CPU). With --minutes the schedule follows the clock: the last checkpoint counts, not the time since.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

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


COLUMNS = ("text", "domain", "source", "license")
END_OF_TEXT = "<|endoftext|>"
ENCODE_BATCH = 256
Rows = list[dict[str, str]]
Stream = npt.NDArray[np.uint16]


def read_rows(corpus: str, split: str) -> Rows:
    """Read one split of the corpus. Raises ValueError if it is missing, damaged or lacks a column."""
    path = Path(corpus) / f"{split}.parquet"
    if not path.is_file():
        raise ValueError(f"there is no {split}.parquet in {corpus}: --corpus names a folder that has one")
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} is not a readable parquet file: {str(error).splitlines()[0]}") from error
    if missing := [column for column in COLUMNS if column not in table.column_names]:
        raise ValueError(f"{path} lacks the column {missing[0]}: it needs {', '.join(COLUMNS)}")
    rows: Rows = table.select(list(COLUMNS)).to_pylist()
    if not rows:
        raise ValueError(f"{path} has no rows: give a corpus with text")
    if any(value is None for row in rows for value in row.values()):
        raise ValueError(f"{path} has empty cells: every row needs {', '.join(COLUMNS)}")
    return rows


def by_domain(rows: Rows) -> dict[str, list[str]]:
    """Group the texts by domain, domains in alphabetical order."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(row["domain"], []).append(row["text"])
    return dict(sorted(groups.items()))


def balanced_sample(rows: Rows, characters: int) -> list[str]:
    """Take evenly spread documents of each domain, about `characters` of each, or all there are."""
    sample = []
    for texts in by_domain(rows).values():
        sample += texts[:: max(1, round(sum(map(len, texts)) / characters))]
    return sample


def train_tokenizer(rows: Rows, *, vocab: int, characters: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE in which `<|endoftext|>` has id 0, on a sample balanced by domain."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(balanced_sample(rows, characters), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder. Raises ValueError if there is none that this script can use."""
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"there is no tokenizer.json in {folder}: name a folder this script has written")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.eos_token_id is None or len(tokenizer) > 2**16:
        raise ValueError(f"the tokenizer in {folder} needs an end-of-text token and at most 65536 tokens")
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Stream:
    """Encode documents to one stream of token ids, each document followed by end-of-text."""
    parts = []
    for start in range(0, len(texts), ENCODE_BATCH):
        for encoding in tokenizer.backend_tokenizer.encode_batch(texts[start : start + ENCODE_BATCH]):
            parts.append(np.array([*encoding.ids, tokenizer.eos_token_id], dtype=np.uint16))
    return np.concatenate(parts)


class WindowOrder:
    """The training windows, in an order that is a function of the seed and the position alone.

    Every epoch cuts the stream at another random offset and visits its windows in another random order,
    so a resumed run needs to know no more than the number of windows already seen.
    """

    def __init__(self, stream: Stream, window: int, seed: int) -> None:
        self.stream, self.window, self.seed = stream, window, seed
        self.per_epoch = len(stream) // window - 1
        if self.per_epoch < 1:
            raise ValueError(f"the corpus has {len(stream)} tokens: --window {window} needs {2 * window}")
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


EVALUATION_BATCH = 16
BF16_EXPERTS = "grouped_mm_in_bf16"


def new_model(options: Options) -> Qwen3MoeForCausalLM:
    """Build the untrained model from the size flags, in fp32."""
    config = Qwen3MoeConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.key_value_heads,
        head_dim=options.hidden // options.heads,
        num_experts=options.experts,
        num_experts_per_tok=options.experts_per_token,
        moe_intermediate_size=options.expert_width,
        norm_topk_prob=True,
        max_position_embeddings=4 * options.window,
        router_aux_loss_coef=0.01,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(options.seed)
    return Qwen3MoeForCausalLM(config)


def load_model(folder: Path) -> Qwen3MoeForCausalLM:
    """Load a Qwen3-MoE model in fp32. Raises ValueError if the folder does not hold one."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"there is no config.json in {folder}: name a folder this script has written")
    try:
        return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot load the model in {folder}: {str(error).splitlines()[0]}") from error


def bf16_experts(
    experts: torch.nn.Module, hidden_ND: torch.Tensor, ids_NK: torch.Tensor, weights_NK: torch.Tensor
) -> torch.Tensor:
    """Run transformers' grouped_mm on bf16 copies of the experts' fp32 weights.

    Autocast does not reach grouped_mm, and CUDA's kernel for it is fast in bf16 only.
    """
    inputs = (hidden_ND, ids_NK, weights_NK)
    output: torch.Tensor
    if all(weight.dtype == torch.bfloat16 for weight in experts.parameters()):
        output = grouped_mm_experts_forward(experts, *inputs)
    else:
        copies = {name: weight.to(torch.bfloat16) for name, weight in experts.named_parameters()}
        output = torch.func.functional_call(experts, copies, inputs)
    return output


def choose_kernels(model: Qwen3MoeForCausalLM, *, compile_layers: bool) -> None:
    """Choose the fastest kernels per device.

    Measured on one CPU core, batch 16: grouped_mm experts train 1.3 to 1.8 times as fast as eager ones,
    eager attention 1.2 times as fast as sdpa, compiled layers another 1.2 times.
    """
    on_cuda = model.device.type == "cuda"
    if on_cuda:
        ALL_EXPERTS_FUNCTIONS.register(BF16_EXPERTS, bf16_experts)
    model.set_experts_implementation(BF16_EXPERTS if on_cuda else "grouped_mm")
    model.set_attn_implementation("sdpa" if on_cuda else "eager")
    if compile_layers:
        for layer in model.model.layers:
            layer.compile()


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
        ids_BT = ids_BT.to(model.device)
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


STATE_DIR = "state"
CHECKPOINT_FILE = "checkpoint.safetensors"
ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
GRADIENT_NORM = 1.0
SHORT_VALIDATION_WINDOWS = 16
FIXED_ON_RESUME = ("window", "learning_rate", "weight_decay", "warmup", "hold", "seed", "tokens")


def say(message: str) -> None:
    """Write one time-stamped progress line to stderr."""
    print(time.strftime("%H:%M:%S", time.gmtime()), message, file=sys.stderr, flush=True)


def make_optimizer(model: Qwen3MoeForCausalLM, options: Options) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)


@dataclasses.dataclass(kw_only=True, slots=True)
class Progress:
    """Where a run stands, and what it has logged."""

    step: int = 0
    seconds: float = 0.0
    train_log: list[dict[str, float]] = dataclasses.field(default_factory=list)
    validation_log: list[dict[str, float]] = dataclasses.field(default_factory=list)


class Trainer:
    """Trains `model` on the windows of `order` until the budget of `options` is spent."""

    def __init__(self, model: Qwen3MoeForCausalLM, order: WindowOrder, options: Options) -> None:
        self.model, self.order, self.options = model, order, options
        self.device = model.device
        self.batch = options.batch or (256 if self.device.type == "cuda" else 16)
        self.optimizer = make_optimizer(model, options)
        self.progress = Progress()
        self.checkpoint = Path(options.out) / STATE_DIR / CHECKPOINT_FILE
        self._losses: list[torch.Tensor] = []

    @property
    def tokens(self) -> int:
        """Training tokens seen so far."""
        return self.progress.step * self.batch * self.options.window

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
        """Train from wherever `progress` stands to the end of the budget; `streams` are for validation."""
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
        ids_BT = self.order.batch(self.progress.step * self.batch, self.batch).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
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
            raise ValueError(f"the loss is {loss} at step {self.progress.step}: lower --learning-rate")
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
        """Read back what `save` wrote. Raises ValueError if it is damaged or of a run with other settings."""
        try:
            with safe_open(self.checkpoint, "pt") as checkpoint:
                metadata = checkpoint.metadata()
                self._check_identity(json.loads(metadata["run"]))
                self.progress = Progress(**json.loads(metadata["progress"]))
                for name, parameter in self.model.named_parameters():
                    parameter.data.copy_(checkpoint.get_tensor(f"weight.{name}"))
                    moments = {m: checkpoint.get_tensor(f"{m}.{name}").to(self.device) for m in ADAM_MOMENTS}
                    step = torch.tensor(float(self.progress.step), device=self.device)
                    self.optimizer.state[parameter] = {"step": step, **moments}
        except SafetensorError as error:
            raise ValueError(f"{self.checkpoint} is damaged ({error}): start in a new folder") from error

    def identity(self) -> dict[str, Any]:
        """Return the settings that must not change on resume."""
        chosen = {name: getattr(self.options, name) for name in FIXED_ON_RESUME}
        shapes = {name: list(parameter.shape) for name, parameter in self.model.named_parameters()}
        return {**chosen, "batch": self.batch, "corpus_tokens": len(self.order.stream), "shapes": shapes}

    def _check_identity(self, stored: dict[str, Any]) -> None:
        for name, value in self.identity().items():
            if value != stored.get(name, value):
                was, now = ("another", "this") if name == "shapes" else (stored[name], value)
                raise ValueError(
                    f"the checkpoint's {name} is {was}, not {now}: resume with the same settings or choose a new --out"
                )


def portable_command() -> str:
    """Return the command line with absolute paths cut to their last part."""
    arguments = [Path(argument).name if os.path.isabs(argument) else argument for argument in sys.argv[1:]]
    return shlex.join(["python", "scripts/train_reference.py", *arguments])


def git_revision() -> str:
    """Return the git revision of this script's repository, or `unknown`."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def hardware(device: torch.device, threads: int) -> str:
    """Name the machine in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {threads} CPU thread{'s' if threads > 1 else ''}"


def training_report(trainer: Trainer, losses: dict[str, float], rows: Rows, revision: str) -> dict[str, Any]:
    """Collect what training.json holds; `revision` is the one the run started with."""
    options, config = trainer.options, trainer.model.config
    modules = (torch, transformers, tokenizers, np)
    return {
        "command": portable_command(),
        "git_revision": revision,
        "versions": {"python": platform.python_version(), **{m.__name__: m.__version__ for m in modules}},
        "hardware": hardware(trainer.device, options.threads),
        "initialised_from": Path(options.init).name if options.init else "random weights",
        "seed": options.seed,
        "steps": trainer.progress.step,
        "tokens": trainer.tokens,
        "corpus_tokens": len(trainer.order.stream),
        "seconds": trainer.progress.seconds,
        "batch_windows": trainer.batch,
        "window": options.window,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "architecture": {
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "experts": config.num_experts,
            "experts_per_token": config.num_experts_per_tok,
            "expert_width": config.moe_intermediate_size,
            "heads": config.num_attention_heads,
            "key_value_heads": config.num_key_value_heads,
            "vocabulary": config.vocab_size,
        },
        "data": [list(kind) for kind in sorted({(r["domain"], r["source"], r["license"]) for r in rows})],
        "validation_loss": losses,
        "train_log": trainer.progress.train_log,
        "validation_log": trainer.progress.validation_log,
    }


def model_card(report: dict[str, Any]) -> str:
    """Write the model card from the report."""
    return "\n".join(
        [
            "# Reference model",
            "",
            *_architecture_lines(report),
            "",
            "## Training",
            "",
            *_training_lines(report),
            "",
            "## Validation loss",
            "",
            "Cross-entropy in nats per token on the validation split of the corpus, fp32 arithmetic on the saved",
            f"bf16 weights, windows of {report['window']} tokens cut within each domain.",
            "",
            *table(["domain", "loss"], [[name, f"{loss:.3f}"] for name, loss in report["validation_loss"].items()]),
            "",
            "## Data and licences",
            "",
            *table(["domain", "source", "licence"], report["data"]),
            "",
        ]
    )


def _architecture_lines(report: dict[str, Any]) -> list[str]:
    sizes = report["architecture"]
    return [
        f"A small Qwen3-MoE causal language model of {report['parameters'] / 1e6:.1f} M parameters: "
        f"{sizes['layers']} layers, hidden size {sizes['hidden']},",
        f"{sizes['heads']} heads and {sizes['key_value_heads']} key-value heads, {sizes['experts']} experts of width "
        f"{sizes['expert_width']} in each layer, {sizes['experts_per_token']} per token, tied",
        f"embeddings, byte-level BPE of {sizes['vocabulary']} tokens with `{END_OF_TEXT}` = 0. It exists so that tools "
        "and tests run on routers",
        "that learned something. Its text is poor, and it is not meant to be read.",
    ]


def _training_lines(report: dict[str, Any]) -> list[str]:
    return [
        f"- command: `{report['command']}`",
        f"- started from: {report['initialised_from']}",
        f"- {report['steps']} steps of {report['batch_windows']} windows of {report['window']} tokens: "
        f"{report['tokens'] / 1e6:.1f} M tokens, drawn from a corpus of {report['corpus_tokens'] / 1e6:.1f} M",
        f"- hardware: {report['hardware']}, {report['seconds'] / 60:.0f} minutes",
        f"- seed {report['seed']}, git revision {report['git_revision']}",
        "- " + ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        "- bf16 autocast, AdamW (betas .9 and .95), gradient norm 1.0, router auxiliary loss .01;",
        "  the losses along the way are in training.json",
    ]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Write a Markdown table as lines."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


TOKENIZER_DIR = "tokenizer"
FINAL_DIR = "final"
TRAINING_FILE = "training.json"
CARD_FILE = "README.md"


def choose_device(name: str) -> torch.device:
    """Turn --device into a device that is there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device {name} is not available here: use cpu or auto")
    return torch.device(name)


def prepare_output(options: Options) -> Path:
    """Create OUT, or accept it on resume; refuse a folder that holds anything else."""
    out = Path(options.out)
    checkpoint = out / STATE_DIR / CHECKPOINT_FILE
    if options.resume and not checkpoint.is_file():
        raise ValueError(f"there is no {STATE_DIR}/{CHECKPOINT_FILE} in {out}: start without --resume")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is not a folder: choose a new --out")
    if not options.resume and out.exists():
        own_start = not checkpoint.exists() and all(path.name == STATE_DIR for path in out.iterdir())
        if not own_start:
            raise ValueError(f"{out} is not empty: choose a new --out, or --resume if it holds an unfinished run")
    (out / STATE_DIR).mkdir(parents=True, exist_ok=True)
    return out


def start_tokenizer(out: Path, rows: Rows, options: Options) -> PreTrainedTokenizerFast:
    """Return the run's tokenizer: the one in OUT/state on resume, that of --init, or a new one."""
    kept = out / STATE_DIR / TOKENIZER_DIR
    if options.resume:
        return load_tokenizer(kept)
    if options.init:
        tokenizer = load_tokenizer(Path(options.init))
    else:
        sizes = {"vocab": options.vocab, "characters": options.tokenizer_characters}
        tokenizer = train_tokenizer(rows, **sizes, max_length=4 * options.window)
    tokenizer.save_pretrained(kept)
    return tokenizer


def encode_domains(tokenizer: PreTrainedTokenizerFast, rows: Rows) -> dict[str, Stream]:
    """Encode rows to one stream per domain."""
    return {domain: encode(tokenizer, texts) for domain, texts in by_domain(rows).items()}


def save_and_score(
    trainer: Trainer, tokenizer: PreTrainedTokenizerFast, streams: dict[str, Stream], final: Path
) -> dict[str, float]:
    """Save model and tokenizer, and return the validation loss of what was saved."""
    shutil.rmtree(final, ignore_errors=True)
    export = Qwen3MoeForCausalLM(trainer.model.config)
    export.load_state_dict(trainer.model.state_dict())
    export.to(torch.bfloat16).save_pretrained(final)
    tokenizer.save_pretrained(final)
    saved = load_model(final).to(trainer.device)
    choose_kernels(saved, compile_layers=False)
    losses: dict[str, float] = validate(saved, streams, trainer.options.window)
    say("validation " + " ".join(f"{domain} {loss:.3f}" for domain, loss in losses.items()))
    return losses


def finish(trainer: Trainer, losses: dict[str, float], rows: Rows, revision: str, final: Path) -> None:
    """Write log and card, move everything to OUT, and drop the training state."""
    report = training_report(trainer, losses, rows, revision)
    (final / CARD_FILE).write_text(model_card(report), encoding="utf-8")
    (final / TRAINING_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    out = Path(trainer.options.out)
    for path in sorted(final.iterdir()):
        os.replace(path, out / path.name)
    shutil.rmtree(out / STATE_DIR)


def evaluate(options: Options) -> None:
    """Print the validation loss of --init as JSON."""
    tokenizer = load_tokenizer(Path(options.init))
    model = load_model(Path(options.init)).to(choose_device(options.device))
    choose_kernels(model, compile_layers=False)
    streams = encode_domains(tokenizer, read_rows(options.corpus, "validation"))
    print(json.dumps(validate(model, streams, options.window), indent=1))


def train(options: Options) -> None:
    """Train, or go on training, and leave the finished model in --out."""
    device, revision = choose_device(options.device), git_revision()
    rows, validation_rows = read_rows(options.corpus, "train"), read_rows(options.corpus, "validation")
    model = (load_model(Path(options.init)) if options.init else new_model(options)).to(device).train()
    out = prepare_output(options)
    tokenizer = start_tokenizer(out, rows, options)
    streams = encode_domains(tokenizer, validation_rows)
    order = WindowOrder(encode(tokenizer, [row["text"] for row in rows]), options.window, options.seed)
    say(f"{len(order.stream)} training tokens in {order.per_epoch} windows, on {device}")
    choose_kernels(model, compile_layers=options.compile)
    trainer = Trainer(model, order, options)
    if options.resume:
        trainer.load()
    trainer.run(streams)
    trainer.save()
    final = out / STATE_DIR / FINAL_DIR
    finish(trainer, save_and_score(trainer, tokenizer, streams, final), rows, revision, final)


def main(arguments: list[str]) -> int:
    """Run the command line; 0, or 2 with one line on stderr that says what was wrong."""
    try:
        options = parse_options((__doc__ or "").splitlines()[0], arguments)
        torch.set_num_threads(options.threads)
        keep_freed_memory()
        if options.evaluate:
            evaluate(options)
        else:
            train(options)
    except ValueError as error:
        print(f"train_reference: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
