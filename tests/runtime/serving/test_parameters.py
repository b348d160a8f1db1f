"""OpenAI's parameters, through OpenAI's client: the documented effect, or a one-line refusal."""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from openai import BadRequestError, OpenAI
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cli.serving.utils import ReasoningText

from expertcast import OffloadedModel, load_offloaded
from expertcast.checkpoints.bundled import REFERENCE
from expertcast.runtime.serving.parameters import CutStream, cut
from tests.runtime.conftest import PROMPT
from tests.runtime.serving.serving import ANSWERED, ASKS, COMPLETED, NAME, TOKENS, Ask, Running, served

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    f"{{% for message in messages %}}{START}{{{{ message.role }}}}\n{{{{ message.content }}}}{END}\n{{% endfor %}}"
    f"{{{{ '{START}assistant\n' }}}}"
)
"""Start of the answer, by which transformers' server detects this kind of model."""
CHAT = f"{START}user\n{PROMPT}{END}\n{START}assistant\n"
PROMPTED = {ask: PROMPT if ask in COMPLETED else CHAT for ask in ASKS}


def _said(ask: Ask, client: OpenAI, **asked: Any) -> str:
    return ask(client, PROMPT, **asked)[0]


def paired(asks: Iterable[Ask], values: Sequence[Any]) -> list[tuple[Ask, Any]]:
    """Pair every kind of request with every value at least once, but not all combinations."""
    return [(ask, values[place % len(values)]) for place, ask in enumerate(asks)]


