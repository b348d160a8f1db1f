"""What happens at one MoE layer after another: the order of policies and books that runtime and simulator share.

    start_pass
    per layer   decide      routing and miss policies: which experts run, and in which precision they come
                begin       the layer's experts are requested, misses before anything else
                foresee     forecasts for the next tokens reach the eviction policy
                hint        a forecast: pre-eviction, then the selection's prefetches
                stream: a layer that runs most experts foretells that the next one does
                wait, release (chunk by chunk)

T tokens, B sequences, D hidden size, E routed experts per layer, K experts per token. A key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expertcast.predictors.base import Forecast
from expertcast.predictors.view import ModelShape, MoEView
from expertcast.runtime.engine.pace import Pace
from expertcast.runtime.engine.residency import Residency
from expertcast.runtime.engine.rewriting import named, rewritten
from expertcast.runtime.engine.tokens_ahead import LIKELY, TokenForecasts, TokensAhead, early_layers
from expertcast.runtime.policies.miss import Lookup, Verdict
from expertcast.runtime.policies.prefetch import Wanted
from expertcast.runtime.policies.prefetch.none import NoPrefetch
from expertcast.runtime.policies.routing import Routed, Standard
from expertcast.runtime.policies.settings import PolicySet
from expertcast.runtime.storage.precision import FULL

_MOST = 0.75
"""Share of its experts that a layer must run for the next one's to be loaded before they are known."""


@dataclass(slots=True)
class Decision:
    """What a layer executes in place of its router's choice."""

    ids_TK: Tensor
    weights_TK: Tensor
    precision: dict[int, str]
    """By key; experts that are not named come in full."""


