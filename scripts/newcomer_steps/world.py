"""The model that every tool is tried on, and what it means that a tool does the same on it when it is offloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import expertcast
from expertcast.predictors import ExpertcastError

PROMPTS = ("The old man went down to the river and", "To be, or not to be,", "In the beginning")
EITHER, MODEL_ONLY = "`offloaded` or `offloaded.model`", "`offloaded.model`"


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a tool."""

    takes: str
    """What it was given: the offload, its model, or either."""
    identical: bool | None
    """Whether it did the same as on the resident model, to the bit; None where there is nothing to compare with."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A model with its tokenizer, resident."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    new_tokens: int = 16
    slots: int = 384
    """As many as any step here needs: within a step's experts exact mode is bit for bit."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Prompts of different lengths, padded on the left."""
        self.tokenizer.padding_side = "left"
        return dict(self.tokenizer(list(PROMPTS), return_tensors="pt", padding=True).to(self.model.device))

    def compare(self, run: Callable[[Any], Any], note: str = "") -> Found:
        """Run a tool on the resident model, on the offload and on the offload's model.

        Args:
            run: the tool; returns what can be compared by :func:`same`.
            note: of what is found.

        Raises:
            Exception: whatever the tool raises on `offloaded.model`; on the offload it is the note.
        """
        expected = run(self.model)
        with expertcast.offload(self.model, slots=self.slots, predictor="next_norm") as offloaded:
            identical = same(run(offloaded.model), expected)
            requests = offloaded.stats.total.requests
            try:
                identical &= same(run(offloaded), expected)
            except Exception as error:  # whatever a tool makes of what is no model
                line = str(error).partition("\n")[0]
                return Found(MODEL_ONLY, identical, note or f"on `offloaded`: {type(error).__name__}: {line}")
            if not requests:
                raise ExpertcastError("the tool never ran an offloaded layer: it was not tried")
        return Found(EITHER, identical and same(run(self.model), expected), note)


def same(one: Any, other: Any) -> bool:
    """Whether two results are the same, tensors bit by bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
