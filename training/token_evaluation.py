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
from expertcast.predictors.progress import tokens_read
from expertcast.training.metrics.means import TokenMean
from expertcast.training.results import plain
from expertcast.training.token_examples import WINDOW, TokenExamples, token_chunks

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
        [S][L], one token ahead first. `next_token` knows the text before a token, `next_token_by_id` that token's own
        id as well: its first number is of that very token.

    Raises:
        ExpertcastError: the split holds no token with one before it, or the source does not know its tokens' ids.
    """
    scores: dict[str, _Recall] = {}
    chunks = token_chunks(predictor, source, split)
    for chunk in tokens_read(chunks, f"scoring on split {split!r}", source.token_count(split)):
        follows_T = chunk.document_T == chunk.document_T.roll(1)
        follows_T[0] = False  # its token before is in another chunk, if anywhere
        for window_W in torch.split(torch.arange(chunk.windows, device=follows_T.device), BATCH // WINDOW):
            examples = chunk.examples(window_W)
            examples = examples.only(follows_T[examples.index_B])
            if not len(examples):
                continue
            for name, rank_BSN in _forecasts(predictor, examples):
                if name not in scores:
                    scores[name] = _Recall(predictor).to(rank_BSN.device)
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


def _forecasts(predictor: NextToken, examples: TokenExamples) -> Iterator[tuple[str, Tensor]]:
    """Name, and something to rank experts by [B, S, N]."""
    steps, chunk = predictor.config.tokens, examples.chunk
    text_BF, row_B = examples.text(), examples.row_B
    unknown_B = torch.full_like(row_B, predictor.config.known_ids)
    for name, given_B in (("next_token", unknown_B), ("next_token_by_id", row_B)):
        yield name, predictor.probability(text_BF, examples.residual_BD, given_B)[:, :steps]
    yield "frequency", predictor.usual_LE.flatten().expand(len(examples), steps, -1)
    # the last token's own experts in front, whatever the router's rule, then its next likeliest ones
    before_B = examples.index_B - 1
    last_BN = chunk.logits_TLE[before_B.cpu()].float().softmax(dim=-1).flatten(1).to(row_B.device)
    yield "previous_token", (chunk.membership(before_B) + last_BN)[:, None].expand(-1, steps, -1)


class _Recall(TokenMean):
    """Recall [S, 2, L] per token ahead, among K and among K + 3 forecast experts, and layer."""

    def __init__(self, predictor: NextToken) -> None:
        self._shape = predictor.shape
        self._budgets = (self._shape.top_k, min(self._shape.experts, self._shape.top_k + FURTHER))
        super().__init__(predictor.config.tokens, len(self._budgets) * self._shape.layers, sync_on_compute=False)

    def update(self, rank_BSN: Tensor, examples: TokenExamples) -> None:
        """Add some tokens, their experts ranked by `rank_BSN`."""
        rank_BSLE = rank_BSN.reshape(*rank_BSN.shape[:2], self._shape.layers, self._shape.experts)
        for step in range(rank_BSLE.shape[1]):
            known_B = examples.known(step).nonzero().flatten()
            ids_BLW = rank_BSLE[known_B, step].topk(self._budgets[-1], dim=-1).indices
            hits_BLW = examples.used(step, known_B).view(-1, *rank_BSLE.shape[2:]).gather(2, ids_BLW)
            hits = [hits_BLW[..., :budget].sum(dim=(0, 2)) for budget in self._budgets]
            self.total_LR[step] += torch.cat(hits) / self._shape.top_k
            self.count_L[step] += len(known_B)

    def as_dict(self) -> Json:
        """Per recall `mean` [S] over layers and `per_layer` [S][L]."""
        mean_S2L = self.compute().view(-1, 2, self._shape.layers)
        return {
            name: {"mean": plain(mean_SL.nanmean(dim=1)), "per_layer": [plain(mean_L) for mean_L in mean_SL]}
            for name, mean_SL in zip(RECALLS, mean_S2L.unbind(1), strict=True)
        }
