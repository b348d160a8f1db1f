"""Text of an evaluation, token by token: how many of its experts each forecast named, at every layer.

T tokens, K experts per token, L target layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from expertcast.data.batch import TraceBatch
from expertcast.data.models import load_tokenizer
from expertcast.data.plan import PlannedDocument
from expertcast.data.traces import TraceSource
from expertcast.predictors.base import Predictor
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.training.comparison import compare, rank_routing
from expertcast.training.scoring import states_of

PASSAGES, TOKENS = 4, 400
"""Passages of an example, and tokens of all together."""
_BATCH = 4096
_HALF = "\ufffd"
"""What a tokenizer makes of a part of a character."""


@torch.no_grad()
def example_text(
    predictors: Mapping[str, Predictor], source: TraceSource, split: str, *, ahead: int = 1,
    passages: int = PASSAGES, tokens: int = TOKENS,
) -> Json:  # fmt: skip
    """The beginnings of some documents, of as many domains as there are, and what was forecast of each token's experts.

    Args:
        predictors: by name; bound to the source's model.
        source: whose documents.
        split: which of them.
        ahead: layers between a state and what it forecasts.
        passages: how many beginnings.
        tokens: of all together, at most.

    Returns:
        `passages`, each with `document` (its index), `domain`, `token_ids` (None where the source does not know them),
        `text` (a piece for each token; None where no tokenizer is at hand) and `found`: by predictor, [L][T] how many
        of the token's K experts are among the forecast's K. `note` says why text is missing, None where it is not.
    """
    chosen = _choose(source.chosen(split), passages)
    rows = _beginnings(source, split, [document.index for document in chosen], tokens // len(chosen))
    found = _found(predictors, source, TraceBatch.cat(rows), ahead)
    known = all(batch.token_T is not None for batch in rows)
    tokenizer, note = _tokenizer(source) if known else (None, "the traces do not hold their tokens' ids")
    shown, begin = [], 0
    for document, batch in zip(chosen, rows, strict=True):
        ids = None if batch.token_T is None else batch.token_T.tolist()
        end = begin + len(batch)
        shown.append(
            {
                "document": document.index,
                "domain": document.domain,
                "token_ids": ids,
                "text": None if tokenizer is None or ids is None else pieces(tokenizer, ids),
                "found": {name: found_LT[:, begin:end].tolist() for name, found_LT in found.items()},
            }
        )
        begin = end
    return {"passages": shown, "note": note}


def pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text of each token: joined, the text of them all. A character of several tokens is the last one's."""
    found, done = [], ""
    for end in range(1, len(ids) + 1):
        text = str(tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False))
        whole = text if end == len(ids) else text.rstrip(_HALF)
        found.append(whole[len(done) :])
        done = whole if len(whole) > len(done) else done
    return found


def _choose(documents: Sequence[PlannedDocument], count: int) -> list[PlannedDocument]:
    """The first document of each domain, then the others, in the order in which they lie."""
    first: dict[str, PlannedDocument] = {}
    for document in documents:
        first.setdefault(document.domain, document)
    rest = [document for document in documents if first[document.domain] is not document]
    return sorted([*first.values(), *rest][:count], key=documents.index)


def _beginnings(source: TraceSource, split: str, wanted: Sequence[int], tokens: int) -> list[TraceBatch]:
    """The first tokens of some documents."""
    parts: dict[int, list[TraceBatch]] = {index: [] for index in wanted}
    for batch in source.batches(split, _BATCH):
        for index, own in parts.items():
            row_T = (batch.document_T == index).nonzero().flatten()[: tokens - sum(map(len, own))]
            if len(row_T):
                own.append(batch[row_T])
    return [TraceBatch.cat(own) for own in parts.values()]


def _found(
    predictors: Mapping[str, Predictor], source: TraceSource, batch: TraceBatch, ahead: int
) -> dict[str, Tensor]:
    """[L, T] by predictor."""
    states = states_of(source.view, batch)
    truths = [rank_routing(state) for state in states]
    found: dict[str, Tensor] = {}
    for name, predictor in predictors.items():
        places = [
            compare(predictor.forecast(state, ahead), truths[state.layer + ahead]).place_TK
            for state in states[: len(states) - ahead]
        ]
        found[name] = torch.stack([(place_TK < place_TK.shape[1]).sum(dim=1) for place_TK in places]).cpu()
    return found


def _tokenizer(source: TraceSource) -> tuple[PreTrainedTokenizerBase | None, str | None]:
    """That of the source's model where it lies on this machine, or why there is none: a report waits for no hub."""
    name = str(source.info["model"])
    try:
        return load_tokenizer(name, local_files_only=True, trust_remote_code=False), None
    except ExpertcastError as error:
        if Path(name).exists():
            return None, str(error)
        return None, f"no tokenizer for {name!r} on this machine: load it once, with the model or alone"
