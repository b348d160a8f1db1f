"""Fitting `next_token`: a text whose next token follows from the last one, checkpoints, scores, the command line."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from expertcast.checkpoints.store import load_predictor, save_predictor
from expertcast.cli import main
from expertcast.data.batch import TraceBatch
from expertcast.data.distributed import Share
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, MoEView
from expertcast.predictors.next_token import NextToken, NextTokenConfig
from expertcast.predictors.quasi_hidden import DefaultVectors
from expertcast.training.fit import fit
from expertcast.training.options import FitOptions
from expertcast.training.token_evaluation import evaluate_tokens, tokens_table
from expertcast.training.token_examples import TokenChunk, token_chunks
from tests.training.synthetic import random_batch, tiny_view

WORDS = 6
SMALL = NextTokenConfig(tokens=2, width=32, memories=(2, 8), later_tokens=8, steps=200, step_tokens=64, passes=99)


class Cyclic:
    """Texts in which six words follow one another in a ring; a word has one routing and one residual per layer."""

    def __init__(self, view: MoEView, tokens: int = 1200, document_tokens: int = 40) -> None:
        self.view = view
        words = random_batch(view, WORDS, seed=3)
        index_T = torch.arange(tokens)
        document_T, position_T = index_T // document_tokens, index_T % document_tokens
        word_T = (position_T + document_T) % WORDS
        self._batch = TraceBatch(
            residual_TLD=words.residual_TLD[word_T],
            logits_TLE=words.logits_TLE[word_T],
            document_T=document_T,
            position_T=position_T,
        )
        self._rows = {"train": slice(0, tokens * 2 // 3), "validation": slice(tokens * 2 // 3, tokens)}
        self.info: dict[str, Any] = {"id": "cyclic", "model": view.model_id}

    @property
    def defaults(self) -> DefaultVectors:
        raise NotImplementedError

    def token_count(self, split: str) -> int:
        return len(self._batch[self._rows[split]])

    def batches(
        self,
        split: str,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        max_tokens: int | None = None,
        share: Share | None = None,
    ) -> Iterator[TraceBatch]:
        assert not shuffle
        rows = self._batch[self._rows[split]]
        for first in range(0, min(len(rows), max_tokens or len(rows)), batch_size):
            yield rows[first : first + batch_size]


@pytest.fixture(scope="module")
def source() -> Cyclic:
    return Cyclic(tiny_view())


@pytest.fixture(scope="module")
def fitted(source: Cyclic) -> NextToken:
    predictor = fit("next_token", source, config=SMALL).predictor
    assert isinstance(predictor, NextToken)
    return predictor


def test_it_learns_what_follows(source: Cyclic, fitted: NextToken) -> None:
    """The next word is certain; a frequency cannot know it, and the last word's routing is another's."""
    found = evaluate_tokens(fitted, source, "validation")
    means = {name: values["recall_at_k"]["mean"] for name, values in found["tokens_ahead"].items()}
    assert min(means["next_token"]) > 0.95
    assert min(means["next_token_from_0"]) > 0.95
    assert max(means["frequency"] + means["previous_token"]) < 0.7


def test_scores_by_hand(source: Cyclic, fitted: NextToken) -> None:
    """Frequency and previous_token, counted token by token; in each document of 40 the h-th token ahead has 40 - h."""
    fitted = copy.deepcopy(fitted)
    fitted.usual_LE += 1e-4 * torch.arange(source.view.shape.experts)  # no ties: which of them come first is open
    found = evaluate_tokens(fitted, source, "validation")
    batch = next(source.batches("validation", 10_000))
    ids_TLK = torch.stack([layer.route(batch.logits_TLE[:, layer.index])[0] for layer in source.view], dim=1)
    hits = {"frequency": 0.0, "previous_token": 0.0}
    usual_LK = fitted.usual_LE.topk(source.view.shape.top_k).indices
    pairs = [t for t in range(len(batch) - 2) if batch.document_T[t] == batch.document_T[t + 2]]
    for token in pairs:
        for layer in range(len(source.view)):
            true = set(ids_TLK[token + 2, layer].tolist())
            hits["frequency"] += len(true & set(usual_LK[layer].tolist()))
            hits["previous_token"] += len(true & set(ids_TLK[token, layer].tolist()))
    count = len(pairs) * len(source.view) * source.view.shape.top_k
    assert found["tokens"] == 400 - 10
    for name, value in hits.items():
        scored = found["tokens_ahead"][name]
        assert scored["recall_at_k"]["mean"][1] == pytest.approx(value / count, abs=1e-6)
        assert len(scored["recall_at_k_plus_3"]["per_layer"][0]) == len(source.view)
    assert found["tokens_ahead"]["next_token_from_0"]["recall_at_k"]["per_layer"][0][0] is None
    assert "previous_token recall_at_k_plus_3" in tokens_table(found["tokens_ahead"])


def test_chunks_carry_the_text_on(source: Cyclic, fitted: NextToken, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split in chunks of 30 tokens gives the states that it gives in one; what comes ends with the chunk."""
    whole = TokenChunk(fitted, next(source.batches("validation", 10_000)))
    expected = whole.examples(torch.arange(len(whole)))
    before, begin = None, 0
    for batch in source.batches("validation", 30):
        before = TokenChunk(fitted, batch, before)
        rows = slice(begin, begin + len(batch))
        found = before.examples(torch.arange(len(batch)))
        torch.testing.assert_close(found.average_BAN, expected.average_BAN[rows], atol=2e-3, rtol=0)
        assert torch.equal(found.last_BN, expected.last_BN[rows])
        assert torch.equal(found.residual_RBD, expected.residual_RBD[:, rows])
        assert torch.equal(found.used_BSN[:-1], expected.used_BSN[rows][:-1])
        assert not found.known_BS[-1, 1:].any()
        begin += len(batch)
    monkeypatch.setattr("expertcast.training.token_examples.CHUNK_BYTES", 0)
    assert sum(len(chunk) for chunk in token_chunks(fitted, source, "train")) == 800


