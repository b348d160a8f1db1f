"""The training loop: schedule, step, log, checkpoint.

Legend of shape suffixes: B windows in a batch, T tokens in a window.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import Qwen3MoeForCausalLM

from .data import Stream, WindowOrder
from .model import validate
from .options import Options

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
