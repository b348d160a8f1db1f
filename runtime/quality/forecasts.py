"""What speculative execution costs the model: perplexity, agreement and KL against exact execution (row B18).

N windows, B windows per batch, W tokens per window, T = B x W tokens, V vocabulary, L MoE layers, E routed experts
per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from expertcast.data.batch import RouterCall
from expertcast.data.experts import experts_of
from expertcast.data.moe_layers import experts_implementation
from expertcast.data.taps import RouterTaps
from expertcast.predictors import ExpertcastError, MoEView, Predictor
from expertcast.predictors.messages import Json, Progress
from expertcast.predictors.view import MoELayer
from expertcast.runtime.drafts.quantised import QuantisedExperts
from expertcast.runtime.engine.front import speculate
from expertcast.training.metrics import Agreement, Divergence, Perplexity, Recall

EXACT = "exact"
LOGITS = 1 << 27
"""Of one forward at most: half a gigabyte, several times over."""


@dataclass(slots=True)
class Pass:
    """One forward over [B, W]."""

    log_probs_BWV: Tensor
    executed: list[Tensor]
    """Per layer the executed ids [T, K]."""
    logits: list[Tensor]
    """Per layer the router's logits [T, E]; of the exact pass only."""


class RunScores:
    """The metrics of one run on one domain."""

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
        """Score a run of these windows against the exact model's (which may be scored itself): the distributions
        after each token but the last of a window.
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
        """`perplexity`, `top1_agreement` and `kl`."""
        return {name: float(value) for name, value in self.language.compute().items()}


def _report(parts: Mapping[str, RunScores]) -> Json:
    """The scores of a run, given by domain: on all together, and on each."""
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
    """One way to execute the model; the arguments of :func:`expertcast.runtime.engine.speculation.speculate`."""

    predictor: Predictor
    """Whose forecasts are executed."""
    layers: Sequence[int] | None = None
    """Layers that execute their forecast (hybrid); None for all that have one."""
    true_weights: bool = False
    """Whether executed experts get the true router's weights."""
    ahead: int = 1
    """Layers between a forecast and its target."""


def measure_quality(
    model: PreTrainedModel,
    view: MoEView,
    windows_by_domain: Mapping[str, Tensor],
    runs: Mapping[str, QualityRun],
    *,
    batch_size: int = 8,
) -> Json:
    """Teacher-forced comparison of speculative runs with the exact model on the same windows.

    Every token of a window but the first is scored. Forecasts are executed at every position, prefill included,
    chained from layer to layer. A predictor that reads the previous token's routing gets it from the exact run:
    in one forward over a whole window the speculative one does not exist yet.

    Args:
        model: the model, which may be offloaded: whatever its mode, it runs by its own routers and these forecasts.
        view: its norms and routers.
        windows_by_domain: token ids [N, W] per domain.
        runs: by name; `exact` is always measured and its name is taken.
        batch_size: windows per forward at most; fewer where the vocabulary makes a forward's logits large.

    Returns:
        `tokens` scored, and `runs.<name>` with `perplexity`, `top1_agreement`, `kl` (nats per token, exact || run),
        `executed_recall` (share of the exact run's experts that this run executed: `mean` and `per_layer` for layers
        1..L-1) and `domains.<domain>` with the first three.

    Raises:
        ExpertcastError: no windows, windows of fewer than two tokens, or a run called `exact`.
    """
    _check(windows_by_domain, runs)
    scores = {name: {domain: RunScores(len(view)) for domain in windows_by_domain} for name in (EXACT, *runs)}
    device = next(model.parameters()).device
    vocabulary = model.config.get_text_config().vocab_size
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
    """The first windows of some texts, [N, length]; a window never spans two texts, shorter ends are left out.

    Args:
        tokenizer: turns the texts into tokens.
        texts: read as far as needed.
        length: tokens of a window.
        count: windows at most.

    Raises:
        ExpertcastError: no text is as long as one window.
    """
    windows: list[list[int]] = []
    for text in texts:
        if len(windows) >= count:
            break
        ids = tokenizer(text, verbose=False)["input_ids"]
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

    with closing(RouterTaps(model, view, on_router, lambda _fresh, _ids: None)):
        return Pass(_log_probs(model, ids_BW), executed, logits)


