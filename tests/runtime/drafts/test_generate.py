"""transformers' own arguments of `generate` mean with a draft what they mean without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.generation import BaseStreamer

from expertcast import OffloadedModel, offload
from expertcast.predictors import ExpertcastError
from expertcast.runtime.links.emulated import EmulatedLink
from expertcast.runtime.policies import Policies
from tests.runtime.conftest import refused
from tests.runtime.drafts.loops import LENGTHS, SLOTS, check_books, cycles_of, padded, prompt, script, tiny

VOCABULARY = 64
"""Small, so that sequences repeat themselves, and end."""


@pytest.fixture(scope="module")
def offloaded() -> Iterator[OffloadedModel]:
    with offload(tiny("qwen3_moe", vocabulary=VOCABULARY), slots=SLOTS) as opened:
        yield opened


def both(offloaded: OffloadedModel, draft: str, length: int | None, **given: Any) -> tuple[Any, Any]:
    """Return the outputs with a draft and without."""
    given = {"max_new_tokens": 12, "do_sample": False} | given
    drafted = offloaded.generate(**given, draft=draft, draft_length=length)
    check_books(offloaded)
    return drafted, offloaded.generate(**given, draft="none")


# batches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_next", "lfm2_moe"])
def test_rows_of_a_batch_end_where_they_would(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of different lengths, padded on the left; each row generates the end token at another step."""
    given: dict[str, Any] = dict(padded(4, VOCABULARY))
    with offload(tiny(family, vocabulary=VOCABULARY), slots=SLOTS) as offloaded:
        whole = offloaded.generate(**given, max_new_tokens=12, do_sample=False, draft="none")[:, 6:]
        eos = [int(row_S[3 * index + 1]) for index, row_S in enumerate(whole)]
        first = [min(row_S.tolist().index(end) for end in eos if end in row_S.tolist()) for row_S in whole]
        assert len(set(first)) > 1
        for draft, length in (("int4", 3), ("resident", None)):
            with cycles_of(monkeypatch) as cycles:
                got, expected = both(offloaded, draft, length, **given, eos_token_id=eos)
            assert torch.equal(got, expected), draft
            assert all(len(cycle.accepted) == 4 for cycle in cycles)


