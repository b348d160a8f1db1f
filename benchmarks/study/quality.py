"""What lossy policies cost in quality: text decoded with them in the runtime, on all cores, resumed where it ended."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.study.study import PREFILL
from expertcast.data.machine import usable_processors
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.text import load_documents
from expertcast.data.trace_format import write_atomically
from expertcast.data.traces import TraceDataset
from expertcast.predictors import Predictor
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.policies import Policies
from expertcast.runtime.quality.forecasts import text_windows
from expertcast.runtime.quality.policies import measure_policies
from expertcast.runtime.simulation.trace import prefilled

KEPT = "quality.json"
EXACT = "exact"
MEASURES = {"perplexity": "perplexity", "agreement": "top1_agreement", "kl": "kl", "executed": "executed_recall"}
"""Names in the rows, and in what is measured."""
_CHUNK = 8
"""Runs measured beside one exact run."""
_TEXT = 2000
"""Characters read of each document: windows come from many documents."""
_POLICIES = tuple(Policies().as_dict())

Row = dict[str, Any]
Run = tuple[str, Mapping[str, str], int, str | None]
"""Name, policies, slots and predictor."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Which model decodes which text."""

    model: str
    windows_NW: Tensor
    predictors: Mapping[str, Predictor]

    @property
    def scored(self) -> int:
        """Tokens."""
        count, length = self.windows_NW.shape
        return count * (length - prefilled(length, PREFILL))


def split_windows(model: str, data: Sequence[str], traces: TraceDataset, *, tokens: int, length: int) -> Tensor:
    """About `tokens` tokens [N, length] from the beginnings of the documents in the traces' test split."""
    documents = {document.index: document for document in load_documents(list(data))}
    chosen = [documents[each.index] for each in traces.documents if each.split == "test" and each.index in documents]
    texts = [document.text[:_TEXT] for document in chosen or documents.values()]
    return text_windows(load_tokenizer(model), texts, length=length, count=max(1, round(tokens / length)))


def add_quality(rows: Iterable[Row], decoding: Decoding | None, work: Path, processes: int | None) -> None:
    """Give every lossy row its `perplexity`, `agreement`, `kl` and share of `executed` experts, and exact rows those of
    the exact model. Without a model to decode with they are None."""
    rows = list(rows)
    known: dict[str, Any] = {}
    if decoding is not None:
        wanted = {name_of(row): row for row in rows if _lossy(row)}
        known = _measured(decoding, wanted, work / KEPT, processes)
    unknown = dict.fromkeys(MEASURES)
    for row in rows:
        found = known.get(name_of(row) if _lossy(row) else EXACT)
        row |= unknown if found is None else {name: found[measure] for name, measure in MEASURES.items()}


def name_of(row: Row) -> str:
    """What decides about quality: the policies, the slots and whose forecasts, not the link."""
    return json.dumps([*(row[name] for name in _POLICIES), row["slots"], row["predictor"]])


def _lossy(row: Row) -> bool:
    return Policies(miss=row["miss"], routing=row["routing"]).lossy


def _measured(decoding: Decoding, wanted: Mapping[str, Row], path: Path, processes: int | None) -> dict[str, Any]:
    """Results by name; `exact` is among them."""
    text = [decoding.model, decoding.windows_NW.tolist(), PREFILL]
    kept: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    known: dict[str, Any] = kept.get("runs", {}) if kept.get("text") == text else {}
    runs: list[Run] = [
        (name, {kind: row[kind] for kind in _POLICIES}, row["slots"], row["predictor"])
        for name, row in wanted.items()
        if name not in known
    ]
    chunks = [runs[start : start + _CHUNK] for start in range(0, len(runs), _CHUNK)]
    if not known and not chunks:
        chunks = [[]]  # the exact run alone
    if not chunks:
        return known
    with tqdm(total=len(runs), unit="decoding", desc="quality", disable=not runs) as bar:
        for chunk, found in _results(decoding, chunks, processes):
            known |= found
            write_atomically(path, json.dumps({"text": text, "runs": known}).encode())
            bar.update(len(chunk))
    return known


def _results(
    decoding: Decoding, chunks: Sequence[list[Run]], processes: int | None
) -> Iterator[tuple[list[Run], dict[str, Any]]]:
    """Each chunk of runs with its results."""
    count = min(len(chunks), processes or usable_processors())
    if count <= 1:
        worker = _Worker(decoding)
        yield from ((chunk, worker.measure(chunk)) for chunk in chunks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, initializer=_start, initargs=(decoding,)) as pool:
        yield from zip(chunks, pool.map(_measure_here, chunks), strict=True)


class _Worker:
    """A loaded model."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding, self._model = decoding, load_model(decoding.model)

    def measure(self, chunk: Sequence[Run]) -> dict[str, Any]:
        decoding = self._decoding
        runs = {
            name: OffloadConfig(
                policies=Policies(**policies),
                slots=slots,
                predictor=None if predictor is None else decoding.predictors[predictor],
            )
            for name, policies, slots, predictor in chunk
        }
        found: dict[str, Any] = measure_policies(self._model, decoding.windows_NW, runs, prefill=PREFILL)["runs"]
        return found


_WORKERS: list[_Worker] = []
"""This process's own, once it has started."""


def _start(decoding: Decoding) -> None:
    torch.set_num_threads(1)
    _WORKERS[:] = [_Worker(decoding)]


def _measure_here(chunk: Sequence[Run]) -> dict[str, Any]:
    return _WORKERS[0].measure(chunk)