def _speculative(model: PreTrainedModel, view: MoEView, run: QualityRun, ids_BW: Tensor, exact: Pass) -> Pass:
    executed: list[Tensor] = []
    with speculate(
        model,
        view,
        run.predictor,
        layers=run.layers,
        true_weights=run.true_weights,
        ahead=run.ahead,
        observe=lambda _call, ids_TK: executed.append(ids_TK),
    ) as speculator:
        if run.predictor.uses_previous_token:
            speculator.previous_logits_TLE = previous_logits(exact.logits, ids_BW)
        return Pass(_log_probs(model, ids_BW), executed, [])


def previous_logits(logits: Sequence[Tensor], ids_BW: Tensor) -> Tensor:
    """[T, L, E] router logits of the token before in the same window, NaN at each window's first: from those [T, E] of
    each layer in a forward over `ids_BW`."""
    stacked_TLE = torch.stack(list(logits), dim=1)
    shifted = stacked_TLE.view(*ids_BW.shape, *stacked_TLE.shape[1:]).roll(1, dims=1)
    shifted[:, 0] = float("nan")
    return shifted.view_as(stacked_TLE)


def _log_probs(model: PreTrainedModel, ids_BW: Tensor) -> Tensor:
    with torch.no_grad():
        logits_BWV: Tensor = model(input_ids=ids_BW, use_cache=False).logits
    return logits_BWV.float().log_softmax(dim=-1)


def _check(windows_by_domain: Mapping[str, Tensor], runs: Mapping[str, QualityRun]) -> None:
    if EXACT in runs:
        raise ExpertcastError(f"the name {EXACT!r} is taken by the exact run: choose another")
    if not windows_by_domain:
        raise ExpertcastError("no windows to measure quality on: give at least one domain")
    for domain, windows_NW in windows_by_domain.items():
        if windows_NW.dim() != 2 or windows_NW.shape[0] < 1 or windows_NW.shape[1] < 2:
            raise ExpertcastError(
                f"windows of domain {domain!r} have shape {list(windows_NW.shape)}: give [windows, tokens] with two "
                "tokens or more"
            )


# Recall of forecasts made from forecasts, with the model at hand: the form in which speculation makes them.
#
# The model runs its own routing, so that its residuals stay true; each layer's forecast is made from the routing that
# was forecast for that layer (trap 2 of the definitions under row B19), early attention included, which no trace can
# tell.
#
# N windows, W tokens per window, T = B x W tokens, L MoE layers, E routed experts per layer, K experts per token.


@torch.no_grad()
def chained_recall(
    model: PreTrainedModel, view: MoEView, windows_NW: Tensor, predictors: Mapping[str, Predictor], batch_size: int = 8
) -> dict[str, list[float]]:
    """Recall@k of layers 1..L-1 by predictor, each forecast made from the one before it.

    Args:
        model: its experts in memory.
        view: its norms and routers.
        windows_NW: token ids; what a predictor reads of the previous token is the model's own routing of it.
        predictors: by name, bound to `view`.
        batch_size: windows per forward.
    """
    recall = {name: Recall(len(view)) for name in predictors}
    for ids_BW in torch.split(windows_NW, batch_size):
        previous_TLE = _own_previous(model, view, ids_BW)
        for name, predictor in predictors.items():

            def observe(call: RouterCall, ids_TK: Tensor, own: Recall = recall[name]) -> None:
                own.to(ids_TK.device).update(call.layer, ids_TK, call.ids_TK)

            with speculate(model, view, predictor, execute=False, observe=observe) as speculator:
                speculator.previous_logits_TLE = previous_TLE
                model.base_model(input_ids=ids_BW.to(model.device), use_cache=False)
    return {name: own.per_row()[1:].tolist() for name, own in recall.items()}


def _own_previous(model: PreTrainedModel, view: MoEView, ids_BW: Tensor) -> Tensor:
    """What the model's own routing of each window's tokens says of the token before, [T, L, E]."""
    logits: list[Tensor] = []
    with closing(RouterTaps(model, view, lambda call: logits.append(call.logits_TE))):
        model.base_model(input_ids=ids_BW.to(model.device), use_cache=False)
    return previous_logits(logits, ids_BW)


# How often a draft's routers choose what the model's do, for the same tokens (rows C1, C2).
#
# The draft runs the same tokens from the beginning: its layers get what its own experts made of them.
#
# T tokens, L MoE layers, K experts per token, S windows of W tokens.

