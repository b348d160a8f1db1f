"""Greedy acceptance by hand; sampled acceptance against the exact distribution of whole sequences, by chi-square.

The model and the draft of the samples are Markov chains over a few tokens, so the probability of every sequence is a
product. A draft's tokens, accepted or not, are completed to n + 1 by drawing from the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper

from expertcast import OffloadedModel, offload
from expertcast.runtime.drafts.decoding import accept_greedy, accept_sampled, pick
from tests.runtime.drafts.loops import SLOTS, Scripted, cycles_of, script, tiny

SAMPLES = 30_000
LEAST_P = 1e-3

Accept = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, torch.Generator], tuple[Tensor, Tensor]]


def chain(vocabulary: int, seed: int, kept: int | None = None) -> Tensor:
    """Return logits of the next token by the last one [V, V]; only the `kept` largest of each row are finite."""
    logits_VV = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed)) * 1.2
    if kept is not None:
        least_V1 = logits_VV.topk(kept).values[:, -1:]
        logits_VV = logits_VV.masked_fill(logits_VV < least_V1, -torch.inf)
    return logits_VV


def follow(logits_VV: Tensor, last_B: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(logits_VV[last_B].softmax(dim=-1), 1, generator=generator)[:, 0]


def sequences(
    accept: Accept, p_VV: Tensor, q_VV: Tensor | None, drafted: int, known: tuple[int, ...] = (), seed: int = 0
) -> tuple[Tensor, Tensor]:
    """`SAMPLES` rows of drafted + 1 tokens behind token 0, and how many drafted tokens stood in each.

    Without q the draft is the likeliest token. `known` are the ids that each row's draft begins with.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.zeros(SAMPLES, dtype=torch.long)]
    for position in range(drafted):
        if position < len(known):
            ids.append(torch.full_like(ids[0], known[position]))
        elif q_VV is None:
            ids.append(p_VV[ids[-1]].argmax(dim=-1))
        else:
            ids.append(follow(q_VV, ids[-1], generator))
    ids_BN = torch.stack(ids, dim=1)
    if q_VV is None:  # certain of the likeliest token
        q_VV = torch.full_like(p_VV, -torch.inf).scatter(1, p_VV.argmax(dim=1, keepdim=True), 0.0)
    q_BnV = q_VV[ids_BN[:, :-1]] if drafted else None
    start_B = torch.full((SAMPLES,), len(known))
    out_BN, accepted_B = accept(p_VV[ids_BN], ids_BN[:, 1:], q_BnV, start_B, generator)
    for position in range(1, drafted + 1):
        more_B = follow(p_VV, out_BN[:, position - 1].clamp(min=0), generator)
        out_BN[:, position] = torch.where(position > accepted_B, more_B, out_BN[:, position])
    return out_BN, accepted_B


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Return the p-value of a chi-squared test of the counts. Cells with fewer than 5 expected are joined."""
    expected = expected.double()
    if bool(counts[expected == 0].any()):
        return 0.0
    small = expected < 5
    cells = torch.cat([expected[~small], expected[small].sum()[None]])
    found = torch.cat([counts[~small], counts[small].sum()[None]])[cells > 0]
    cells = cells[cells > 0]
    assert len(cells) > 3
    statistic = ((found - cells) ** 2 / cells).sum()
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2, dtype=torch.float64), statistic / 2))


def follows(ids_BN: Tensor, p_VV: Tensor, known: tuple[int, ...] = ()) -> float:
    """The p-value of rows that are to follow the chain."""
    vocabulary, length = p_VV.shape[0], ids_BN.shape[1]
    p = p_VV.double().softmax(dim=-1)
    expected = torch.zeros((vocabulary,) * length, dtype=torch.float64)
    for cell in product(range(vocabulary), repeat=length):
        if cell[: len(known)] == known:
            chance = 1.0
            for position in range(len(known), length):
                chance *= float(p[cell[position - 1] if position else 0, cell[position]])
            expected[cell] = chance * len(ids_BN)
    places = torch.tensor([vocabulary**power for power in range(length - 1, -1, -1)])
    observed = torch.bincount((ids_BN * places).sum(dim=1), minlength=expected.numel()).double()
    return p_value(observed, expected.flatten())


def redrawn_from_p(
    p_BNV: Tensor, drafted_Bn: Tensor, q_BnV: Tensor | None, start_B: Tensor | None, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The wrong rule: what is rejected is drawn again from p, not from what q left of it."""
    out_BN, accepted_B = accept_sampled(p_BNV, drafted_Bn, q_BnV, start_B, generator)
    p_BV = p_BNV[torch.arange(len(p_BNV)), accepted_B].softmax(dim=-1)
    out_BN.scatter_(1, accepted_B[:, None], torch.multinomial(p_BV, 1, generator=generator))
    return out_BN, accepted_B


