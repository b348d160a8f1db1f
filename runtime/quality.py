"""Quality of executed forecasts and of lossy policies: perplexity, agreement and KL divergence against exact execution.

N windows, B windows per batch, W tokens per window, T = B x W tokens, V vocabulary size, L MoE layers, E routed experts
per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import torch
from torch import Tensor
from torchmetrics import MetricCollection
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from expertcast.data.batch import RouterCall
from expertcast.data.experts import experts_of
from expertcast.data.models import check_token_ids
from expertcast.data.taps import RouterTaps
from expertcast.data.text import token_ids
from expertcast.predictors import ExpertcastError, MoEView, Predictor
from expertcast.predictors.messages import Json, Progress
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.engine.front import speculate
from expertcast.runtime.links.base import InstantLink
from expertcast.runtime.offloading import OffloadedModel, offload
from expertcast.runtime.policies import Policies
from expertcast.runtime.policies.settings import ALWAYS, AUTO
from expertcast.runtime.simulation.trace import PREFILL, prefilled
from expertcast.training.metrics import Agreement, Divergence, Perplexity, Recall

EXACT = "exact"
LOGITS = 1 << 27
"""Maximum number of logits per pass: half a gigabyte, of which there are several copies."""


@dataclass(slots=True)
class Pass:
    """Results of one pass over a batch of windows."""

    log_probs_BWV: Tensor
    executed: list[Tensor]
    """Executed ids of each layer [T, K]."""
    logits: list[Tensor]
    """Router logits of each layer [T, E]; empty for speculative passes."""


class RunScores:
    """Metrics of one run on one domain.

    Args:
        layers: number of MoE layers, L.
    """

    def __init__(self, layers: int) -> None:
        # every process measures all windows
        self.language = MetricCollection(
            {
                "perplexity": Perplexity(),
                "top1_agreement": Agreement(),
                "kl": Divergence(),
            },
            compute_groups=False,
        )
        self.executed = Recall(layers)

    def add(self, run: Pass, exact: Pass, ids_BW: Tensor) -> None:
        """Score a pass by its distributions after each token but the last of each window.

        Args:
            run: the pass; may be `exact` itself.
            exact: pass of the exact model over the same windows.
            ids_BW: token ids of the windows.
        """
        reference_TV = exact.log_probs_BWV[:, :-1].flatten(0, 1)
        scored_TV = reference_TV if run is exact else run.log_probs_BWV[:, :-1].flatten(0, 1)
        self.language.to(reference_TV.device).update(
            log_probs_TV=scored_TV, reference_TV=reference_TV, token_T=ids_BW[:, 1:].flatten()
        )
        self.executed.to(reference_TV.device)
        for layer, (ids_TK, true_TK) in enumerate(zip(run.executed, exact.executed, strict=True)):
            self.executed.update(layer, ids_TK.to(reference_TV.device), true_TK.to(reference_TV.device))

    def as_dict(self) -> dict[str, float]:
        """Return `perplexity`, `top1_agreement` and `kl`."""
        return {name: float(value) for name, value in self.language.compute().items()}


def _report(parts: Mapping[str, RunScores]) -> Json:
    """Return the scores of a run over all domains, and by domain."""
    first, *others = parts.values()
    total = deepcopy(first)
    for part in others:
        for name, metric in total.language.items():
            metric.merge_state(part.language[name])
        total.executed.merge_state(part.executed)
    recall: list[float] = total.executed.per_row()[1:].tolist()
    return {
        **total.as_dict(),
        "executed_recall": {"mean": sum(recall) / len(recall) if recall else 1.0, "per_layer": recall},
        "domains": {domain: part.as_dict() for domain, part in parts.items()},
    }


@dataclass(slots=True, kw_only=True)
class QualityRun:
    """Configuration of speculative execution: arguments of :func:`expertcast.runtime.engine.front.speculate`."""

    predictor: Predictor
    """Predictor whose forecasts are executed."""
    layers: Sequence[int] | None = None
    """Layers that execute their forecast (hybrid mode); None: all layers with a forecast."""
    ahead: int = 1
    """Number of layers between a forecast and its target."""


def measure_quality(
    model: PreTrainedModel,
    view: MoEView,
    windows_by_domain: Mapping[str, Tensor],
    runs: Mapping[str, QualityRun],
    *,
    batch_size: int = 8,
) -> Json:
    """Compare speculative execution with the exact model on the same windows, with teacher forcing.

    All tokens of a window but the first are scored. Forecasts are executed at every position, and each layer's forecast
    is based on what the earlier layers executed. A predictor that reads the routing of the previous token gets that of
    the exact run, because one pass processes the whole window.

    Args:
        model: resident or offloaded model; its offload mode is ignored.
        view: norms and routers of the model.
        windows_by_domain: token ids [N, W] by domain.
        runs: configurations by name; the name `exact` is reserved.
        batch_size: maximum number of windows per pass; fewer if the logits would exceed 2^27 values.

    Returns:
        `tokens` (number of scored tokens), and `runs.<name>` with `perplexity`, `top1_agreement`, `kl` (nats per token,
        exact || run), `executed_recall` (share of the exact run's experts that this run executed: `mean`, and
        `per_layer` for layers 1 to L - 1), and `domains.<domain>` with the first three.
        `runs.exact` is the exact model.

    Raises:
        ExpertcastError: windows have fewer than two tokens.
    """
    if any(windows_NW.shape[1] < 2 for windows_NW in windows_by_domain.values()):
        raise ExpertcastError("windows of one token have no token to score: give --window 2 or more")
    scores = {name: {domain: RunScores(len(view)) for domain in windows_by_domain} for name in (EXACT, *runs)}
    device = next(model.parameters()).device
    vocabulary = model.config.get_text_config().vocab_size
    for windows_NW in windows_by_domain.values():
        check_token_ids(windows_NW, model.config)
    batches = [
        (domain, windows_BW)
        for domain, windows_NW in windows_by_domain.items()
        for windows_BW in torch.split(windows_NW, max(1, min(batch_size, LOGITS // (vocabulary * windows_NW.shape[1]))))
    ]
    with (
        experts_of(model, view).reading(),
        Progress("executing forecasts", total=len(batches) * len(scores), unit="batch") as bar,
    ):
        for domain, windows_BW in batches:
            ids_BW = windows_BW.to(device)
            exact = _exact(model, view, ids_BW)
            scores[EXACT][domain].add(exact, exact, ids_BW)
            bar.update()
            for name, run in runs.items():
                scores[name][domain].add(_speculative(model, view, run, ids_BW, exact), exact, ids_BW)
                bar.update()
    return {
        "tokens": sum(windows_NW[:, 1:].numel() for windows_NW in windows_by_domain.values()),
        "runs": {name: _report(parts) for name, parts in scores.items()},
    }


def text_windows(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], *, length: int, count: int) -> Tensor:
    """Tokenize texts and cut them into windows; a window lies within one text, and shorter ends are left out.

    Args:
        tokenizer: tokenizer of the model.
        texts: texts; read only as far as needed.
        length: number of tokens of a window.
        count: maximum number of windows.

    Returns:
        Token ids [N, length].

    Raises:
        ExpertcastError: no text has `length` tokens.
    """
    windows: list[list[int]] = []
    for text in texts:
        if len(windows) >= count:
            break
        ids = next(token_ids(tokenizer, [text], length * (count - len(windows))))
        windows += [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    if not windows:
        raise ExpertcastError(f"no text has {length} tokens: give longer texts or a smaller window")
    return torch.tensor(windows[:count])


def _exact(model: PreTrainedModel, view: MoEView, ids_BW: Tensor) -> Pass:
    executed: list[Tensor] = []
    logits: list[Tensor] = []

    def on_router(call: RouterCall) -> None:
        executed.append(call.ids_TK)
        logits.append(call.logits_TE)

    with closing(RouterTaps(model, view, on_router)):
        return Pass(_log_probs(model, ids_BW), executed, logits)


def _speculative(model: PreTrainedModel, view: MoEView, run: QualityRun, ids_BW: Tensor, exact: Pass) -> Pass:
    executed: list[Tensor] = []
    with speculate(
        model,
        view,
        run.predictor,
        layers=run.layers,
        ahead=run.ahead,
        observe=lambda _call, ids_TK: executed.append(ids_TK),
    ) as speculator:
        if run.predictor.uses_previous_token:
            speculator.previous_logits_TLE = previous_logits(exact.logits, ids_BW)
        return Pass(_log_probs(model, ids_BW), executed, [])


def previous_logits(logits: Sequence[Tensor], ids_BW: Tensor) -> Tensor:
    """Return the router logits of the previous token of each window [T, L, E]; NaN for its first token.

    Args:
        logits: router logits of each layer [T, E].
        ids_BW: token ids of the windows.
    """
    stacked_TLE = torch.stack(list(logits), dim=1)
    shifted = stacked_TLE.view(*ids_BW.shape, *stacked_TLE.shape[1:]).roll(1, dims=1)
    shifted[:, 0] = float("nan")
    return shifted.view_as(stacked_TLE)


def _log_probs(model: PreTrainedModel, ids_BW: Tensor) -> Tensor:
    with torch.no_grad():
        logits_BWV: Tensor = model(input_ids=ids_BW, use_cache=False).logits
    return logits_BWV.float().log_softmax(dim=-1)


# Quality of a model with lossy policies: perplexity, agreement and KL divergence while decoding.
#
# Sequences are processed as in deployment: a prefill, then one decode step per token, with the right token as input.
# One pass over a whole sequence would hide the effect of policies that act in decode steps or depend on the cache.
#
# N windows, B windows decoded together, W tokens per window, V vocabulary size, K experts per token, S tokens of a
# sequence, T tokens of a step.


@torch.no_grad()
def decode_log_probs(model: PreTrainedModel, ids_BS: Tensor, prefill: int) -> Tensor:
    """Return the log probabilities of the next token after the prefill and after each later token.

    Args:
        model: resident or offloaded model.
        ids_BS: token ids of sequences of equal length.
        prefill: number of tokens in the prefill.

    Returns:
        Log probabilities [B, S - prefill + 1, V], float32.
    """
    ids_BS = ids_BS.to(next(model.parameters()).device)
    cache, steps = DynamicCache(config=model.config), []
    for ids_BT in (ids_BS[:, :prefill], *ids_BS[:, prefill:, None].unbind(1)):
        logits_B1V = model(input_ids=ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        steps.append(logits_B1V[:, -1].float().log_softmax(dim=-1))
    return torch.stack(steps, dim=1)


Opener: TypeAlias = Callable[[OffloadConfig], OffloadedModel]
"""Returns a model offloaded with a configuration."""


def measure_policies(
    model: PreTrainedModel | Opener,
    windows_NW: Tensor,
    runs: Mapping[str, OffloadConfig],
    *,
    prefill: int = PREFILL,
    batch: int = 1,
) -> Json:
    """Measure the quality of decoding with several offload configurations against the exact model.

    Windows are decoded token by token, with the right token as input. The cache persists between windows, since lossy
    policies depend on it. Copies take no time by default, so that no decision depends on the speed of the machine. The
    length of the prefill follows the rule of the simulator (:func:`expertcast.runtime.simulation.trace.prefilled`).

    Args:
        model: model with its experts in memory, or a function that returns an offloaded model for a configuration.
        windows_NW: token ids [N, W]; all tokens after the prefill are scored.
        runs: offload configurations by name; `link="auto"` means copies that take no time.
        prefill: number of tokens in the prefill; half of a window shorter than twice this number.
        batch: number of windows decoded together; an incomplete last batch is left out.

    Returns:
        `tokens` (number of scored tokens), `prefill`, `batch`, and `runs.<name>` with `perplexity`, `top1_agreement`,
        and `kl` (nats per token, exact || run); `runs.exact` is the exact model.

    Raises:
        ExpertcastError: there are fewer windows than a batch, or the windows have fewer than 3 tokens.
    """
    if windows_NW.dim() != 2 or prefill < 1 or windows_NW.shape[1] < 3 or not 1 <= batch <= windows_NW.shape[0]:
        raise ExpertcastError(
            f"windows of shape {list(windows_NW.shape)} with prefill={prefill}, batch={batch}: give at least one batch "
            "of windows of 3 tokens or more, and prefill and batch from 1"
        )
    prefill = prefilled(windows_NW.shape[1], prefill)
    windows = [rows_BW for rows_BW in torch.split(windows_NW, batch) if len(rows_BW) == batch]
    opener = partial(offload, model) if isinstance(model, PreTrainedModel) else model
    slots = max((config.slots for config in runs.values() if config.slots), default=None)
    configs = {EXACT: OffloadConfig(policies=Policies(), slots=slots), **runs}
    with (
        TemporaryDirectory() as kept,
        Progress("decoding with policies", total=len(configs) * len(windows), unit="batch") as bar,
    ):
        results = {
            name: _run(opener, windows, config, prefill, bar, Path(kept), exact=number == 0)
            for number, (name, config) in enumerate(configs.items())
        }
    scored = len(windows) * batch * (windows_NW.shape[1] - prefill)
    return {"tokens": scored, "prefill": prefill, "batch": batch, "runs": results}


def _run(
    opener: Opener, windows: Sequence[Tensor], config: OffloadConfig, prefill: int, bar: Progress, kept: Path, *,
    exact: bool,
) -> dict[str, float]:  # fmt: skip
    """Decode all windows with one configuration and score them against the exact run.

    Args:
        opener, windows, config, prefill: as for :func:`measure_policies`.
        bar: counts batches.
        kept: folder of the exact run's results by batch. A file each: over a large vocabulary, the distributions of all
            tokens exceed memory.
        exact: whether this is the exact run, which writes these files.
    """
    if config.link == "auto":
        forecasts = ALWAYS if config.forecasts == AUTO else config.forecasts  # `auto` makes none over such a link
        config = replace(config, link=InstantLink(), bandwidth=None, latency=0.0, forecasts=forecasts)
    with opener(config) as offloaded:
        scores = RunScores(0)
        for number, ids_BW in enumerate(windows):
            log_probs_BSV = decode_log_probs(offloaded.model, ids_BW, prefill)
            run = reference = Pass(log_probs_BSV, [], [])
            if exact:
                torch.save(log_probs_BSV, kept / f"{number}.pt")
            else:
                reference = Pass(torch.load(kept / f"{number}.pt"), [], [])
            # the first distribution is over the token after the prefill, so the first id is not scored
            scores.add(run, reference, ids_BW[:, prefill - 1 :].to(log_probs_BSV.device))
            bar.update()
    return scores.as_dict()
