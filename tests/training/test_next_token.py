"""Fitting `next_token`: a text whose next token follows from the last one, checkpoints, scores, the command line."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from expertcast.checkpoints.checkpoint import load_predictor, save_predictor
from expertcast.checkpoints.results import tokens_table
from expertcast.cli import main
from expertcast.data.batch import TraceBatch
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, MoEView
from expertcast.predictors.next_token import PRIOR, NextToken, NextTokenConfig
from expertcast.training.evaluation import evaluate_tokens
from expertcast.training.fit import fit
from expertcast.training.next_token import TokenChunk, token_chunks
from tests.training.synthetic import Rows, random_batch, tiny_view

WORDS = 6
SMALL = NextTokenConfig(
    tokens=2, width=32, inner=16, known_ids=20, memories=(1, 8), later_tokens=8, steps=200, step_tokens=64, passes=99
)


class Cyclic(Rows):
    """Sequences of six words in a ring; a word has one routing and one residual per layer."""

    def __init__(self, view: MoEView, tokens: int = 1200, document_tokens: int = 40) -> None:
        words = random_batch(view, WORDS, seed=3)
        index_T = torch.arange(tokens)
        document_T, position_T = index_T // document_tokens, index_T % document_tokens
        word_T = (position_T + document_T) % WORDS
        batch = TraceBatch(
            residual_TLD=words.residual_TLD[word_T],
            logits_TLE=words.logits_TLE[word_T],
            document_T=document_T,
            position_T=position_T,
            token_T=10 * word_T,
        )
        super().__init__(view, batch)


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
    assert min(means["next_token_by_id"]) > 0.95
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
    assert "previous_token recall_at_k_plus_3" in tokens_table(found["tokens_ahead"]).text()


def test_it_knows_which_token_comes(source: Cyclic) -> None:
    """Sequences in which any word follows any other: only the token's own id tells its routing."""
    drawn = Cyclic(source.view)
    word_T = torch.randint(0, WORDS, (1200,), generator=torch.Generator().manual_seed(1))
    words = drawn.batch[:WORDS]  # the first document's: each of the six once
    drawn.batch = replace(words[word_T], document_T=drawn.batch.document_T, position_T=drawn.batch.position_T)
    predictor = fit("next_token", drawn, config=SMALL).predictor
    assert isinstance(predictor, NextToken)
    assert predictor.ids_V[:WORDS].tolist() == [0, 10, 20, 30, 40, 50]
    found = evaluate_tokens(predictor, drawn, "validation")["tokens_ahead"]
    assert found["next_token_by_id"]["recall_at_k"]["mean"][0] > 0.95
    assert found["next_token"]["recall_at_k"]["mean"][0] < 0.8
    assert found["next_token_by_id"]["recall_at_k"]["mean"][1] < 0.8


def test_first_layers_are_counted_by_id(source: Cyclic, fitted: NextToken) -> None:
    """Each word has one routing: its experts were used by every token of it, all others by none."""
    assert fitted.count_V.tolist() == _words_seen(source)
    words = next(source.batches("train", 800))
    ids_TLK = torch.stack([layer.route(words.logits_TLE[:, layer.index])[0] for layer in source.view], dim=1)
    assert words.token_T is not None
    for row, word in enumerate(fitted.ids_V[:WORDS].tolist()):
        first = int((words.token_T == word).nonzero()[0])
        for layer in (0, 1):
            expected_E = torch.zeros(source.view.shape.experts)
            expected_E[ids_TLK[first, layer]] = fitted.count_V[row]
            assert torch.equal(fitted.count_VCE[row, layer], expected_E)
    blind_BHLE, knowing_BHLE = (fitted.tokens_ahead(fitted.start(1), ids_B) for ids_B in (None, torch.tensor([10])))
    share_CE = (fitted.count_VCE[1] + PRIOR * _network_alone(fitted)) / (fitted.count_V[1] + PRIOR)
    torch.testing.assert_close(knowing_BHLE[0, 0, :2], share_CE)
    assert not torch.allclose(blind_BHLE[0, 0, :2], share_CE)