CASES = [
    pytest.param(8, None, "sampled", id="sampled"),
    pytest.param(8, None, "likeliest", id="deterministic"),
    pytest.param(6, 3, "sampled", id="top-k of p"),
    pytest.param(6, 3, "top-k", id="top-k of both"),
    pytest.param(6, None, "top-k", id="q is zero where p is not"),
]


@pytest.mark.parametrize("drafted", [1, 3])
@pytest.mark.parametrize(("vocabulary", "kept", "draft"), CASES)
def test_sampled_follows_the_model(vocabulary: int, kept: int | None, draft: str, drafted: int) -> None:
    vocabulary = min(vocabulary, {3: 6, 4: 5}.get(drafted, vocabulary))
    p_VV = chain(vocabulary, 1, kept)
    q_VV = None if draft == "likeliest" else chain(vocabulary, 2, 2 if draft == "top-k" else None)
    ids_BN, accepted_B = sequences(accept_sampled, p_VV, q_VV, drafted)
    assert 0 < float(accepted_B.float().mean()) < drafted
    assert follows(ids_BN, p_VV) > LEAST_P
    wrong_BN, _ = sequences(redrawn_from_p, p_VV, q_VV, drafted)
    assert follows(wrong_BN, p_VV) < LEAST_P


@pytest.mark.parametrize("draft", ["sampled", "likeliest"])
def test_as_many_stand_as_the_distributions_share(draft: str) -> None:
    """The first token stands with probability sum(min(p, q)); within 5 standard errors of 30,000 draws."""
    p_VV, q_VV = chain(8, 1), chain(8, 2)
    _, accepted_B = sequences(accept_sampled, p_VV, q_VV if draft == "sampled" else None, 3)
    p_V, q_V = p_VV[0].softmax(dim=-1), q_VV[0].softmax(dim=-1)
    shared = float(torch.minimum(p_V, q_V).sum() if draft == "sampled" else p_V.max())
    error = (shared * (1 - shared) / SAMPLES) ** 0.5
    assert abs(float((accepted_B > 0).float().mean()) - shared) < 5 * error


@pytest.mark.parametrize("known", [(5,), (5, 2), (5, 2, 5)])
@pytest.mark.parametrize("draft", ["sampled", "likeliest"])
def test_known_text_stands_though_the_model_never_says_it(known: tuple[int, ...], draft: str) -> None:
    """Token 5 has probability 0 everywhere; after known tokens the model decides."""
    p_VV = chain(6, 1).index_fill(1, torch.tensor([5]), -torch.inf)
    q_VV = chain(6, 2) if draft == "sampled" else None
    ids_BN, accepted_B = sequences(accept_sampled, p_VV, q_VV, 3, known)
    assert int(accepted_B.min()) >= len(known)
    assert follows(ids_BN, p_VV, known) > LEAST_P


def test_a_draft_of_the_model_itself_always_stands() -> None:
    p_VV = chain(8, 1, kept=5)
    ids_BN, accepted_B = sequences(accept_sampled, p_VV, p_VV, 3)
    assert bool((accepted_B == 3).all())
    assert follows(ids_BN[:, :3], p_VV) > LEAST_P


