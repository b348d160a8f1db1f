"""`next_token` and its tracker: the state's arithmetic, the rows of a forecast, step by step against all at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from expertcast.predictors import ExpertcastError, ModelShape, MoEView, RouterState, names, predictor_class
from expertcast.predictors.next_token import NextToken, NextTokenConfig
from expertcast.predictors.next_token_tracker import NextTokenTracker, any_sequence
from expertcast.training.token_examples import TokenChunk
from tests.training.synthetic import random_batch, tiny_view

TOKENS = 40


@pytest.fixture(scope="module")
def view() -> MoEView:
    return tiny_view()


def made(view: MoEView, **values: object) -> NextToken:
    """A predictor with random weights everywhere, so that every input reaches every output."""
    torch.manual_seed(0)
    config = NextTokenConfig(**{"tokens": 3, "width": 16, "triggers": (0, 1)} | values)  # type: ignore[arg-type]
    predictor = NextToken(config, view.shape)
    with torch.no_grad():
        for tensor in (*predictor.parameters(), predictor.mean_RD, predictor.network.usual_N):
            tensor.normal_(std=0.3)
        predictor.usual_LE.uniform_(0.1, 0.4)
    predictor.bind(view)
    return predictor


def test_it_is_known_as_one_that_looks_tokens_ahead() -> None:
    assert predictor_class("next_token") is NextToken
    assert names("tokens") == ["next_token"]
    assert "next_token" not in names()


def test_it_refuses_to_forecast_layers(view: MoEView) -> None:
    batch = random_batch(view, 2)
    state: RouterState = batch.state(view, 0)
    with pytest.raises(ExpertcastError, match="forecasts tokens, not layers"):
        made(view).forecast(state)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ahead": (2,)}, "ahead="),
        ({"tokens": 0}, "tokens=0"),
        ({"memories": ()}, "memories="),
        ({"memories": (0, 4)}, "memories="),
        ({"triggers": (3,)}, "give layers 0 to 2"),
        ({"triggers": (-1,)}, "give layers 0 to 2"),
    ],
)
def test_bad_configs(view: MoEView, values: dict[str, object], message: str) -> None:
    with pytest.raises(ExpertcastError, match=message):
        made(view, **values)


def test_averages_by_hand() -> None:
    """One layer, two experts, memories of 1 and 2 tokens, from 0.5: the first keeps the last token, the second halves.

    Expert 0 is used, used, not used: with memory 2 the average goes 0.5, 0.75, 0.875, 0.4375.
    """
    shape = ModelShape(layers=1, experts=2, top_k=1, hidden=3)
    predictor = NextToken(NextTokenConfig(memories=(2, 1), triggers=()), shape)
    member_TN = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    before_TAN = predictor.averages_before(predictor.start(1).average_BAN[0], member_TN)
    assert before_TAN[:, 0, 0].tolist() == [0.5, 1.0, 1.0]
    assert before_TAN[:, 1, 0].tolist() == [0.5, 0.75, 0.875]
    state = predictor.read(predictor.start(1), member_TN[None], torch.zeros(1, 2), torch.zeros(1, 3))
    assert state.average_BAN[0].tolist() == [[0.0, 1.0], [0.4375, 0.5625]]


def test_reading_one_by_one_is_reading_at_once(view: MoEView) -> None:
    predictor, batch = made(view), random_batch(view, TOKENS)
    member_TN = predictor.membership(predictor.chosen(batch.logits_TLE))
    residual_TD, last_TN = batch.residual_TLD[:, -1], batch.logits_TLE.softmax(-1).flatten(1)
    state = predictor.start(1)
    for token in range(TOKENS):
        rows = slice(token, token + 1)
        state = predictor.read(state, member_TN[None, rows], last_TN[rows], residual_TD[rows])
    whole = predictor.read(predictor.start(1), member_TN[None], last_TN[-1:], residual_TD[-1:])
    torch.testing.assert_close(state.average_BAN, whole.average_BAN)
    torch.testing.assert_close(state.residual_BD, whole.residual_BD)


def test_chosen_follows_the_routers_own_rule() -> None:
    """A router with a correction bias does not take the highest logits."""
    for family, plain in (("qwen3_moe", True), ("glm4_moe_lite", False)):
        view = tiny_view(family)
        with torch.no_grad():
            bias = next((b for name, b in view[-1].router.named_buffers() if "bias" in name), None)
            if bias is not None:
                bias.copy_(torch.linspace(-1, 1, len(bias)))
        predictor, batch = made(view), random_batch(view, 20)
        assert predictor._plain is plain
        ids_TLK = predictor.chosen(batch.logits_TLE)
        for layer in view:
            expected_TK, _ = layer.route(batch.logits_TLE[:, layer.index])
            assert torch.equal(ids_TLK[:, layer.index].sort(1).values, expected_TK.sort(1).values)


def test_rows_of_a_forecast(view: MoEView) -> None:
    """At a token's end its own row is empty; at a trigger its layers that have run are, and the last two rows agree."""
    predictor, layers = made(view), view.shape.layers
    state = predictor.start(2)
    end_BHLE = predictor.tokens_ahead(state)
    assert end_BHLE.shape == (2, 5, layers, view.shape.experts) == (2, predictor.rows, layers, view.shape.experts)
    assert not end_BHLE[:, 0].any()
    assert (end_BHLE[:, 1:] > 0).all()
    within_BHLE = predictor.tokens_ahead(state, 1, torch.randn(2, view.shape.hidden))
    assert not within_BHLE[:, 0, :2].any()
    assert (within_BHLE[:, 0, 2:] > 0).all()
    assert torch.equal(within_BHLE[:, 3], within_BHLE[:, 4])


