"""What lossy policies cost a model: perplexity, agreement and KL of decoding with them (rows A24, D10).

N windows, W tokens per window, V vocabulary, K experts per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from expertcast.predictors import ExpertcastError, MoEView
from expertcast.predictors.plain import Json
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.links.base import InstantLink
from expertcast.runtime.offloading import offload
from expertcast.runtime.policies import Policies
from expertcast.runtime.quality.forecasts import Pass, RunScores


def measure_policies(
    model: PreTrainedModel,
    windows_NW: Tensor,
    runs: Mapping[str, OffloadConfig],
    *,
    prefill: int = 16,
    progress: Callable[[], None] | None = None,
) -> Json:
    """Decode windows token by token, the right token given each time, with each set of policies and without any.

    What a lossy policy does depends on what the cache holds, so every token is a decode step of its own, and the
    cache lives on from window to window. Copies are made at once: no decision depends on the speed of this machine.

    Args:
        model: the model, its experts in memory.
        windows_NW: token ids; every token of a window after the prefill is scored.
        runs: how the model is offloaded, by name; where the link is left open, copies are made at once.
        prefill: tokens of each window that are read at once.
        progress: called after each window of each run.

    Returns:
        `tokens` scored, and `runs.<name>` with `perplexity`, `top1_agreement`, `kl` (nats per token, exact || run),
        `executed_recall` (share of the exact run's experts that were executed), `hit_rate`, `misses`, `skipped` and
        `bytes` (moved per scored token); `exact` is always among them.

    Raises:
        ExpertcastError: no windows, or windows without a token to score.
    """
    if windows_NW.dim() != 2 or not 1 <= prefill < windows_NW.shape[1] - 1:
        raise ExpertcastError(
            f"windows of shape {list(windows_NW.shape)} with prefill={prefill}: give [windows, tokens] of prefill + 2 "
            "tokens or more"
        )
    exact = _passes(model, windows_NW, OffloadConfig(policies=Policies()), prefill, progress)
    results = {"exact": _result(windows_NW, exact, exact, prefill)}
    for name, config in runs.items():
        results[name] = _result(windows_NW, _passes(model, windows_NW, config, prefill, progress), exact, prefill)
    return {"tokens": windows_NW.shape[0] * (windows_NW.shape[1] - prefill), "runs": results}


_Run = tuple[list[Pass], Counter[str]]


def _passes(
    model: PreTrainedModel, windows_NW: Tensor, config: OffloadConfig, prefill: int, progress: Callable[[], None] | None
) -> _Run:
    """Each window's pass, and the counters of all decode steps."""
    totals: Counter[str] = Counter()
    passes = []
    link = InstantLink() if config.link == "auto" else config.link
    with offload(model, config, link=link) as offloaded:
        for window_W in windows_NW:
            cache = DynamicCache(config=model.config)
            with _recorded(offloaded.view) as executed:
                steps = [_step(model, window_W[:prefill], cache)]
                for rows in executed:
                    rows.clear()
                offloaded.reset_stats()
                steps += [_step(model, token_1, cache) for token_1 in window_W[prefill:].split(1)]
            totals.update(asdict(offloaded.stats.total))
            passes.append(Pass(torch.stack(steps, dim=0).unsqueeze(0), [torch.cat(rows) for rows in executed], []))
            if progress is not None:
                progress()
    return passes, totals


@torch.no_grad()
def _step(model: PreTrainedModel, ids_T: Tensor, cache: DynamicCache) -> Tensor:
    """Log probabilities [V] of the token after these."""
    ids_1T = ids_T.unsqueeze(0).to(next(model.parameters()).device)
    logits_V: Tensor = model(input_ids=ids_1T, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
    return logits_V.float().log_softmax(dim=-1)


@contextmanager
def _recorded(view: MoEView) -> Iterator[list[list[Tensor]]]:
    """Per layer the ids [T, K] that its experts are called with."""
    executed: list[list[Tensor]] = [[] for _ in view]
    with ExitStack() as stack:
        for layer in view:

            def keep(_experts: nn.Module, args: tuple[Tensor, ...], index: int = layer.index) -> None:
                executed[index].append(args[1])

            stack.callback(layer.experts.register_forward_pre_hook(keep).remove)
        yield executed


def _result(windows_NW: Tensor, run: _Run, exact: _Run, prefill: int) -> dict[str, float]:
    scores = RunScores(len(run[0][0].executed))
    for window_W, passed, reference in zip(windows_NW, run[0], exact[0], strict=True):
        # the first distribution is over the token after the prefill; its own row of ids is never looked at
        scores.add(passed, reference, window_W[prefill - 1 :].unsqueeze(0).to(passed.log_probs_BWV.device))
    counts, tokens = run[1], windows_NW.shape[0] * (windows_NW.shape[1] - prefill)
    return {
        **scores.as_dict(),
        "executed_recall": float(scores.executed.per_row().mean()),
        "hit_rate": counts["hits"] / max(counts["requests"], 1),
        "misses": counts["misses"] / tokens,
        "skipped": counts["skipped"] / tokens,
        "bytes": counts["bytes_moved"] / tokens,
    }
