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

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from reference_training.data import (
    Rows,
    Stream,
    WindowOrder,
    by_domain,
    encode,
    load_tokenizer,
    read_rows,
    train_tokenizer,
)
from reference_training.model import choose_kernels, keep_freed_memory, load_model, new_model, validate
from reference_training.options import Options, parse_options
from reference_training.report import git_revision, model_card, training_report
from reference_training.trainer import CHECKPOINT_FILE, STATE_DIR, Trainer, say
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

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