def _words_seen(source: Cyclic) -> list[int]:
    token_T = next(source.batches("train", 800)).token_T
    assert token_T is not None
    return [*torch.bincount(token_T // 10).tolist(), *[0] * (SMALL.known_ids + 1 - WORDS)]


def _network_alone(predictor: NextToken) -> torch.Tensor:
    """Its probabilities at the first two layers for the word 10, before counts."""
    state = predictor.start(1)
    logits_1HN = predictor.network(state.average_BAP.flatten(1), state.residual_BD, torch.tensor([1]))
    return logits_1HN[0, 0].sigmoid().view(predictor.shape.layers, -1)[:2]


def test_only_the_most_frequent_ids_are_known(source: Cyclic) -> None:
    few = Cyclic(source.view, tokens=60, document_tokens=20)
    few.batch = replace(few.batch, token_T=torch.tensor([5] * 20 + [90] * 12 + [7] * 8 + [1] * 20))
    config = NextTokenConfig(tokens=1, width=8, inner=4, known_ids=2, memories=(4,), steps=1, step_tokens=32)
    predictor = fit("next_token", few, config=config).predictor
    assert isinstance(predictor, NextToken)
    assert predictor.ids_V.tolist() == [5, 90]


def test_it_needs_ids(source: Cyclic) -> None:
    without = Cyclic(source.view)
    without.batch = replace(without.batch, token_T=None)
    with pytest.raises(ExpertcastError, match="have no token ids"):
        fit("next_token", without, config=SMALL)


def test_chunks_carry_the_text_on(source: Cyclic, fitted: NextToken, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split in chunks of 30 tokens gives the states that it gives in one; what comes ends with the chunk."""
    whole = TokenChunk(fitted, next(source.batches("validation", 10_000)))
    expected = whole.examples(torch.arange(whole.windows))
    assert expected.index_B.tolist() == list(range(len(whole)))
    before, begin = None, 0
    for batch in source.batches("validation", 30):
        before = TokenChunk(fitted, batch, before)
        found, rows = before.examples(torch.arange(before.windows)), slice(begin, begin + len(batch))
        torch.testing.assert_close(found.text(), expected.text()[rows], atol=5e-3, rtol=0)
        assert torch.equal(found.residual_BD, expected.residual_BD[rows])
        assert torch.equal(found.row_B, expected.row_B[rows])
        numbers_B = torch.arange(len(batch))
        assert torch.equal(found.used(0, numbers_B), expected.used(0, numbers_B + begin))
        assert not found.known(1)[-1]
        begin += len(batch)
    monkeypatch.setattr("expertcast.training.next_token.CHUNK_BYTES", 0)
    assert sum(len(chunk) for chunk in token_chunks(fitted, source, "train")) == 800


def test_later_use_is_a_mean(source: Cyclic, fitted: NextToken) -> None:
    """Two tokens one by one, then the mean over the eight after them, inside the document."""
    chunk = TokenChunk(fitted, next(source.batches("validation", 80)))
    later_BN, enough_B = chunk.later(torch.tensor([0, 29, 30, 31, 39, 40]))
    torch.testing.assert_close(later_BN[0], chunk.membership(torch.arange(2, 10)).mean(dim=0))
    torch.testing.assert_close(later_BN[2], chunk.membership(torch.arange(32, 40)).mean(dim=0))
    assert enough_B.tolist() == [True, True, True, False, False, True]
    examples = chunk.examples(torch.arange(chunk.windows))
    assert examples.known(1)[[0, 38, 39, 40]].tolist() == [True, True, False, True]


def test_checkpoint_round_trip(source: Cyclic, fitted: NextToken, tmp_path: Path) -> None:
    save_predictor(fitted, tmp_path / "saved", view=source.view, metrics={"tokens_ahead": {}})
    loaded = load_predictor(tmp_path / "saved", source.view)
    assert isinstance(loaded, NextToken)
    assert loaded.config == fitted.config
    ids_B = torch.tensor([10, 11])
    assert torch.equal(loaded.tokens_ahead(loaded.start(2), ids_B), fitted.tokens_ahead(fitted.start(2), ids_B))
    assert "1 to 2 tokens ahead" in (tmp_path / "saved" / "README.md").read_text()


def test_commands(traces: TraceDataset, tmp_path: Path) -> None:
    """Train and evaluate from the command line; predictors of layers are scored as without it."""
    folder, saved = str(traces.folder), str(tmp_path / "saved")
    small = ["--set", "steps=4", "width=8", "tokens=2", "memories=4,16"]
    assert main(["train", folder, "--predictor", "next_token", "--out", saved, *small]) == 0
    metrics = json.loads((tmp_path / "saved" / "metrics.json").read_text())
    assert set(metrics["tokens_ahead"]) == {"next_token", "next_token_by_id", "frequency", "previous_token"}
    results = {}
    for name, given in (("with", [saved, "frequency", "previous_token"]), ("without", ["frequency", "previous_token"])):
        path = tmp_path / f"{name}.json"
        assert main(["eval", folder, "--predictor", *given, "--json", str(path)]) == 0
        results[name] = json.loads(path.read_text())
    assert results["with"].pop("tokens_ahead") == metrics["tokens_ahead"]
    ledgers = {name: found.pop("ledger") for name, found in results.items()}  # times are of each run
    assert set(ledgers["with"]) == {"next_token", *ledgers["without"]}
    assert results["with"] == results["without"]
    assert main(["eval", folder, "--predictor", saved, "--json", str(tmp_path / "alone.json")]) == 0
    assert json.loads((tmp_path / "alone.json").read_text())["tokens_ahead"] == metrics["tokens_ahead"]


def test_commands_refuse(traces: TraceDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", str(traces.folder), "--predictor", "next_token", "--out", str(tmp_path / "saved")]
    assert main([*train, "--ahead", "2"]) == 2
    assert "forecasts tokens" in capsys.readouterr().err
    assert main([*train, "--set", "memories=0"]) == 2
    assert "memories=0" in capsys.readouterr().err


def test_nothing_to_score(source: Cyclic, fitted: NextToken) -> None:
    source.rows["test"] = slice(0, 0)
    with pytest.raises(ExpertcastError, match="no tokens to score"):
        evaluate_tokens(fitted, source, "test")
