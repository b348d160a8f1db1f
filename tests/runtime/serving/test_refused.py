"""What a server cannot do is a 400 in one line before anything runs; what changes no answer is taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from expertcast.runtime import offload
from tests.families.models import tiny_model
from tests.runtime.serving.serving import NAME, Running, chatting, served

ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": NAME, "prompt": "The river", "max_tokens": 3},
    "/v1/chat/completions": {
        "model": NAME, "messages": [{"role": "user", "content": "The river"}], "max_tokens": 3,
    },
    "/v1/responses": {"model": NAME, "input": "The river", "max_output_tokens": 3},
}  # fmt: skip
ALL = tuple(ASKED)
CHATS = ALL[1:]
WRITTEN, CHAT, RESPONSES = ALL
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}

REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (ALL, {"temperature": "hot"}, "temperature='hot': give a number from 0 to 2"),
    (ALL, {"temperature": 5}, "temperature=5: give a number from 0 to 2"),
    (ALL, {"top_p": 1.5}, "top_p=1.5: give a number from 0 to 1"),
    (ALL, {"seed": 2**80}, "give a whole number of 64 bits"),
    (ALL, {"stream": "yes"}, "stream='yes': give true or false"),
    (ALL, {"nonsense": 1}, "this route knows no 'nonsense'"),
    (ALL, {"generation_config": "{"}, "generation_config='{': give a text that holds a JSON object"),
    (ALL[:2], {"logit_bias": {"x": 1}}, "logit_bias has 'x': give tokens from 0 to"),
    (ALL[:2], {"logit_bias": {"99999999": 1}}, "logit_bias has '99999999'"),
    (ALL[:2], {"logit_bias": {"-1": 1}}, "logit_bias has '-1'"),
    (ALL[:2], {"logit_bias": {"5": 101}}, "logit_bias has 101 for 5: give a number from -100 to 100"),
    (ALL[:2], {"logit_bias": {"5": "1"}}, "logit_bias has '1' for 5"),
    (ALL[:2], {"logit_bias": [5]}, "logit_bias=[5]: give an object of numbers by token"),
    (ALL[:2], {"frequency_penalty": -3}, "frequency_penalty=-3: give a number from -2 to 2"),
    (ALL[:2], {"presence_penalty": "1"}, "presence_penalty='1'"),
    (ALL[:2], {"n": 2}, "n=2: give 1"),
    (ALL[:2], {"stop": ["a", ""]}, "stop=['a', '']: give a text or a list of texts, none of them empty"),
    ((WRITTEN,), {"max_tokens": 0}, "max_tokens=0: give a whole number of 1 or more"),
    ((WRITTEN,), {"max_tokens": "5"}, "max_tokens='5'"),
    ((WRITTEN,), {"prompt": None}, "'prompt' is missing"),
    ((WRITTEN,), {"prompt": 5}, "prompt=5: give a text, a list of tokens, or a list of such"),
    ((WRITTEN,), {"prompt": []}, "prompt=[]: give a text"),
    ((WRITTEN,), {"prompt": ["a", 5]}, "prompt=['a', 5]: give a text"),
    ((WRITTEN,), {"prompt": [5, True]}, "prompt=[5, True]: give a text"),
    ((WRITTEN,), {"prompt": [5, -1]}, "the prompt has token -1: give tokens from 0 to 4095"),
    ((WRITTEN,), {"prompt": [[5], [4096]]}, "the prompt has token 4096: give tokens from 0 to 4095"),
    ((WRITTEN,), {"prompt": ["a", "b"], "stream": True}, "2 prompts are not streamed: leave stream out, or send one"),
    ((WRITTEN,), {"prompt": ""}, "the prompt holds no token"),
    ((WRITTEN,), {"prompt": [[]]}, "the prompt holds no token"),
    ((WRITTEN,), {"prompt": "river " * 5000}, "the model reads"),
    ((WRITTEN,), {"model": "other"}, "pinned to 'reference'"),
    ((CHAT,), {"messages": None}, "'messages' is missing"),
    ((WRITTEN,), {"best_of": 2}, "best_of=2: give 1"),
    ((WRITTEN,), {"echo": True}, "echo=True: give false"),
    ((WRITTEN,), {"logprobs": 3}, "this server tells no probabilities"),
    ((WRITTEN,), {"logprobs": 0}, "this server tells no probabilities"),
    ((WRITTEN,), {"suffix": 5}, "suffix=5: give a text"),
    ((CHAT,), {"logprobs": True}, "this server tells no probabilities"),
    ((CHAT,), {"top_logprobs": 2}, "this server tells no probabilities"),
    ((CHAT,), {"response_format": SCHEMA}, "this server cannot hold the model to a form"),
    ((CHAT,), {"response_format": {"type": "json_object"}}, "cannot hold the model to a form"),
    ((CHAT,), {"modalities": ["text", "audio"]}, "this server writes text"),
    ((CHAT,), {"functions": [{"name": "now"}]}, "functions=[{'name': 'now'}]: give nothing"),
    ((CHAT,), {"messages": []}, "messages=[]: give a list of"),
    ((CHAT,), {"messages": "hello"}, "messages='hello': give a list of"),
    ((CHAT,), {"messages": [{"content": "a"}]}, "'role' is missing"),
    (
        (CHAT,),
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "a part of type 'image_url': this server reads text",
    ),
    (CHATS, {"tools": [{"type": "web_search"}]}, "give a list of functions"),
    (CHATS, {"tools": "now"}, "tools='now': give a list of functions"),
    (CHATS, {"tools": [TOOL], "tool_choice": "required"}, "tool_choice='required': give auto or none"),
    ((RESPONSES,), {"input": 5}, "input=5: give a text or a list of objects"),
    (
        (RESPONSES,),
        {"input": [{"type": "input_image", "image_url": "x"}]},
        "type 'input_image': this server reads text",
    ),
    ((RESPONSES,), {"input": [{"type": "other"}, {"role": "user", "content": "a"}]}, "is missing"),
    ((RESPONSES,), {"text": {"format": SCHEMA}}, "cannot hold the model to a form"),
    ((RESPONSES,), {"include": ["message.output_text.logprobs"]}, "a list without probabilities"),
    ((RESPONSES,), {"background": True}, "background=True: give false"),
    ((RESPONSES,), {"previous_response_id": "resp_1"}, "previous_response_id='resp_1': give nothing"),
    ((RESPONSES,), {"prompt": {"id": "p"}}, "this route knows no 'prompt'"),
    ((RESPONSES,), {"instructions": 5}, "instructions=5: give a text"),
]
TAKEN: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (ALL, {"user": "me", "temperature": None, "top_p": None, "seed": 3}),
    (ALL[:2], {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "stop": []}),
    (ALL[:2], {"stream_options": {"include_usage": True}}),
    ((WRITTEN,), {"best_of": 1, "echo": False, "logprobs": None}),
    ((CHAT,), {"logprobs": False, "top_logprobs": 0, "modalities": ["text"], "response_format": {"type": "text"}}),
    ((CHAT,), {"prediction": {"type": "content", "content": "a"}, "reasoning_effort": "low", "verbosity": "low"}),
    (CHATS, {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True}),
    (CHATS, {"safety_identifier": "me", "prompt_cache_key": "a", "tools": [], "tool_choice": "auto"}),
    (CHATS, {"tools": [TOOL], "tool_choice": "none"}),
    ((RESPONSES,), {"truncation": "disabled", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}}),
    ((RESPONSES,), {"include": [], "background": False, "max_tool_calls": 1}),
]


@pytest.fixture(scope="module", params=[False, True], ids=["one by one", "batched"])
def running(request: pytest.FixtureRequest, reference_tokenizer: Any) -> Iterator[Running]:
    with (
        offload(tiny_model("qwen3_moe", torch.float32), slots=12) as offloaded,
        served(offloaded, chatting(reference_tokenizer), batching=request.param) as server,
    ):
        yield server


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("routes", "asked", "said"), REFUSED, ids=[str(each[1])[:50] for each in REFUSED])
def test_refused(running: Running, routes: tuple[str, ...], asked: dict[str, Any], said: str, stream: bool) -> None:
    for route in routes:
        answer = running.post(route, {**ASKED[route], "stream": stream, **asked})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert said in error["message"]
        assert "\n" not in error["message"]
        assert len(error["message"]) < 200


@pytest.mark.parametrize(("routes", "asked"), TAKEN, ids=[str(each[1])[:50] for each in TAKEN])
def test_taken(running: Running, routes: tuple[str, ...], asked: dict[str, Any]) -> None:
    def text(body: dict[str, Any]) -> str:
        answer = running.post(route, body)
        assert answer.status_code == 200
        read = answer.json()
        if route == RESPONSES:
            return str(read["output"][0]["content"][0]["text"])
        return str(read["choices"][0]["text"] if route == WRITTEN else read["choices"][0]["message"]["content"])

    for route in routes:
        assert text({**ASKED[route], **asked}) == text(ASKED[route]) != ""
        streamed = running.post(route, {**ASKED[route], **asked, "stream": True})
        assert streamed.status_code == 200
        assert '"error"' not in streamed.text
