"""Time per output token of one offload under several drafts, in alternation, against plain exact decoding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.predictors.plain import Json
from expertcast.runtime.benchmarking.bench import BenchSettings
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.drafts.names import NONE, check_draft
from expertcast.runtime.offloaded import OffloadedModel
from expertcast.runtime.offloading import offload


def bench_drafts(
    model: PreTrainedModel, prompt_ids: Tensor, config: OffloadConfig, drafts: Sequence[str], settings: BenchSettings,
    *, say: Callable[[str], None] = lambda _text: None,
) -> Json:  # fmt: skip
    """Generate greedily with each draft in turn; a first round, not counted, teaches the governor.

    Args:
        model: which decides for itself what it routes to.
        prompt_ids: [1, S] on its device.
        config: how it is offloaded.
        drafts: their names; plain decoding is always among them.
        settings: how many tokens, after the first, and how often.
        say: told of progress, a line at a time.

    Returns:
        By draft `tpot_s`, the median; `over_none`, plain decoding's time over it; `memory_bytes` that it holds beside
        the slots; `bytes_per_token` over the link; `identical` tokens; and what its governor says
        (:meth:`expertcast.runtime.drafts.governor.Governor.report`) as `governor`.

    Raises:
        ExpertcastError: as :meth:`OffloadedModel.generate`.
    """
    new_tokens, repetitions = settings.new_tokens, settings.repetitions
    names = list(dict.fromkeys([NONE, *drafts]))
    for name in names:
        check_draft(name)
    times: dict[str, list[float]] = {name: [] for name in names}
    moved: dict[str, list[float]] = {name: [] for name in names}
    texts: dict[str, Tensor] = {}
    governors: dict[str, Json] = {}
    with offload(model, config) as offloaded:
        for repetition in range(repetitions + 1):
            shift = repetition % len(names)
            for name in names[shift:] + names[:shift]:
                say(f"draft {name}, " + (f"repetition {repetition} of {repetitions}" if repetition else "first round"))
                if repetition == 0 and offloaded.drafting is not None:
                    offloaded.drafting.reset()
                first_s = _generate(offloaded, prompt_ids, 1, NONE)[0]
                before = offloaded.link.bytes_moved
                seconds, text = _generate(offloaded, prompt_ids, new_tokens + 1, name)
                if repetition == 0:
                    texts[name] = text
                    continue
                times[name].append((seconds - first_s) / new_tokens)
                moved[name].append((offloaded.link.bytes_moved - before) / new_tokens)
                governors[name] = offloaded.stats.as_dict().get("drafts", {})
        memory = {} if offloaded.drafting is None else offloaded.drafting.memory
    plain_s = statistics.median(times[NONE])
    return {
        name: {
            "tpot_s": statistics.median(times[name]),
            "over_none": plain_s / statistics.median(times[name]),
            "memory_bytes": memory.get(name, 0),
            "bytes_per_token": statistics.median(moved[name]),
            "identical": torch.equal(texts[name], texts[NONE]),
            "governor": governors[name] if name != NONE else {},
        }
        for name in names
    }


def _generate(offloaded: OffloadedModel, prompt_ids: Tensor, tokens: int, draft: str) -> tuple[float, Tensor]:
    """Seconds, and the ids [1, S + tokens]."""
    start = time.perf_counter()
    ids = offloaded.generate(
        prompt_ids, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, draft=draft,
    )  # fmt: skip
    text: Tensor = ids.cpu()
    return time.perf_counter() - start, text
