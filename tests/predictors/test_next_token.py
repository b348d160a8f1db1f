"""`next_token` and its tracker: the state's arithmetic, the rows of a forecast, step by step against all at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from expertcast.predictors import ExpertcastError, ModelShape, MoEView, RouterState, names, predictor_class
from expertcast.predictors.next_token import GAIN, NextToken, NextTokenConfig, NextTokenTracker, any_sequence
from expertcast.training.next_token import TokenChunk
from tests.training.synthetic import random_batch, tiny_view

TOKENS = 40


@pytest.fixture(scope="module")
def view() -> MoEView:
    return tiny_view()


def made(view: MoEView, **values: object) -> NextToken:
    """A predictor with random weights everywhere, so that every input reaches every output."""
    torch.manual_seed(0)
    config = NextTokenConfig(
        **{"tokens": 3, "width": 16, "inner": 8, "known_ids": 5, "memories": (1, 4, 32)} | values  # type: ignore[arg-type]
    )
    predictor = NextToken(config, view.shape)
    with torch.no_grad():
        for tensor in (*predictor.parameters(), predictor.mean_D):
            tensor.normal_(std=0.3)
        predictor.usual_LE.uniform_(0.1, 0.4)
    predictor.set_known_ids(torch.tensor([2, 7, 100]))
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
        ({"known_ids": 0}, "known_ids=0"),
        ({"inner": 0}, "inner=0"),
    ],
)
def test_bad_configs(view: MoEView, values: dict[str, object], message: str) -> None:
    with pytest.raises(ExpertcastError, match=message):
        made(view, **values)


def test_averages_by_hand() -> None:
    """One layer, two experts that stand for themselves, memories of 1 and 2 tokens, from 0.5: the first keeps the last
    token, the second halves.

    Expert 0 is used, used, not used: with memory 2 the average goes 0.5, 0.75, 0.875, 0.4375.
    """
    shape = ModelShape(layers=1, experts=2, top_k=1, hidden=3)
    predictor = NextToken(NextTokenConfig(memories=(2, 1), inner=2), shape)
    with torch.no_grad():
        predictor.network.expert_NP.copy_(torch.eye(2))
    ids_BTJ = torch.tensor([[[0], [0], [1]]])
    start_BAP = predictor.start(1).average_BAP
    before_TAP = predictor.averages_before(start_BAP, predictor.network.stand_ins(ids_BTJ[0])[None])[0]
    assert before_TAP[:, 0, 0].tolist() == [0.5, 1.0, 1.0]
    assert before_TAP[:, 1, 0].tolist() == [0.5, 0.75, 0.875]
    state = predictor.read(predictor.start(1), ids_BTJ, torch.zeros(1, 3))
    assert state.average_BAP[0].tolist() == [[0.0, 1.0], [0.4375, 0.5625]]


def test_the_network_by_its_formula(view: MoEView) -> None:
    """All rows at once, one by one, and by plain matrices: z_0, and steps from it."""
    network = made(view).network
    text_BF, residual_BD = torch.randn(3, 24), torch.randn(3, view.shape.hidden)
    row_B = torch.tensor([0, 2, 5])
    x_BW = text_BF @ network.state.weight.T + network.state.bias + residual_BD @ network.residual.weight.T
    x_BW = x_BW + network.residual.bias + GAIN * network.token_VW[row_B]
    x_BW = (x_BW - x_BW.mean(1, keepdim=True)) / (x_BW.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    x_BW = x_BW * network.norm.weight + network.norm.bias
    z_BW = x_BW / (1 + (-x_BW).exp())
    z_BW = z_BW + network.mix(z_BW)
    steps_BW = (z_BW @ network.step.weight.T + network.step.bias).split(16, dim=1)
    found_BRN = network(text_BF, residual_BD, row_B)
    for row, at_BW in enumerate([z_BW, *(z_BW + step_BW for step_BW in steps_BW)]):
        expected_BN = at_BW @ network.head.weight.T + network.bias_RN[row]
        torch.testing.assert_close(found_BRN[:, row], expected_BN, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(network.row(network.first(text_BF, residual_BD, row_B), row), found_BRN[:, row])


def test_rows_of_ids(view: MoEView) -> None:
    """Known ids have their own rows, all others the last row; padding of the list matches no id."""
    predictor = made(view)
    assert predictor.rows_of(torch.tensor([7, 2, 3, 100, 101, 0, 10**9])).tolist() == [1, 0, 5, 2, 5, 5, 5]


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
        ids_TLK = predictor.chosen(batch.logits_TLE).view(20, len(view), -1)
        for layer in view:
            expected_TK, _ = layer.route(batch.logits_TLE[:, layer.index])
            expected_TK = expected_TK + layer.index * view.shape.experts
            assert torch.equal(ids_TLK[:, layer.index].sort(1).values, expected_TK.sort(1).values)


def test_a_forecast(view: MoEView) -> None:
    """A row for the token that begins, S - 1 for those after it and one for all later ones; ids change it."""
    predictor, state = made(view), made(view).start(2)
    blind_BHLE = predictor.tokens_ahead(state)
    assert blind_BHLE.shape == (2, 4, view.shape.layers, view.shape.experts)
    assert blind_BHLE.shape[1] == predictor.rows
    assert ((blind_BHLE > 0) & (blind_BHLE < 1)).all()
    knowing_BHLE = predictor.tokens_ahead(state, torch.tensor([7, 8]))
    assert torch.equal(knowing_BHLE[1], blind_BHLE[1])
    assert not torch.allclose(knowing_BHLE[0], blind_BHLE[0])


def test_tracker_gives_what_the_whole_sequence_gives(view: MoEView) -> None:
    """Token by token, against the examples that training is made of; two documents, with ids and without."""
    predictor = made(view)
    batch = random_batch(view, TOKENS, document_tokens=TOKENS // 2)
    batch = replace(batch, residual_TLD=batch.residual_TLD.bfloat16())
    chunk = TokenChunk(predictor, batch)
    examples = chunk.examples(torch.arange(chunk.windows))
    unknown_B = torch.full_like(examples.row_B, 5)
    with torch.no_grad():
        text_BF = examples.text()
        whole = [
            predictor.network(text_BF, examples.residual_BD, row_B).sigmoid() for row_B in (examples.row_B, unknown_B)
        ]
    assert examples.index_B.tolist() == list(range(TOKENS))
    assert set(examples.row_B.tolist()) > {5}
    assert batch.token_T is not None
    trackers = NextTokenTracker(predictor), NextTokenTracker(predictor)
    for token in range(TOKENS):
        fresh = token % (TOKENS // 2) == 0
        for tracker, ids_BS, expected in zip(trackers, (batch.token_T[None, token, None], None), whole, strict=True):
            found = tracker.start(fresh, ids_BS)
            if fresh:
                assert found is None
            else:
                assert found is not None
                # averages that a window begins with are in half
                expected_HLE = expected[token].view(4, len(view), -1)
                torch.testing.assert_close(found, expected_HLE, atol=2e-3, rtol=0)
            for layer in range(len(view)):
                rows = slice(token, token + 1)
                tracker.see(layer, batch.residual_TLD[rows, layer], batch.logits_TLE[rows, layer], 1)


def test_tracker_reads_a_prompt_at_once(view: MoEView) -> None:
    """Two sequences of 10 tokens in one pass, as token by token: the same forecast for the token after them."""
    predictor = made(view)
    texts = [random_batch(view, 10, seed=seed, document_tokens=10) for seed in (1, 2)]
    at_once = NextTokenTracker(predictor)
    assert at_once.start(fresh=True, token_BS=torch.zeros(2, 10, dtype=torch.long)) is None
    one_by_one = NextTokenTracker(predictor)
    for layer in range(len(view)):
        residual_TD = torch.cat([text.residual_TLD[:, layer] for text in texts])
        logits_TE = torch.cat([text.logits_TLE[:, layer] for text in texts])
        at_once.see(layer, residual_TD, logits_TE, 2)
    for token in range(10):
        one_by_one.start(fresh=token == 0)
        for layer in range(len(view)):
            residual_TD = torch.stack([text.residual_TLD[token, layer] for text in texts])
            logits_TE = torch.stack([text.logits_TLE[token, layer] for text in texts])
            one_by_one.see(layer, residual_TD, logits_TE, 2)
    ids_BS = torch.tensor([[7], [2]])
    found, expected = (tracker.start(False, ids_BS) for tracker in (at_once, one_by_one))
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found, expected)
    assert at_once.start(False, torch.zeros(2, 3, dtype=torch.long)) is None  # a prompt that goes on
    assert at_once.start(False, torch.zeros(3, 1, dtype=torch.long)) is None  # other texts


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
                tracker.see(3, residual_TLD[:, 3], logits_TLE[:, 3], 1)
                tracker.start(fresh=False)
            for layer in range(len(view)):
                tracker.see(layer, residual_TLD[:, layer], logits_TLE[:, layer], 1)
    found, expected = plain.start(False), cut.start(False)
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)


def test_any_of_several_sequences() -> None:
    """1 - 0.5 * 0.8 = 0.6"""
    probability_BHLE = torch.tensor([0.5, 0.2]).view(2, 1, 1, 1)
    assert any_sequence(probability_BHLE).item() == pytest.approx(0.6)
    assert any_sequence(probability_BHLE[:1]).item() == 0.5