class Resident:
    """The resident model."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        self.model, self._tokenizer = model, tokenizer

    def inputs(self, prompt: str) -> dict[str, Tensor]:
        return dict(self._tokenizer(prompt, return_tensors="pt"))

    def tokens(self, prompt: str, **kwargs: Any) -> Tensor:
        inputs = self.inputs(prompt)
        made = self.model.generate(**inputs, max_new_tokens=TOKENS, **{"do_sample": False, **kwargs})
        return made[0, inputs["input_ids"].shape[1] :]

    def text(self, tokens: Tensor) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def _assert_says(ask: Ask, got: str, expected: str) -> None:
    """Response templates strip white space."""
    assert (got == expected) if ask in COMPLETED else (got.strip() == expected.strip())
    assert got


@pytest.fixture(scope="module")
def tokenizer(reference_tokenizer: Any) -> Any:
    copied = copy.deepcopy(reference_tokenizer)
    copied.chat_template = TEMPLATE
    return copied


@pytest.fixture(scope="module")
def resident(reference_fp32: PreTrainedModel, tokenizer: Any) -> Resident:
    return Resident(reference_fp32, tokenizer)


@pytest.fixture(scope="module")
def offloaded() -> Iterator[OffloadedModel]:
    with load_offloaded(REFERENCE, dtype="fp32", slots=96, predictor="next_norm", forecasts="always") as offloaded:
        yield offloaded


@pytest.fixture(scope="module")
def running(offloaded: OffloadedModel, tokenizer: Any) -> Iterator[Running]:
    """A server without batching."""
    with served(offloaded, tokenizer) as server:
        yield server


@pytest.fixture(scope="module")
def batches(tokenizer: Any) -> Iterator[Running]:
    """A server with continuous batching."""
    with (
        load_offloaded(REFERENCE, dtype="fp32", slots=96, predictor="next_norm", forecasts="always") as offloaded,
        served(offloaded, tokenizer, batching=True) as server,
    ):
        yield server


@pytest.mark.parametrize("ask", [*COMPLETED, *ANSWERED])
def test_biases_of_tokens(ask: Ask, running: Running, resident: Resident) -> None:
    plain = resident.tokens(PROMPTED[ask])
    unwanted, wanted = int(plain[0]), int(plain[-1])
    biased = resident.tokens(PROMPTED[ask], sequence_bias={(unwanted,): -100.0, (wanted,): 2.5})
    assert not torch.equal(biased, plain)
    given: Any = {str(unwanted): -100, str(wanted): 2.5}
    _assert_says(ask, _said(ask, running.client(), logit_bias=given, temperature=0), resident.text(biased))
    _assert_says(ask, _said(ask, running.client(), logit_bias={}, temperature=0), resident.text(plain))


@pytest.mark.parametrize(("ask", "penalties"), paired([*COMPLETED, *ANSWERED], [(1.5, 0.0), (0.0, 2.0), (-2.0, -1.0)]))
def test_penalties(ask: Ask, penalties: tuple[float, float], running: Running, resident: Resident) -> None:
    """Penalties apply to generated tokens only; expected from plain forward passes."""
    presence, frequency = penalties
    ids = resident.inputs(PROMPTED[ask])["input_ids"]
    new = list[int]()
    with torch.inference_mode():
        for _ in range(TOKENS):
            ids_1T = torch.cat([ids, torch.tensor([new], dtype=torch.long)], 1)
            logits_V = resident.model(input_ids=ids_1T).logits[0, -1]
            for token, times in Counter(new).items():
                logits_V[token] -= presence + frequency * times
            new.append(int(logits_V.argmax()))
    assert new != resident.tokens(PROMPTED[ask]).tolist()
    text = _said(ask, running.client(), presence_penalty=presence, frequency_penalty=frequency, temperature=0)
    _assert_says(ask, text, resident.text(torch.tensor(new)))


@pytest.mark.parametrize("ask", [*COMPLETED, *ANSWERED])
def test_stops_end_the_text_and_do_not_show(ask: Ask, running: Running, resident: Resident) -> None:
    text, client = resident.text(resident.tokens(PROMPTED[ask])), running.client()
    within, across = text[6:8], text[3:10]
    _assert_says(ask, _said(ask, client, stop=[], temperature=0), text)
    for stop in (within, across, [across, "never written"], [text[-3:], within]):
        first = min(at for at in map(text.find, [stop] if isinstance(stop, str) else stop) if at >= 0)
        _assert_says(ask, _said(ask, client, stop=stop, temperature=0), text[:first])


@pytest.mark.parametrize(
    ("ask", "asked"), paired(PROMPTED, [{"temperature": 1.5}, {"temperature": 0.8, "top_p": 0.7}, {"top_p": 0.9}])
)
def test_sampled_as_the_resident_model_by_the_same_seed(
    ask: Ask, asked: dict[str, float], running: Running, resident: Resident
) -> None:
    """The model's own generation config is greedy."""
    torch.manual_seed(11)
    sampled = resident.tokens(PROMPTED[ask], do_sample=True, top_k=0, **asked)
    assert not torch.equal(sampled, resident.tokens(PROMPTED[ask]))
    _assert_says(ask, _said(ask, running.client(), extra_body={"seed": 11}, **asked), resident.text(sampled))


@pytest.mark.parametrize(
    ("ask", "asked"), paired(PROMPTED, [{}, {"temperature": 0, "top_p": 0.5}, {"temperature": 1e-30}, {"top_p": 0}])
)
def test_greedy_where_nothing_or_nought_is_asked(
    ask: Ask, asked: dict[str, float], running: Running, resident: Resident
) -> None:
    _assert_says(ask, _said(ask, running.client(), **asked), resident.text(resident.tokens(PROMPTED[ask])))


@pytest.mark.parametrize("way", ["running", "batches"])
def test_samples_are_of_the_models_distribution(way: str, resident: Resident, request: pytest.FixtureRequest) -> None:
    """The first tokens of many requests follow the softmax, within five standard deviations."""
    client, count, temperature = request.getfixturevalue(way).client(), 120, 0.7
    with torch.inference_mode():
        logits_V = resident.model(**resident.inputs(PROMPT)).logits[0, -1]
    likely_V = (logits_V / temperature).softmax(-1)
    expected = Counter[str]()
    for token, share in enumerate(likely_V.tolist()):
        expected[resident.text(torch.tensor([token]))] += share

    def ask(stream: bool) -> str:
        made: Any = client.completions.create(
            model=NAME, prompt=PROMPT, max_tokens=1, temperature=temperature, stream=stream
        )
        return "".join(part.choices[0].text for part in (made if stream else [made]))

    with ThreadPoolExecutor(8) as clients:
        got = Counter(clients.map(ask, [place % 2 == 0 for place in range(count)]))
    assert len(got) > 5
    for text, share in expected.most_common(5):
        assert abs(got[text] / count - share) < 5 * (share * (1 - share) / count) ** 0.5, text


