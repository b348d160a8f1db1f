"""A layer's routing on the host, as miss policies rewrite it: ids and weights, T rows of K."""

from __future__ import annotations

from expertcast.runtime.policies.miss import Verdict


def named(ids: list[list[int]], weights: list[list[float]]) -> list[list[int]]:
    """Places with weight 0 name the row's heaviest expert: what is not executed is not asked for."""
    named = []
    for row, values in zip(ids, weights, strict=True):
        heaviest = row[max(range(len(row)), key=values.__getitem__)]
        named.append([expert if weight else heaviest for expert, weight in zip(row, values, strict=True)])
    return named


def rewritten(
    ids: list[list[int]], weights: list[list[float]], verdict: Verdict
) -> tuple[list[list[int]], list[list[float]]]:
    """Ids and weights with dropped experts at weight 0 and missing ones replaced by their substitutes."""
    new_weights = [
        [0.0 if expert in verdict.dropped else weight for expert, weight in zip(row, values, strict=True)]
        for row, values in zip(ids, weights, strict=True)
    ]
    new_ids = [[verdict.substitute.get(expert, expert) for expert in row] for row in ids]
    return named(new_ids, new_weights), new_weights