def test_later_use_is_a_mean(source: Cyclic, fitted: NextToken) -> None:
    """Two tokens one by one, then the mean over the eight after them, inside the document."""
    chunk = TokenChunk(fitted, next(source.batches("validation", 80)))
    examples = chunk.examples(torch.tensor([0, 29, 30, 31, 39, 40]))
    mean_N = chunk.member_TN[2:10].mean(dim=0)
    torch.testing.assert_close(examples.later_BN[0], mean_N)
    torch.testing.assert_close(examples.later_BN[2], chunk.member_TN[32:40].mean(dim=0))
    assert examples.later_B.tolist() == [True, True, True, False, False, True]
    assert examples.known_BS.tolist() == [[True, True]] * 4 + [[True, False], [True, True]]


def test_checkpoint_round_trip(source: Cyclic, fitted: NextToken, tmp_path: Path) -> None:
    save_predictor(fitted, tmp_path / "saved", view=source.view, metrics={"tokens_ahead": {}})
    loaded = load_predictor(tmp_path / "saved", source.view)
    assert isinstance(loaded, NextToken)
    assert loaded.config == fitted.config
    state = loaded.start(2)
    assert torch.equal(loaded.tokens_ahead(state), fitted.tokens_ahead(fitted.start(2)))
    assert "1 to 2 tokens ahead" in (tmp_path / "saved" / "README.md").read_text()


def test_the_same_seed_gives_the_same_predictor(source: Cyclic) -> None:
    config = NextTokenConfig(tokens=1, width=8, memories=(4,), steps=3, step_tokens=32)
    first, second = (fit("next_token", source, config=config, options=FitOptions(seed=5)) for _ in range(2))
    for one, other in zip(first.predictor.parameters(), second.predictor.parameters(), strict=True):
        assert torch.equal(one, other)
    assert first.report["history"] == second.report["history"]


def test_commands(reference_traces: TraceDataset, tmp_path: Path) -> None:
    """Train and evaluate from the command line; predictors of layers are scored as without it."""
    traces, saved = str(reference_traces.folder), str(tmp_path / "saved")
    small = ["--set", "steps=4", "width=8", "tokens=2", "memories=4,16"]
    assert main(["train", traces, "--predictor", "next_token", "--out", saved, *small]) == 0
    metrics = json.loads((tmp_path / "saved" / "metrics.json").read_text())
    assert set(metrics["tokens_ahead"]) == {"next_token", "next_token_from_0", "frequency", "previous_token"}
    results = {}
    for name, given in (("with", [saved, "frequency", "previous_token"]), ("without", ["frequency", "previous_token"])):
        path = tmp_path / f"{name}.json"
        assert main(["eval", traces, "--predictor", *given, "--json", str(path)]) == 0
        results[name] = json.loads(path.read_text())
    assert results["with"].pop("tokens_ahead") == metrics["tokens_ahead"]
    ledgers = {name: found.pop("ledger") for name, found in results.items()}  # times are of each run
    assert set(ledgers["with"]) == {"next_token", *ledgers["without"]}
    assert results["with"] == results["without"]
    assert main(["eval", traces, "--predictor", saved, "--json", str(tmp_path / "alone.json")]) == 0
    assert json.loads((tmp_path / "alone.json").read_text())["tokens_ahead"] == metrics["tokens_ahead"]


def test_commands_refuse(reference_traces: TraceDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = str(reference_traces.folder)
    out = ["--out", str(tmp_path / "saved")]
    assert main(["train", traces, "--predictor", "next_token", "--ahead", "2", *out]) == 2
    assert "looks tokens ahead" in capsys.readouterr().err
    assert main(["train", traces, "--predictor", "next_token", "--set", "memories=0", *out]) == 2
    assert "memories=0" in capsys.readouterr().err


def test_nothing_to_score(source: Cyclic, fitted: NextToken) -> None:
    source._rows["test"] = slice(0, 0)
    with pytest.raises(ExpertcastError, match="no tokens to score"):
        evaluate_tokens(fitted, source, "test")