def test_nothing_drafted_is_ordinary_sampling() -> None:
    p_VV = chain(8, 1)
    ids_BN, accepted_B = sequences(accept_sampled, p_VV, p_VV, 0)
    assert not accepted_B.any()
    assert follows(ids_BN, p_VV) > LEAST_P


def test_the_same_generator_draws_the_same() -> None:
    p_VV, q_VV = chain(8, 1), chain(8, 2)
    first, again = (sequences(accept_sampled, p_VV, q_VV, 3, seed=7)[0] for _ in range(2))
    assert torch.equal(first, again)


def test_nothing_is_left_of_a_model_that_the_draft_equals() -> None:
    """Row 0: p is q, and the drafted token is possible in neither, as after rounding: it is drawn from p. Row 1: p is
    certain of another token than the drafted one."""
    p_VV = torch.tensor([[0.0, 0.0, -torch.inf], [-torch.inf, -torch.inf, 0.0]])
    q_VV = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, 0.0, 0.0]])
    rows = torch.tensor([0, 1]).repeat(500)
    ids_BN, accepted_B = accept_sampled(
        p_VV[rows][:, None].expand(-1, 2, -1), torch.tensor([[2], [1]]).repeat(500, 1), q_VV[rows][:, None]
    )
    assert not accepted_B.any()
    assert set(ids_BN[::2, 0].tolist()) == {0, 1}
    assert set(ids_BN[1::2, 0].tolist()) == {2}
    assert (ids_BN[:, 1] == -1).all()


def test_tokens_of_a_draft_are_the_likeliest_or_drawn() -> None:
    logits_BV = torch.tensor([[0.0, 1.0, -torch.inf], [2.0, 1.0, 2.5]]).repeat(20_000, 1)
    assert pick(logits_BV[:2], sample=False).tolist() == [1, 2]
    drawn_B = pick(logits_BV, sample=True)
    assert drawn_B.shape == (40_000,)
    for row in range(2):
        shares_V = torch.bincount(drawn_B[row::2], minlength=3) / 20_000
        assert torch.allclose(shares_V, logits_BV[row].softmax(dim=-1), atol=0.02)


def test_another_default_device_changes_nothing() -> None:
    """The logits' device counts: here the default one can hold no numbers."""
    p_VV, drafted_Bn = chain(8, 1), torch.tensor([[1, 2, 3], [4, 5, 6]])
    logits_BNV, start_B = p_VV[torch.tensor([[0, 1, 2, 3], [0, 4, 5, 6]])], torch.tensor([1, 0])
    with torch.device("meta"):
        ids_BN, _ = accept_sampled(logits_BNV, drafted_Bn, logits_BNV[:, :3], start_B)
        assert ids_BN.device.type == "cpu"
        ids_BN, _ = accept_greedy(logits_BNV, drafted_Bn, start_B)
    assert ids_BN.device.type == "cpu"


def test_greedy_by_hand() -> None:
    """V = 4, n = 3. The model's likeliest tokens are 1 2 3 0 in every row."""
    logits_BNV = torch.full((5, 4, 4), -1.0)
    for position, token in enumerate((1, 2, 3, 0)):
        logits_BNV[:, position, token] = 1.0
    drafted_Bn = torch.tensor([[1, 2, 3], [1, 0, 3], [0, 2, 3], [0, 2, 0], [0, 0, 0]])
    ids_BN, accepted_B = accept_greedy(logits_BNV, drafted_Bn)
    assert accepted_B.tolist() == [3, 1, 0, 0, 0]
    assert ids_BN.tolist() == [[1, 2, 3, 0], [1, 2, -1, -1], [1, -1, -1, -1], [1, -1, -1, -1], [1, -1, -1, -1]]
    # With 0, 1, 1, 1 and 3 known tokens: row 2 stands whole, row 3 to its last token, row 4 as it is given.
    ids_BN, accepted_B = accept_greedy(logits_BNV, drafted_Bn, torch.tensor([0, 1, 1, 1, 3]))
    assert accepted_B.tolist() == [3, 1, 3, 2, 3]
    assert ids_BN.tolist() == [[1, 2, 3, 0], [1, 2, -1, -1], [0, 2, 3, 0], [0, 2, 3, -1], [0, 0, 0, 0]]
    ids_BN, accepted_B = accept_greedy(logits_BNV[:, :1], drafted_Bn[:, :0])
    assert (ids_BN.tolist(), accepted_B.tolist()) == ([[1]] * 5, [0] * 5)