@pytest.mark.parametrize("ask", [*COMPLETED, *ANSWERED])
def test_every_request_of_a_batch_is_written_as_it_asked(ask: Ask, batches: Running, resident: Resident) -> None:
    """Greedy, biased and sampled requests in one batch; the same seed gives the same sample."""
    plain = resident.tokens(PROMPTED[ask])
    unwanted = int(plain[0])
    biased = resident.tokens(PROMPTED[ask], sequence_bias={(unwanted,): -100.0})
    ways: list[dict[str, Any]] = [
        {"temperature": 0}, {"logit_bias": {str(unwanted): -100}}, {"temperature": 1.5, "seed": 1},
        {"temperature": 1.5, "seed": 2, "top_p": 0.9}, {},
    ]  # fmt: skip
    with ThreadPoolExecutor(10) as clients:
        texts = list(clients.map(lambda way: _said(ask, batches.client(), **way), ways * 2))
    assert texts[:5] == texts[5:]
    for text, expected in ((texts[0], plain), (texts[1], biased), (texts[4], plain)):
        _assert_says(ask, text, resident.text(expected))
    assert len(set(texts)) == 4


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"frequency_penalty": 1}, "frequency_penalty"),
    ({"stop": "a"}, "stop"),
]


@pytest.mark.parametrize(("ask", "unknown"), paired([*COMPLETED, *ANSWERED], UNKNOWN))
def test_what_batches_do_not_know(ask: Ask, unknown: tuple[dict[str, Any], str], batches: Running) -> None:
    asked, said = unknown
    with pytest.raises(BadRequestError, match=said):
        _said(ask, batches.client(), **asked)
    assert _said(ask, batches.client(), temperature=0, frequency_penalty=0, stop=[])


TEXTS = st.text(alphabet="ab ", max_size=12)
STOPS = st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), min_size=1, max_size=3)


def _streamed(parts: list[Any], stops: list[str]) -> list[Any]:
    async def read() -> list[Any]:
        queue = asyncio.Queue[Any]()
        for part in [*parts, None]:
            queue.put_nowait(part)
        stream, items = CutStream(queue, stops), list[Any]()
        while (item := await stream.get()) is not None:
            items.append(item)
        return items

    return asyncio.run(read())


@given(parts=st.lists(TEXTS, max_size=6), stops=STOPS)
@example(parts=[" ab", "b"], stops=["a", " abb"])
@example(parts=["a", "b"], stops=["ab", "b"])
def test_parts_are_the_whole_up_to_its_first_stop(parts: list[str], stops: list[str]) -> None:
    assert "".join(_streamed(parts, stops)) == cut("".join(parts), stops)


def test_nothing_is_shown_that_may_begin_a_stop() -> None:
    async def read() -> None:
        queue = asyncio.Queue[Any]()
        stream = CutStream(queue, ["END"])
        queue.put_nowait("the E")
        assert await stream.get() == "the "
        queue.put_nowait("N")
        assert queue.qsize() == 1
        try:
            raise AssertionError(stream.get_nowait())
        except asyncio.QueueEmpty:
            queue.put_nowait("O")
        assert await stream.get() == "ENO"

    asyncio.run(read())


def test_what_is_no_text_passes_and_keeps_its_place() -> None:
    thought = ReasoningText("END of thought")
    assert _streamed(["a E", thought, "ND"], ["END"]) == ["a ", "E", thought, "ND"]
    assert _streamed(["a END", thought, "b"], ["END"]) == ["a ", thought]
