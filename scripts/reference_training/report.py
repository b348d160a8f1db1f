"""What is written beside the weights: training.json and the model card."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

from .data import END_OF_TEXT, Rows
from .trainer import Trainer


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