VOCABULARY, NEW = 4, 4
PROMPT = torch.tensor([[1, 3, 1, 3, 2, 1]])
FAR = 1e-6


@pytest.fixture(scope="module")
def offloaded() -> Iterator[OffloadedModel]:
    model = tiny("qwen3_moe", vocabulary=VOCABULARY)
    model.lm_head.weight.data.mul_(0.6)  # every text has its chance
    for name, tensor in model.named_parameters():
        if "down_proj" in name:  # and experts matter
            tensor.data.mul_(10.0)
    with offload(model, slots=SLOTS) as opened:
        yield opened


def probabilities(offloaded: OffloadedModel, given: dict[str, Any]) -> Tensor:
    """[256] of each text, from the exact model's logits over the whole texts at once."""
    texts = torch.tensor(list(product(range(VOCABULARY), repeat=NEW)))
    whole_BS = torch.cat([PROMPT.expand(len(texts), -1), texts], dim=1)
    with torch.no_grad():
        logits_BSV = offloaded.model(whole_BS).logits.float()
    chance_B = torch.ones(len(texts))
    for place in range(NEW):
        column = PROMPT.shape[1] + place
        scores_BV = TemperatureLogitsWarper(given.get("temperature", 1.0))(whole_BS, logits_BSV[:, column - 1])
        if given["top_k"]:
            scores_BV = TopKLogitsWarper(given["top_k"])(whole_BS, scores_BV)
        chance_B *= scores_BV.softmax(dim=-1).gather(1, texts[:, place : place + 1])[:, 0]
    return chance_B


PLAIN: dict[str, Any] = {"top_k": 0}
WARM: dict[str, Any] = {"top_k": 3, "temperature": 1.6}


@pytest.mark.parametrize(
    ("draft", "rows", "batches", "given"),
    [("int4", 1000, 3, WARM), ("resident", 4, 80, PLAIN), ("script", 1000, 3, PLAIN)],
)
def test_texts_follow_the_exact_model(
    draft: str,
    rows: int,
    batches: int,
    given: dict[str, Any],
    offloaded: OffloadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`script` proposes 1 whatever the text is: a certain guess that is mostly wrong. With many rows all experts are
    needed, and `resident` replaces none."""
    torch.manual_seed(1)
    if draft == "script":
        draft = script(offloaded, PROMPT)
        monkeypatch.setattr(Scripted, "next", lambda _self, _ids: 1)
    counts = torch.zeros(VOCABULARY**NEW)
    with cycles_of(monkeypatch) as cycles:
        for _ in range(batches):
            ids_BS = offloaded.generate(
                PROMPT, do_sample=True, max_new_tokens=NEW, num_return_sequences=rows, draft=draft, draft_length=2,
                **given,
            )[:, PROMPT.shape[1] :]  # fmt: skip
            place_B = (ids_BS * torch.tensor([64, 16, 4, 1])).sum(dim=1)
            counts += torch.bincount(place_B, minlength=len(counts))
    judged = [kept - known for cycle in cycles for kept, known in zip(cycle.accepted, cycle.known, strict=True)]
    offered = sum(cycle.drafted - min(known, cycle.drafted) for cycle in cycles for known in cycle.known)
    assert 0.02 * offered < sum(judged) < 0.98 * offered
    assert any(max(cycle.known) > min(cycle.known) for cycle in cycles), "rows are never apart"
    chance = probabilities(offloaded, given)
    torch.testing.assert_close(float(chance.sum()), 1.0)
    assert p_value(counts, chance * rows * batches) > FAR
