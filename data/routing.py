"""Recorded routing without a model: which experts each token was given, layer by layer.

T tokens, L MoE layers, E routed experts per layer, K experts per token. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from expertcast.predictors.errors import ExpertcastError

Ids = npt.NDArray[np.int64]
ABSENT = -1
"""In place of an expert: the token was given fewer, or the layer did not run for it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: all tokens of a prompt, or one decoded token."""

    fresh: bool
    """A prompt."""
    rows: list[list[list[int]]]
    """[L][tokens][K] experts, heaviest first; tokens for which a layer did not run are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The routing of one text after another."""

    source: str
    """Where it was read."""
    ids_TLK: Ids
    """Experts, heaviest first; `ABSENT` behind them."""
    prompt_T: npt.NDArray[np.bool_]
    """Tokens of prompts, which one forward runs together; the others are decoded one by one."""
    experts: int
    """E"""
    bytes_LE: Ids | None = None
    """Of each expert, where that is known."""

    @property
    def layers(self) -> int:
        """L"""
        return int(self.ids_TLK.shape[1])

    @property
    def top_k(self) -> int:
        """K"""
        return int(self.ids_TLK.shape[2])

    def steps(self) -> Iterator[Step]:
        """The forwards, in order: prompt tokens that follow one another are one of them."""
        edges = np.flatnonzero(np.diff(self.prompt_T.astype(np.int8))) + 1
        bounds = [0, *edges.tolist(), len(self.prompt_T)]
        for start, end in pairwise(bounds):
            fresh = bool(self.prompt_T[start])
            for first, last in [(start, end)] if fresh else [(row, row + 1) for row in range(start, end)]:
                yield Step(fresh, [_rows(self.ids_TLK[first:last, layer]) for layer in range(self.layers)])

    def sized(self, expert_bytes: int | None) -> Ids:
        """Bytes of each expert [L, E], as recorded or else all the same.

        Raises:
            ExpertcastError: neither is known.
        """
        if self.bytes_LE is not None:
            return self.bytes_LE
        if expert_bytes is None:
            raise ExpertcastError(
                f"{self.source} does not say how large an expert is: give --expert-bytes, such as 3MiB, or record a "
                "column expert_bytes"
            )
        return np.full((self.layers, self.experts), expert_bytes, dtype=np.int64)


def _rows(ids_TK: Ids) -> list[list[int]]:
    return [kept for row in ids_TK.tolist() if (kept := [expert for expert in row if expert != ABSENT])]


def checked(routing: Routing) -> Routing:
    """The same, if it can be replayed.

    Raises:
        ExpertcastError: with the first token and layer that cannot be: nothing decoded, an id out of range, an expert
            twice, or a decoded token that a layer did not run for.
    """
    ids_TLK, source = routing.ids_TLK, routing.source
    if not len(ids_TLK) or routing.prompt_T.all():
        raise ExpertcastError(f"{source} holds no decoded token: nothing would be replayed; record some")
    wrong = np.argwhere((ids_TLK < ABSENT) | (ids_TLK >= routing.experts))
    if len(wrong):
        token, layer, rank = wrong[0].tolist()
        raise ExpertcastError(
            f"{source}: token {token}, layer {layer} names expert {ids_TLK[token, layer, rank]} of "
            f"{routing.experts}: ids are 0 to {routing.experts - 1}; correct the file or give --experts"
        )
    ordered = np.sort(ids_TLK, axis=2)
    twice = np.argwhere((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != ABSENT))
    if len(twice):
        token, layer, rank = twice[0].tolist()
        raise ExpertcastError(
            f"{source}: token {token}, layer {layer} names expert {ordered[token, layer, rank]} twice: leave out rows "
            "that were not captured (vLLM fills them with zeros), and give each expert once"
        )
    empty = np.argwhere((ids_TLK[:, :, 0] == ABSENT) & ~routing.prompt_T[:, None])
    if len(empty):
        token, layer = empty[0].tolist()
        raise ExpertcastError(
            f"{source}: token {token} has no experts at layer {layer}: number the MoE layers 0 to L-1 without gaps and "
            "record every decoded token at all of them"
        )
    if (ids_TLK[:, :, 0] == ABSENT).all(axis=0).any():
        layer = int(np.flatnonzero((ids_TLK[:, :, 0] == ABSENT).all(axis=0))[0])
        raise ExpertcastError(f"{source}: no token runs layer {layer}: number the MoE layers 0 to L-1 without gaps")
    return routing
