"""Texts of a domain as streams of router states, and a refit replayed over one, token by token as in serving.

T tokens, P layer pairs, E routed experts, K experts per token.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.data.collect import collect
from expertcast.data.text import Document
from expertcast.data.traces import TraceDataset
from expertcast.predictors import Predictor, RouterState
from expertcast.runtime.engine.drift import DriftMonitor
from expertcast.runtime.engine.refit import BLOCK, Example, LayerRefit, ridge_part
from expertcast.training.scoring import states_of

States = list[RouterState]
"""Of all layers, T tokens each, in the order of the text."""


def traced(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[tuple[str, str]],
    folder: Path,
    tokens: int,
) -> TraceDataset:
    """Traces of a model on some text, collected unless they are there.

    Args:
        model: whose routing.
        tokenizer: of the model.
        texts: (text, domain) of each document.
        folder: where they are, or go.
        tokens: how many.
    """
    documents = [Document(index, text, domain) for index, (text, domain) in enumerate(texts)]
    return collect(model, tokenizer, documents, folder, tokens=tokens)


def stream(traces: TraceDataset, source: TraceDataset, split: str, tokens: int) -> States:
    """The first tokens of a split, as the predictors of `source` see them (the same model's norms and routers)."""
    batch = next(iter(traces.batches(split, tokens)))
    return states_of(source.view, batch)


def rows(state: RouterState, begin: int, end: int) -> RouterState:
    """Some tokens of a state."""
    tensors = {field.name: getattr(state, field.name) for field in fields(state) if field.name != "layer"}
    return replace(state, **{name: value[begin:end] for name, value in tensors.items() if value is not None})


def joined(before: States, after: States) -> States:
    """One stream behind another."""
    return [
        RouterState(
            layer=one.layer,
            **{
                field.name: torch.cat([getattr(one, field.name), getattr(two, field.name)])
                for field in fields(one)
                if field.name != "layer" and getattr(one, field.name) is not None
            },
        )
        for one, two in zip(before, after, strict=True)
    ]


@torch.no_grad()
def replay(predictor: Predictor, states: States) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Forecasts of a predictor and of its refit, each made before the refit learns from its token.

    Args:
        predictor: with a ridge part; its weights are as they were when this returns.
        states: of the stream.

    Returns:
        Recall [T] over the layer pairs of the `frozen` map, of the `refitted` one whether or not it may be used, and of
        what is `used`; and how many layers used the refitted one at the end, and how often one changed over.
    """
    pairs, tokens = len(states) - 1, len(states[0].residual_TD) // BLOCK * BLOCK
    found = {name: torch.zeros(pairs, tokens) for name in ("frozen", "refitted", "used")}
    layers, changes = [], 0
    for pair in range(pairs):
        part = ridge_part(predictor, pair, 1)
        assert part is not None
        layer = LayerRefit(part, predictor.view[pair + 1])
        layers.append(layer)
        for begin in range(0, tokens, BLOCK):
            end = begin + BLOCK
            truth = states[pair + 1]
            used = layer.guard.used
            ids_TK = truth.topk_ids_TK[begin:end]
            frozen_TK, refitted_TK = layer.learn(
                Example(rows(states[pair], begin, end), truth.logits_TE[begin:end], ids_TK)
            )
            if layer.due:
                layer.solve()
            changes += used != layer.guard.used
            by_name = {"frozen": frozen_TK, "refitted": refitted_TK, "used": refitted_TK if used else frozen_TK}
            for name, forecast_TK in by_name.items():
                found[name][pair, begin:end] = recall(forecast_TK, ids_TK)
        part.apply(None)
    report = {"layers_used_at_end": sum(layer.guard.used for layer in layers), "changes": changes}
    return {name: recall_PT.mean(dim=0) for name, recall_PT in found.items()}, report


@torch.no_grad()
def frozen_recall(predictor: Predictor, states: States) -> Tensor:
    """Recall [T] over the layer pairs of a predictor as it is."""
    pairs = range(len(states) - 1)
    return torch.stack(
        [recall(predictor.forecast(states[pair], 1).topk_ids_TK, states[pair + 1].topk_ids_TK) for pair in pairs]
    ).mean(dim=0)


def recall(forecast_TK: Tensor, ids_TK: Tensor) -> Tensor:
    """Share [T] of each token's experts that was forecast."""
    return (forecast_TK[:, :, None] == ids_TK[:, None, :]).any(dim=1).float().mean(dim=1)


@torch.no_grad()
def warned_after(
    predictor: Predictor, expected: Mapping[int, float], before: States, after: States
) -> tuple[int | None, float | None]:
    """When the drift monitor warns, and the drift that it shows at the end.

    Args:
        predictor: frozen.
        expected: its recall by target layer, on validation.
        before: a stream of the domain that it was trained on.
        after: what follows.

    Returns:
        Tokens after the change (negative: of the first stream that were still to come), or None for no warning; and the
        number that stats have.
    """
    shape = predictor.shape
    monitor = DriftMonitor(shape.layers, shape.top_k, expected, predictor.name)
    ids = [
        [
            (pair + 1, predictor.forecast(part[pair], 1).topk_ids_TK.tolist(), part[pair + 1].topk_ids_TK.tolist())
            for pair in range(shape.layers - 1)
        ]
        for part in (before, after)
    ]
    first = len(before[0].residual_TD)
    warned: int | None = None
    for token in range(first + len(after[0].residual_TD)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            monitor.start()
        if caught and warned is None:
            warned = token - first
        part, row = (ids[0], token) if token < first else (ids[1], token - first)
        for layer, forecast, truth in part:
            monitor.see(layer, forecast[row], truth[row])
    return warned, monitor.drift
