"""What lossy policies cost a model: perplexity, agreement and KL of decoding with them (rows A24, D10).

Texts are read as a deployment reads them: a prefill, then one decode step per token, the right token given each time.
What acts in decode steps only, or depends on what a cache holds, costs nothing in one forward over a whole text.

N windows, B of them decoded together, W tokens per window, V vocabulary, K experts per token; S tokens of a text, T of
them in a forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from expertcast.predictors import ExpertcastError, MoEView
from expertcast.predictors.messages import Json, Progress
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.links.base import InstantLink
from expertcast.runtime.offloading import OffloadedModel, offload
from expertcast.runtime.policies import Policies
from expertcast.runtime.policies.settings import ALWAYS, AUTO
from expertcast.runtime.quality.forecasts import EXACT, Pass, RunScores
from expertcast.runtime.simulation.trace import PREFILL, prefilled

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM


@torch.no_grad()
def forwards(model: PreTrainedModel, ids_BS: Tensor, prefill: int, *, logits_to_keep: int = 0) -> Iterator[Tensor]:
    """Logits [B, T, V] of each forward: one over the prefill, then one per token.

    Args:
        model: resident or offloaded.
        ids_BS: the texts, all of one length.
        prefill: tokens of each that the first forward takes together.
        logits_to_keep: of the last so many tokens of a forward; 0: of all.
    """
    ids_BS = ids_BS.to(next(model.parameters()).device)
    cache = DynamicCache(config=model.config)
    for ids_BT in (ids_BS[:, :prefill], *torch.split(ids_BS[:, prefill:], 1, dim=1)):
        if ids_BT.shape[1]:
            done = model(input_ids=ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=logits_to_keep)
            yield done.logits


def read_texts(
    model: PreTrainedModel, ids_BS: Tensor, prefill: int, *, prefilled: Callable[[], None] | None = None
) -> Tensor:
    """Log probabilities [B, S - prefill + 1, V] of what follows the prefill and of what follows each token after it.

    Args:
        model, ids_BS, prefill: as for :func:`forwards`.
        prefilled: called between the prefill and the first decode step.
    """
    steps = []
    for logits_B1V in forwards(model, ids_BS, prefill, logits_to_keep=1):
        steps.append(logits_B1V[:, -1].float().log_softmax(dim=-1))
        if len(steps) == 1 and prefilled is not None:
            prefilled()
    return torch.stack(steps, dim=1)


Opener: TypeAlias = Callable[[OffloadConfig], OffloadedModel]
"""Offloads a model."""


def measure_policies(
    model: PreTrainedModel | Opener,
    windows_NW: Tensor,
    runs: Mapping[str, OffloadConfig],
    *,
    prefill: int = PREFILL,
    batch: int = 1,
) -> Json:
    """Decode windows token by token, the right token given each time, with each set of policies and without any.

    What a lossy policy does depends on what the cache holds, so every token is a decode step of its own, and the
    cache lives on from window to window. Copies are made at once: no decision depends on the speed of this machine.

    A window is read as the simulator reads a document (:func:`expertcast.runtime.simulation.trace.prefilled`): a policy
    that also leaves experts out of the prefill pays for it here with the prefill that it saves time in there.

    Args:
        model: the model, its experts in memory; or what opens it, offloaded as it is told, for one that is larger.
        windows_NW: token ids; every token of a window after the prefill is scored.
        runs: how the model is offloaded, by name; where the link is left open, copies are made at once.
        prefill: tokens of each window that are read at once; half of a window that is shorter than twice as many.
        batch: windows decoded together; what is left over at the end is left out.

    Returns:
        `tokens` scored, `prefill` and `batch` as they were, and `runs.<name>` with `perplexity`, `top1_agreement`, `kl`
        (nats per token, exact || run), `executed_recall` (share of the exact run's experts that were executed),
        `hit_rate`, `misses`, `skipped` and `bytes` (moved per scored token); `exact` is always among them.

    Raises:
        ExpertcastError: fewer windows than a batch, or windows without a token to score.
    """
    if windows_NW.dim() != 2 or prefill < 1 or windows_NW.shape[1] < 3 or not 1 <= batch <= windows_NW.shape[0]:
        raise ExpertcastError(
            f"windows of shape {list(windows_NW.shape)} with prefill={prefill}, batch={batch}: give a batch of windows "
            "or more, each of 3 tokens or more, and numbers from 1"
        )
    prefill = prefilled(windows_NW.shape[1], prefill)
    windows = [rows_BW for rows_BW in torch.split(windows_NW, batch) if len(rows_BW) == batch]
    opener = partial(offload, model) if isinstance(model, PreTrainedModel) else model
    slots = max((config.slots for config in runs.values() if config.slots), default=None)
    with Progress("decoding with policies", total=(1 + len(runs)) * len(windows), unit="batch") as bar:
        exact = _passes(opener, windows, OffloadConfig(policies=Policies(), slots=slots), prefill, bar)
        results = {EXACT: _result(windows, exact, exact, prefill)}
        for name, config in runs.items():
            results[name] = _result(windows, _passes(opener, windows, config, prefill, bar), exact, prefill)
    scored = len(windows) * batch * (windows_NW.shape[1] - prefill)
    return {"tokens": scored, "prefill": prefill, "batch": batch, "runs": results}


_Run = tuple[list[Pass], Counter[str]]


def _passes(
    opener: Opener,
    windows: Sequence[Tensor],
    config: OffloadConfig,
    prefill: int,
    bar: Progress,
) -> _Run:
    """The pass of each batch of windows, and the counters of all decode steps."""
    totals: Counter[str] = Counter()
    passes = []
    if config.link == "auto":
        every = ALWAYS if config.forecasts == AUTO else config.forecasts  # auto would leave all out over such a link
        config = replace(config, link=InstantLink(), bandwidth=None, latency=0.0, forecasts=every)
    with opener(config) as offloaded:
        for ids_BW in windows:
            with _recorded(offloaded.view) as executed:

                def forget(rows_of_layers: list[list[Tensor]] = executed) -> None:
                    for rows in rows_of_layers:
                        rows.clear()
                    offloaded.reset_stats()

                log_probs_BSV = read_texts(offloaded.model, ids_BW, prefill, prefilled=forget)
            totals.update(asdict(offloaded.stats.total))
            passes.append(Pass(log_probs_BSV, [torch.cat(rows) for rows in executed], []))
            bar.update()
    return passes, totals


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


def _result(windows: Sequence[Tensor], run: _Run, exact: _Run, prefill: int) -> dict[str, float]:
    scores = RunScores(len(run[0][0].executed))
    for ids_BW, passed, reference in zip(windows, run[0], exact[0], strict=True):
        # the first distribution is over the token after the prefill; its own row of ids is never looked at
        scores.add(passed, reference, ids_BW[:, prefill - 1 :].to(passed.log_probs_BWV.device))
    counts, tokens = run[1], sum(ids_BW[:, prefill:].numel() for ids_BW in windows)
    return {
        **scores.as_dict(),
        "executed_recall": float(scores.executed.per_row().mean()),
        "hit_rate": counts["hits"] / max(counts["requests"], 1),
        "misses": counts["misses"] / tokens,
        "skipped": counts["skipped"] / tokens,
        "bytes": counts["bytes_moved"] / tokens,
    }


def harness_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, prefill: int = PREFILL, **options: Any
) -> HFLM:
    """A model for `lm_eval.simple_evaluate(model=...)` of EleutherAI's harness (row B18).

    The harness's own `HFLM(pretrained=model)` takes an offloaded model too, but scores likelihoods with one forward
    over context and answer. To the runtime that is a prefill, in which what acts in decode steps costs nothing. This
    class reads the second half of each text token by token.

    Args:
        model: offloaded for as long as the evaluation runs; of :func:`expertcast.load_offloaded`, its `.model`.
        tokenizer: the model's.
        prefill: tokens of each text that are read at once when a likelihood is asked for, half of a text that is
            shorter than twice as many; the others are decode steps. Generation is transformers' own.
        options: further ones of the harness's `HFLM`, such as `batch_size`.

    Raises:
        ExpertcastError: the harness is not installed, or a prefill of no token.
    """
    if prefill < 1:
        raise ExpertcastError(f"prefill={prefill}: give 1 token or more")
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ExpertcastError("lm-eval is not installed: pip install 'expertcast[eval]'") from error

    class Decoding(HFLM):  # type: ignore[misc]
        """Likelihoods from a prefill and decode steps."""

        def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
            """Logits [B, S, V]; shorter texts of a batch are filled up on the right, where nobody looks."""
            assert attn_mask is None, "an encoder-decoder model"
            return torch.cat(list(forwards(self.model, inps, max(1, prefilled(inps.shape[1], prefill)))), dim=1)

    return Decoding(pretrained=model, tokenizer=tokenizer, backend="causal", **options)
