"""Recall of forecasts some tokens ahead, at all layers: `next_token` against frequencies and the last token's routing.

B tokens, L MoE layers, E routed experts, N = L * E, K experts per token, S tokens ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError
from expertcast.predictors.next_token import NextToken
from expertcast.predictors.plain import Json, aligned
from expertcast.training.metrics.means import TokenMean
from expertcast.training.results import plain
from expertcast.training.token_examples import TokenExamples, token_chunks

FURTHER = 3
"""Experts beyond K that the wider recall allows."""
BATCH = 512
RECALLS = ("recall_at_k", f"recall_at_k_plus_{FURTHER}")


@torch.no_grad()
def evaluate_tokens(predictor: NextToken, source: TraceSource, split: str) -> Json:
    """Score a split, all forecasts on the same tokens.

    Returns:
        `tokens` that were forecast one ahead, and `tokens_ahead`: per forecast, the mean share of a token's experts
        that are among the K, and the K + 3, forecast ones of their layer: `mean` [S] over layers and `per_layer`
        [S][L], one token ahead first. `next_token` forecasts at the end of a token, `next_token_from_<l>` after layer l
        of the next one: its first number is of that token's own later layers (None for those that have run).

    Raises:
        ExpertcastError: the split holds no token with one before it.
    """
    scores: dict[str, _Recall] = {}
    for chunk in token_chunks(predictor, source, split):
        follows_T = chunk.document_T == chunk.document_T.roll(1)
        follows_T[0] = False  # its token before is in another chunk, if anywhere
        for index_B in torch.split(follows_T.nonzero().flatten(), BATCH):
            examples = chunk.examples(index_B)
            for name, rank_BSN, ran in _forecasts(predictor, examples, chunk.member_TN[index_B - 1]):
                if name not in scores:
                    scores[name] = _Recall(predictor, ran).to(rank_BSN.device)
                scores[name].update(rank_BSN, examples)
    if not scores:
        raise ExpertcastError(f"no tokens to score: split {split!r} is empty; collect more tokens or choose another")
    return {
        "tokens": int(scores["frequency"].count_L[0]),
        "tokens_ahead": {name: score.as_dict() for name, score in scores.items()},
    }


def tokens_table(tokens_ahead: Mapping[str, Json]) -> str:
    """A text table for the terminal: a row per forecast and recall, a column per token ahead."""
    steps = len(next(iter(tokens_ahead.values()))[RECALLS[0]]["mean"])
    rows = [["tokens ahead", *(str(step + 1) for step in range(steps))]]
    for recall in RECALLS:
        for name, values in tokens_ahead.items():
            means = (f"{value:.3f}" for value in values[recall]["mean"])
            rows.append([f"{name} {recall}", *means])
    return aligned(rows)


def _forecasts(predictor: NextToken, examples: TokenExamples, before_BN: Tensor) -> Iterator[tuple[str, Tensor, int]]:
    """Name, something to rank experts by [B, S, N], and how many layers of the first token have run."""
    steps = predictor.config.tokens
    start_BW = predictor.network.start(examples.average_BAN, examples.last_BN)
    for at, layer in enumerate(predictor.layers):
        residual_BD = examples.residual_RBD[at]
        logits_BSN = predictor.network(start_BW, examples.average_BAN, examples.last_BN, residual_BD, at)[:, :steps]
        yield (f"next_token_from_{layer}", logits_BSN, layer + 1) if at else ("next_token", logits_BSN, 0)
    yield "frequency", predictor.usual_LE.flatten().expand(len(examples), steps, -1), 0
    # the last token's own experts in front, whatever the router's rule, then its next likeliest ones
    yield "previous_token", (before_BN + examples.last_BN)[:, None].expand(-1, steps, -1), 0


class _Recall(TokenMean):
    """Recall [S, 2, L] per token ahead, among K and among K + 3 forecast experts, and layer."""

    def __init__(self, predictor: NextToken, ran: int) -> None:
        self._shape, self._ran = predictor.shape, ran
        self._budgets = (self._shape.top_k, min(self._shape.experts, self._shape.top_k + FURTHER))
        super().__init__(predictor.config.tokens, len(self._budgets) * self._shape.layers, sync_on_compute=False)

    def update(self, rank_BSN: Tensor, examples: TokenExamples) -> None:
        """Add some tokens, their experts ranked by `rank_BSN`."""
        rank_BSLE = rank_BSN.reshape(*rank_BSN.shape[:2], self._shape.layers, self._shape.experts)
        ids_BSLW = rank_BSLE.topk(self._budgets[-1], dim=-1).indices
        hits_BSLW = examples.used_BSN.view(rank_BSLE.shape).gather(3, ids_BSLW) * examples.known_BS[:, :, None, None]
        hits = [hits_BSLW[..., :budget].sum(dim=(0, 3)) for budget in self._budgets]
        self.total_LR += torch.cat(hits, dim=1) / self._shape.top_k
        self.count_L += examples.known_BS.sum(dim=0)

    def as_dict(self) -> Json:
        """Per recall `mean` [S] over layers and `per_layer` [S][L]."""
        mean_S2L = self.compute().view(-1, 2, self._shape.layers)
        mean_S2L[0, :, : self._ran] = torch.nan
        return {
            name: {"mean": plain(mean_SL.nanmean(dim=1)), "per_layer": [plain(mean_L) for mean_L in mean_SL]}
            for name, mean_SL in zip(RECALLS, mean_S2L.unbind(1), strict=True)
        }