def test_tracker_gives_what_the_whole_sequence_gives(view: MoEView) -> None:
    """Layer by layer, against the examples that training is made of; two documents."""
    predictor = made(view)
    batch = random_batch(view, TOKENS, document_tokens=TOKENS // 2)
    batch = replace(batch, residual_TLD=batch.residual_TLD.bfloat16())
    chunk = TokenChunk(predictor, batch)
    examples = chunk.examples(torch.arange(TOKENS))
    start_BW = predictor.network.start(examples.average_BAN, examples.last_BN)
    with torch.no_grad():
        whole = [
            predictor.network(start_BW, examples.average_BAN, examples.last_BN, examples.residual_RBD[at], at).sigmoid()
            for at in range(3)
        ]
    tracker = NextTokenTracker(predictor)
    steps, last, seen = predictor.config.tokens, len(view) - 1, 0
    for token in range(TOKENS):
        tracker.start(fresh=token % (TOKENS // 2) == 0)
        for layer in range(len(view)):
            rows = slice(token, token + 1)
            found = tracker.see(layer, batch.residual_TLD[rows, layer], batch.logits_TLE[rows, layer], 1)
            if layer in (0, 1):
                assert found is not None
                expected = whole[layer + 1][token].view(steps + 1, len(view), -1)[: steps + 1].clone()
                expected[0, : layer + 1] = 0
                torch.testing.assert_close(found[: steps + 1], expected, atol=2e-3, rtol=0)  # examples are in half
            elif layer == last:
                assert found is not None
                if (token + 1) % (TOKENS // 2):
                    expected = whole[0][token + 1].view(steps + 1, len(view), -1)
                    torch.testing.assert_close(found[1:], expected, atol=2e-3, rtol=0)
                    seen += 1
            else:
                assert found is None
    assert seen == TOKENS - 2


def test_tracker_reads_a_prompt_at_once(view: MoEView) -> None:
    """Two sequences of 10 tokens in one pass, as token by token: the same forecast at the end, none within."""
    predictor = made(view)
    texts = [random_batch(view, 10, seed=seed, document_tokens=10) for seed in (1, 2)]
    at_once = NextTokenTracker(predictor)
    at_once.start(fresh=True)
    for layer in range(len(view)):
        residual_TD = torch.cat([text.residual_TLD[:, layer] for text in texts])
        logits_TE = torch.cat([text.logits_TLE[:, layer] for text in texts])
        found = at_once.see(layer, residual_TD, logits_TE, 2)
        assert (found is None) == (layer < len(view) - 1)
    one_by_one = NextTokenTracker(predictor)
    for token in range(10):
        one_by_one.start(fresh=token == 0)
        for layer in range(len(view)):
            residual_TD = torch.stack([text.residual_TLD[token, layer] for text in texts])
            logits_TE = torch.stack([text.logits_TLE[token, layer] for text in texts])
            expected = one_by_one.see(layer, residual_TD, logits_TE, 2)
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found, expected)


def test_tracker_survives_a_pass_that_is_cut_short(view: MoEView) -> None:
    predictor, batch = made(view), random_batch(view, 3, document_tokens=3)
    rows = [(batch.residual_TLD[i : i + 1], batch.logits_TLE[i : i + 1]) for i in range(3)]
    plain, cut = NextTokenTracker(predictor), NextTokenTracker(predictor)
    for token, (residual_TLD, logits_TLE) in enumerate(rows):
        for tracker in (plain, cut):
            tracker.start(fresh=token == 0)
            if tracker is cut and token:
                for layer in (0, 1):
                    tracker.see(layer, residual_TLD[:, layer] + 1, logits_TLE[:, layer] + 1, 1)
                tracker.start(fresh=False)
        for layer in range(len(view)):
            found = [tracker.see(layer, residual_TLD[:, layer], logits_TLE[:, layer], 1) for tracker in (plain, cut)]
    assert found[0] is not None
    assert found[1] is not None
    assert torch.equal(found[0], found[1])


def test_any_of_several_sequences() -> None:
    """1 - 0.5 * 0.8 = 0.6"""
    probability_BHLE = torch.tensor([0.5, 0.2]).view(2, 1, 1, 1)
    assert any_sequence(probability_BHLE).item() == pytest.approx(0.6)
    assert any_sequence(probability_BHLE[:1]).item() == 0.5