_DRAFT = "expertcast_draft"
"""Name of the experts function in transformers' registry with which a resident model runs as its own draft."""
_RUNNING: WeakKeyDictionary[nn.Module, tuple[QuantisedExperts, MoELayer]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactSets:
    """Shares of token-layer pairs, each a list by layer [L]."""

    hard: list[float]
    """The same experts in the same order."""
    soft: list[float]
    """The same experts in another order."""
    recall: list[float]
    """Of the model's experts, those that the draft chose too."""

    @property
    def exact(self) -> list[float]:
        """The same experts: hard and soft together."""
        return [hard + soft for hard, soft in zip(self.hard, self.soft, strict=True)]

    def as_dict(self) -> dict[str, float]:
        """Means over the layers: `hard`, `soft`, `exact`, `mismatch` and `recall`."""
        mean = {
            name: sum(values) / len(values)
            for name, values in (
                ("hard", self.hard),
                ("soft", self.soft),
                ("exact", self.exact),
                ("recall", self.recall),
            )
        }
        return {**mean, "mismatch": 1 - mean["exact"]}


def exact_sets(draft_TLK: Tensor, exact_TLK: Tensor) -> ExactSets:
    """Compare the experts that a draft and the model chose, ids in the order in which their routers gave them.

    Raises:
        ExpertcastError: no token, or not the same number of tokens, layers or experts.
    """
    if draft_TLK.shape != exact_TLK.shape or not len(exact_TLK):
        shapes = f"{tuple(draft_TLK.shape)} and {tuple(exact_TLK.shape)}"
        raise ExpertcastError(f"ids of shape {shapes} cannot be compared: run draft and model over the same tokens")
    hard_TL = (draft_TLK == exact_TLK).all(dim=-1)
    same_TLKK = draft_TLK.unsqueeze(-2) == exact_TLK.unsqueeze(-1)
    found_TLK = same_TLKK.any(dim=-1)
    soft_TL = found_TLK.all(dim=-1) & ~hard_TL
    shares = (hard_TL.float(), soft_TL.float(), found_TLK.float().mean(dim=-1))
    hard, soft, recall = (share_TL.mean(dim=0).tolist() for share_TL in shares)
    return ExactSets(hard=hard, soft=soft, recall=recall)


@torch.no_grad()
def compare_draft(
    model: PreTrainedModel, view: MoEView, quantised: QuantisedExperts, ids_SW: Tensor, batch: int = 8
) -> tuple[ExactSets, float]:
    """Run windows of token ids through the model and through its draft.

    Args:
        model: its experts in memory; it stays as it is.
        view: its MoE layers.
        quantised: the draft's experts.
        ids_SW: the windows.
        batch: windows per forward.

    Returns:
        The comparison of their routing, and the share of tokens for which both find the same next token likeliest.
    """
    exact_TLK, exact_T = _choices(model, view, ids_SW, batch)
    with drafting(model, view, quantised):
        draft_TLK, draft_T = _choices(model, view, ids_SW, batch)
    return exact_sets(draft_TLK, exact_TLK), float((draft_T == exact_T).float().mean())


@contextmanager
def drafting(model: PreTrainedModel, view: MoEView, quantised: QuantisedExperts) -> Iterator[None]:
    """A resident model computes with quantised experts meanwhile."""
    _RUNNING.update({layer.experts: (quantised, layer) for layer in view})
    try:
        with experts_implementation(model, _DRAFT):
            yield
    finally:
        for layer in view:
            del _RUNNING[layer.experts]


def _choices(model: PreTrainedModel, view: MoEView, ids_SW: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """[T, L, K] experts that were chosen, and [T] the likeliest next tokens."""
    chosen: list[list[Tensor]] = [[] for _ in view]
    likeliest = []

    def keep(call: RouterCall) -> None:
        chosen[call.layer].append(call.ids_TK)

    with closing(RouterTaps(model, view, keep)):
        for windows in torch.split(ids_SW, batch):
            logits = model(input_ids=windows.to(model.device), use_cache=False).logits
            likeliest.append(logits.argmax(dim=-1).flatten())
    return torch.stack([torch.cat(parts) for parts in chosen], dim=1), torch.cat(likeliest)


def _drafted(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    quantised, layer = _RUNNING[experts]
    with torch.no_grad():
        return quantised.run(layer, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(_DRAFT, _drafted)