def test_what_rows_know_ahead_is_not_judged(offloaded: OffloadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows; each cycle drafts 3 tokens by a script that is right on the first row and wrong on the second.

    The prompt gives both rows their first token. Cycle 1: row 0 gets 3 + 1, row 1 gets 1. Cycle 2 begins where row 1
    is: of its 3 places row 0 knows all 3, and gets the next one, 1; row 1 gets 1. From then on row 0 keeps 3 ahead.
    """
    ids_BS = prompt(2, vocabulary=VOCABULARY)
    whole = offloaded.generate(ids_BS, max_new_tokens=12, do_sample=False, draft="none")

    draft = script(offloaded, whole, None, 0)
    with cycles_of(monkeypatch) as cycles:
        got = offloaded.generate(ids_BS, max_new_tokens=12, do_sample=False, draft=draft, draft_length=3)
    assert torch.equal(got, whole)
    assert [cycle.known for cycle in cycles[:3]] == [(0, 0), (3, 0), (3, 0)]
    assert [cycle.accepted for cycle in cycles[:3]] == [(3, 0), (3, 0), (3, 0)]
    assert [cycle.emitted for cycle in cycles[:3]] == [2.5, 1.0, 1.0]


def test_samples_of_one_text(offloaded: OffloadedModel) -> None:
    got = offloaded.generate(
        prompt(vocabulary=VOCABULARY), max_new_tokens=9, do_sample=True, num_return_sequences=3, draft="int4",
        draft_length=3,
    )  # fmt: skip
    assert got.shape == (3, 5 + 9)
    assert len({tuple(row) for row in got.tolist()}) == 3
    check_books(offloaded)


# what ends a text, and what changes logits --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"min_new_tokens": 9, "eos_token_id": list(range(0, VOCABULARY, 3))},
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"max_new_tokens": None, "max_length": 11},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"bad_words_ids": [[1], [5, 6]], "suppress_tokens": [2, 3]},
        {"forced_eos_token_id": 7},
    ],
)
def test_processors_and_limits(given: Any, offloaded: OffloadedModel) -> None:
    for rows, drafts in ((1, {"int4": 3, "substitute": 3}), (3, {"int4": None, "resident": None})):
        asked: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, **padded(rows, VOCABULARY), **given}
        expected = offloaded.generate(**asked, draft="none")
        for draft, length in drafts.items():
            assert torch.equal(offloaded.generate(**asked, draft=draft, draft_length=length), expected), draft
            check_books(offloaded)


def test_stop_strings(reference_model: PreTrainedModel, reference_tokenizer: Any) -> None:
    """The bundled model, which writes text: the string ends in the middle of what a cycle accepts."""
    given = dict(reference_tokenizer("The old man went down to the", return_tensors="pt"))
    text = reference_tokenizer.decode(reference_model.generate(**given, max_new_tokens=12, do_sample=False)[0])
    stopped: dict[str, Any] = {**given, "max_new_tokens": 30, "do_sample": False, "stop_strings": [text[-9:-5]]}
    with offload(reference_model, slots=128) as offloaded:
        expected = offloaded.generate(**stopped, tokenizer=reference_tokenizer, draft="none")
        for length in LENGTHS:
            asked = {"tokenizer": reference_tokenizer, "draft": "resident", "draft_length": length}
            assert torch.equal(offloaded.generate(**stopped, **asked), expected)
        with pytest.raises(ExpertcastError, match="stop_strings need a tokenizer"):
            offloaded.generate(**stopped, draft="resident")
    assert expected.shape[1] < given["input_ids"].shape[1] + 30


# what is given back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "rows", "length"),
    [("int4", 1, 3), ("int4", 3, None), ("resident", 1, None)],
)
def test_scores_logits_and_cache(draft: str, rows: int, length: int | None, offloaded: OffloadedModel) -> None:
    """Scores and logits of every step, of rows that go on; the cache holds the text but its last token."""
    given: dict[str, Any] = dict(padded(rows, VOCABULARY))
    whole = offloaded.generate(**given, max_new_tokens=12, do_sample=False, draft="none")
    got, expected = both(
        offloaded, draft, length, **given, return_dict_in_generate=True, output_scores=True, output_logits=True,
        repetition_penalty=1.3, eos_token_id=int(whole[0, -2]),
    )  # fmt: skip
    assert torch.equal(got.sequences, expected.sequences)
    new = got.sequences.shape[1] - 6
    assert got.past_key_values.get_seq_length() == 6 + new - 1
    assert len(got.scores) == len(got.logits) == len(expected.scores) == new
    ended = torch.zeros(rows, dtype=torch.bool)
    for step in range(new):
        for own, other in ((got.scores, expected.scores), (got.logits, expected.logits)):
            torch.testing.assert_close(own[step][~ended], other[step][~ended], rtol=1e-4, atol=1e-4)
        ended |= got.sequences[:, 6 + step] == int(whole[0, -2])


@pytest.mark.parametrize(
    ("family", "draft"),
    [("qwen3_moe", "int4"), ("gpt_oss", "resident"), ("qwen3_next", "int4"), ("lfm2_moe", "resident"),
     ("minimax", "resident")],
)  # fmt: skip
def test_a_cache_goes_on_in_the_next_turn(family: str, draft: str) -> None:
    """Turn two continues the cache of turn one, which was drafted; so may decoding without a draft."""
    with offload(tiny(family, vocabulary=VOCABULARY), slots=SLOTS) as offloaded:
        given: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
        texts, caches = {}, {}
        for turns in (("none", "none"), (draft, draft), (draft, "none")):
            first = offloaded.generate(prompt(vocabulary=VOCABULARY), draft=turns[0], **given)
            held = first.past_key_values.get_seq_length()
            ids_BS = torch.cat([first.sequences, prompt(1, 3, VOCABULARY, seed=2)], dim=1)
            second = offloaded.generate(ids_BS, past_key_values=first.past_key_values, draft=turns[1], **given)
            assert second.past_key_values is first.past_key_values
            texts[turns], caches[turns] = second.sequences, (held, second.past_key_values.get_seq_length())
        assert caches == dict.fromkeys(texts, (5 + 9 - 1, 5 + 9 + 3 + 9 - 1))
        for sequences in texts.values():
            assert torch.equal(sequences, texts["none", "none"])


class _Heard(BaseStreamer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int]] | str] = []

    def put(self, value: Tensor) -> None:
        self.calls.append((list(value.shape), value.flatten().tolist()))

    def end(self) -> None:
        self.calls.append("end")


def test_a_streamer_hears_the_same(offloaded: OffloadedModel) -> None:
    heard = []
    for name, count in (("none", None), ("int4", 3), ("resident", None)):
        streamer = _Heard()
        offloaded.generate(
            prompt(vocabulary=VOCABULARY), max_new_tokens=9, do_sample=False, streamer=streamer, draft=name,
            draft_length=count,
        )  # fmt: skip
        heard.append(streamer.calls)
    assert all(calls == heard[0] for calls in heard)
    assert len(heard[0]) == 1 + 9 + 1


def test_a_cache_made_by_hand_goes_on(offloaded: OffloadedModel) -> None:
    cache, ids_BS = DynamicCache(config=offloaded.model.config), prompt(vocabulary=VOCABULARY)
    got = offloaded.generate(ids_BS, past_key_values=cache, max_new_tokens=9, do_sample=False, draft="int4")
    assert torch.equal(got, offloaded.generate(ids_BS, max_new_tokens=9, do_sample=False, draft="none"))
    assert cache.get_seq_length() == 5 + 9 - 1


OFFLOADS: dict[str, dict[str, Any]] = {
    "no cache": {"slots": 6, "cache": False},
    "no cache, slow": {"slots": 6, "cache": False, "link": "slow"},
    "by layer": {"slots": 9, "policies": Policies(scope="layer"), "link": "slow"},
    "instant": {"slots": 6, "link": "instant"},
    "few slots": {"slots": 2, "link": "slow"},
    "all slots": {"slots": 24, "link": "slow"},
    "disk": {"slots": 6, "store": "disk"},
}


@pytest.mark.parametrize("kind", OFFLOADS)
def test_the_same_tokens_whatever_the_offload(kind: str) -> None:
    options = dict(OFFLOADS[kind])
    if options.get("link") == "slow":
        options["link"] = EmulatedLink(1e9, 2e-5, jitter=1e-4, seed=1)
    given: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    with offload(tiny("qwen3_moe"), **options) as offloaded:
        expected = offloaded.generate(prompt(3), **given, draft="none")
        for draft, length in (("int4", 2), ("resident", None), ("drop_cascade", 2), ("cascade", 2)):
            got = offloaded.generate(prompt(3), **given, draft=draft, draft_length=length)
            assert torch.equal(got, expected), (draft, length)
            check_books(offloaded)


# What a draft does not go with is refused in one line, and the next generation is as ever


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft": "nonsense"}, "unknown draft 'nonsense': choose from none, auto, int4"),
        ({"draft": "auto:depth=1"}, "depth"),
        ({"draft": "auto", "draft_length": 2}, "leave the length out"),
        ({"draft": "speculate"}, "offload the model with a predictor"),
        ({"draft": Policies()}, "lossless policies"),
        ({"num_beams": 2}, "num_beams"),
        ({"use_cache": False}, "use_cache=False"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"cache_implementation": "static"}, "cannot be rolled back"),
        ({"past_key_values": "static"}, "cannot be rolled back"),
        ({"inputs": prompt(2, vocabulary=VOCABULARY), "streamer": _Heard()}, "streamer"),
    ],
)
def test_refusals_are_one_line(given: dict[str, Any], message: str, offloaded: OffloadedModel) -> None:
    plain: dict[str, Any] = {"inputs": prompt(vocabulary=VOCABULARY), "max_new_tokens": 6, "do_sample": False}
    asked = {**plain, "draft": "int4", **given}
    if "past_key_values" in given:
        asked["past_key_values"] = StaticCache(config=offloaded.model.config, max_cache_len=16)
    with refused(message):
        offloaded.generate(**asked)
    check_books(offloaded)
    drafted = offloaded.generate(**plain, draft="int4", draft_length=2)
    assert torch.equal(drafted, offloaded.generate(**plain, draft="none"))


@pytest.mark.parametrize("options", [{"predictor": "next_norm", "mode": "speculate"}, {"policies": "drop"}])
def test_what_is_not_exact_verifies_nothing(options: dict[str, Any]) -> None:
    if "policies" in options:
        options = {"policies": Policies(prefetch="none", miss="drop")}
    with (
        offload(tiny("qwen3_moe"), slots=SLOTS, **options) as lossy,
        refused("offload it in mode 'exact', and give these as the draft"),
    ):
        lossy.generate(prompt(vocabulary=VOCABULARY), max_new_tokens=4, draft="int4")