class LayerFlow:
    """Drives a residency and a set of policies. All calls come from the thread that runs the model.

    Args:
        residency: books and rules.
        policies: all of one model.
        shape: of the model.
        view: the model whose routers route; needed by policies that have them route anew.
        carry: layers between forecasts and their targets; 0: there are none. Without a cache, and where nothing
            forecasts whole tokens, so many first layers of the next token get what they needed last, at the last layer.
        tokens_ahead: forecasts the next tokens' routing: evictions go by it where the policy takes it, and experts are
            loaded early where anything is.
        likely: the least probability by it at which an expert is loaded early.
    """

    def __init__(
        self, residency: Residency, policies: PolicySet, shape: ModelShape, *, view: MoEView | None = None,
        carry: int = 0, tokens_ahead: TokenForecasts | None = None, likely: float = LIKELY,
    ) -> None:  # fmt: skip
        self.residency, self.policies = residency, policies
        self._view = view
        self._experts = shape.experts
        self._last = shape.layers - 1
        self._carry = 0 if residency.keep or tokens_ahead is not None else carry
        self._carried: dict[int, list[int]] = {}
        self.tokens_ahead: TokensAhead | None = None
        """Where something forecasts whole tokens."""
        if tokens_ahead is not None:
            loads = not isinstance(policies.prefetch, NoPrefetch)
            layers = early_layers(shape, keep=residency.keep, loads=loads, forecast_from=carry or None)
            self.tokens_ahead = TokensAhead(
                tokens_ahead, residency, policies.eviction, shape, layers=layers, likely=likely
            )
        self._reroutes = not isinstance(policies.routing, Standard)
        self.decides = self._reroutes or policies.miss.lossy
        """Whether :meth:`decide` may change anything: then it must be called, with host copies of the routing."""
        self.reads_logits = policies.eviction.reads_scores or tokens_ahead is not None
        """Whether :meth:`see` must be called."""
        self._streams = residency.link.overlaps and not isinstance(policies.prefetch, NoPrefetch)
        self.most = shape.experts
        """Experts of a layer that run at once, at most: several calls of the kernel need less memory than one."""
        self._executed = 0
        """Experts of the running layer."""
        reads = policies.prefetch.reads_transfer
        self._pace = Pace(residency, shape.layers) if reads else None

    def start_pass(self, fresh: bool, token_BS: Tensor | None = None) -> None:
        """A forward starts; `fresh`: with new texts; `token_BS`: the ids of its tokens, where they are known."""
        self.residency.start_pass(fresh)
        if self._pace is not None:
            self._pace.start_pass(fresh)
        if self.tokens_ahead is not None:
            self.tokens_ahead.start(fresh, token_BS)

    def see(self, layer: int, residual_TD: Tensor, logits_TE: Tensor, sequences: int) -> None:
        """A router has run: its scores and what follows from them for the next tokens, to those who read them.

        Args:
            layer, logits_TE: whose router ran, and its scores.
            residual_TD: the residual stream before the layer.
            sequences: B.
        """
        eviction = self.policies.eviction
        if eviction.reads_scores:
            eviction.see_scores(layer, logits_TE.float().softmax(dim=-1).mean(dim=0).tolist())
        if self.tokens_ahead is not None:
            self.tokens_ahead.see(layer, residual_TD, logits_TE, sequences)

    def decide(
        self, layer: int, logits_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor, *, routed: bool = True
    ) -> Decision | None:
        """Routing and miss policies at work; None: the layer executes what was given, in full.

        Args:
            layer, logits_TE: whose router ran, and its scores.
            ids_TK, weights_TK: what would be executed.
            routed: the router chose `ids_TK`; a forecast's experts are not chosen again.
        """
        held = self.residency.held(layer)
        changed: tuple[Tensor, Tensor] | None = None
        if self._reroutes and routed:
            cached_E = torch.zeros(self._experts, dtype=torch.bool)
            cached_E[list(held)] = True
            free = self.residency.free(layer)
            cached_E = cached_E.to(logits_TE.device)
            assert self._view is not None, "policies that route need the model's own routers"
            changed = self.policies.routing.route(
                Routed(
                    layer=self._view[layer], logits_TE=logits_TE, ids_TK=ids_TK, weights_TK=weights_TK,
                    cached_E=cached_E, available=free,
                )
            )  # fmt: skip
        chosen_TK, combine_TK = (ids_TK, weights_TK) if changed is None else changed
        ids, weights = chosen_TK.tolist(), combine_TK.tolist()
        if changed is not None:
            ids = named(ids, weights)
        verdict = self._verdict(layer, logits_TE, ids, weights, held)
        if changed is None and verdict is None:
            return None
        before = {expert for row in ids_TK.tolist() for expert in row}
        if verdict is not None and (verdict.dropped or verdict.substitute):
            ids, weights = rewritten(ids, weights, verdict)
        left_out = before.difference(expert for row in ids for expert in row)
        self.residency.observer.skipped(layer, len(left_out))
        first = layer * self._experts
        return Decision(
            torch.tensor(ids, dtype=ids_TK.dtype, device=ids_TK.device),
            torch.tensor(weights, dtype=weights_TK.dtype, device=weights_TK.device),
            {} if verdict is None else {first + expert: name for expert, name in verdict.precision.items()},
        )

    def _verdict(
        self, layer: int, logits_TE: Tensor, ids: list[list[int]], weights: list[list[float]], held: Mapping[int, str]
    ) -> Verdict | None:
        if not self.policies.miss.lossy or all(held.get(expert) == FULL for row in ids for expert in row):
            return None
        return self.policies.miss.decide(
            Lookup(
                layer=layer, ids=ids, weights=weights, held=held, free=self.residency.free(layer),
                probabilities=lambda: logits_TE.float().softmax(dim=-1).tolist(),
            )
        )  # fmt: skip

    def begin(self, layer: int, keys: list[int], precision: Mapping[int, str] | None = None) -> list[list[int]]:
        """Request what a layer executes (distinct keys); returns it in chunks that fit the slots, the first requested.

        The caller requests chunk i + 1 before it waits for chunk i.
        """
        limit = self.residency.limit(layer)
        if layer < self._carry:
            self._carried[layer] = keys if len(keys) <= limit // 2 else []
        self.residency.observer.needed(layer, keys)
        self.residency.settle(layer, keys)
        if self._pace is not None:
            experts = [key % self._experts for key in keys]
            self._pace.reached(layer, experts)
            self.policies.prefetch.see_routing(layer, experts)
        self._executed = len(keys)
        chunks = self._chunked(keys, limit)
        self.residency.request(chunks[0], precision)
        return chunks

    def _chunked(self, keys: list[int], limit: int) -> list[list[int]]:
        """Half the slots at a time, so that one chunk loads while another computes; what is held goes first."""
        limit = min(limit, self.most)
        if len(keys) <= limit:
            return [keys]
        keys = sorted(keys, key=lambda key: (not self.residency.holds(key), key))
        size = max(1, limit // 2)
        return [keys[start : start + size] for start in range(0, len(keys), size)]

    def hint(self, forecast: Forecast, ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> None:
        """A forecast for a later layer, with its ids and weights (T rows of K) on the host."""
        wanted = Wanted(forecast, ids, weights)
        layer, policies = forecast.layer, self.policies
        if policies.eviction.reads_forecasts:
            policies.eviction.see_forecast(layer, wanted.probability_TE.mean(dim=0).tolist())
        if policies.pre_eviction.active:
            self._pre_evict(wanted)
        transfer = None if self._pace is None else self._pace.transfer(layer)
        first = layer * self._experts
        self.residency.prefetch([first + expert for expert in policies.prefetch.experts(wanted, transfer)])

    def _pre_evict(self, wanted: Wanted) -> None:
        first = wanted.layer * self._experts
        predicted = {expert for row in wanted.ids for expert in row}
        resident = sum(self.residency.holds(first + expert) for expert in predicted)
        probability_E = wanted.probability_TE.mean(dim=0).tolist()
        target = self.policies.pre_eviction.release_target(probability_E, predicted, resident)
        self.residency.free_up(wanted.layer, target, {first + expert for expert in predicted})

    def stream(self, layer: int) -> None:
        """The last of a layer's chunks has been asked for. Where it runs most of its experts, as prefills do, so does
        the next layer: as many of that one's as make a chunk come while this one computes."""
        following = layer + 1
        if not self._streams or self._executed < _MOST * self._experts or layer == self._last:
            return
        if self.residency.is_asked(following):
            return
        keys = list(range(following * self._experts, (following + 1) * self._experts))
        self.residency.prefetch(self._chunked(keys, self.residency.limit(following))[0])

    def finish(self, layer: int) -> None:
        """All forecasts of a layer have been asked for: what comes early without one goes behind them."""
        if layer == self._last:
            for keys in self._carried.values():
                self.residency.prefetch(keys)
        if self.tokens_ahead is not None:
            self.tokens_ahead.finish(layer)
