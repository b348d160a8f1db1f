"""Options of a command that serves: slots that are full before the first request."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from transformers import PreTrainedTokenizerBase

from expertcast.commands.options import Option
from expertcast.predictors import ExpertcastError
from expertcast.runtime.offloaded import OffloadedModel
from expertcast.runtime.serving.hot_experts import HotExperts
from expertcast.runtime.serving.warm import prepare, read_prompts


@dataclass(frozen=True, kw_only=True)
class WarmOptions:
    """Which files fill slots before the first request."""

    warm: Annotated[Path | None, Option(metavar="FILE")] = None
    """Prompts to run first, one per line, or a .jsonl file of {"prompt": ...}."""
    hot_experts: Annotated[Path | None, Option(metavar="FILE")] = None
    """Begin with the experts that the last run used most; written at the end."""

    def prompts(self) -> list[str]:
        """Those of the file; to be read before a model is loaded.

        Raises:
            ExpertcastError: there is no such file, or not what it should be.
        """
        return [] if self.warm is None else read_prompts(self.warm)

    @contextmanager
    def warmed(
        self, offloaded: OffloadedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]
    ) -> Iterator[list[str]]:
        """Slots are filled, and the hot experts written at the end, however it comes; no forward runs then.

        Yields:
            One line of each thing that was done, or left out.
        """
        hot = None if self.hot_experts is None else HotExperts(self.hot_experts, offloaded)
        said = prepare(offloaded, tokenizer, prompts, hot)
        failed = True
        try:
            yield said
            failed = False
        finally:
            try:
                if hot is not None:
                    hot.save()
            except ExpertcastError as error:
                if not failed:
                    raise
                print(f"hot experts are not written: {error}", file=sys.stderr)  # what failed first is the error
