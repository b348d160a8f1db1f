"""Unsupported requests get status 400 and one line before anything runs; harmless parameters are accepted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from expertcast import offload
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
    (ALL, {"temperature": "hot"}, "temperature='hot'"),
    (ALL, {"temperature": 5}, "temperature=5"),
    (ALL, {"top_p": 1.5}, "top_p=1.5"),
    (ALL, {"seed": 2**80}, "a whole number of 64 bits"),
    (ALL, {"stream": "yes"}, "stream='yes'"),
    (ALL, {"nonsense": 1}, "'nonsense'"),
    (ALL, {"generation_config": '{"sequence_bias": [[[9], 5.0]]}'}, "'generation_config'"),
    (ALL, {"num_beams": 4}, "'num_beams'"),
    (ALL, {"num_return_sequences": 4}, "'num_return_sequences'"),
    (ALL, {"user": "half \ud800"}, "not Unicode"),
    (ALL, {"metadata": {"\udfff": "a"}}, "not Unicode"),
    (ALL, {"model": "x" * 9999}, "not served here"),
    (ALL, {"temperature": float("nan")}, "temperature=nan"),
    (ALL[:2], {"logit_bias": {"x": 1}}, "logit_bias.x=1"),
    (ALL[:2], {"logit_bias": {"99999999": 1}}, "unknown token 99999999"),
    (ALL[:2], {"logit_bias": {"-1": 1}}, "logit_bias.-1=1"),
    (ALL[:2], {"logit_bias": {"5": 101}}, "logit_bias.5=101"),
    (ALL[:2], {"logit_bias": {"5": "1"}}, "logit_bias.5='1'"),
    (ALL[:2], {"logit_bias": [5]}, "logit_bias=[5]"),
    (ALL[:2], {"logit_bias": {str(token): 1 for token in range(1025)}}, "up to 1024 numbers"),
    (ALL[:2], {"frequency_penalty": -3}, "frequency_penalty=-3"),
    (ALL[:2], {"presence_penalty": "1"}, "presence_penalty='1'"),
    (ALL[:2], {"n": 2}, "n=2"),
    (ALL[:2], {"n": 10**9}, "n=1000000000"),
    (ALL[:2], {"stop": ["a", ""]}, "stop[1]=''"),
    (ALL[:2], {"stop": list("abcde")}, "up to 4 strings"),
    (ALL[:2], {"stop": "a" * 129}, "of 1 to 128 characters"),
    ((WRITTEN,), {"max_tokens": 2**31}, "max_tokens=2147483648"),
    ((WRITTEN,), {"max_tokens": 0}, "max_tokens=0"),
    ((WRITTEN,), {"max_tokens": "5"}, "max_tokens='5'"),
    ((WRITTEN,), {"prompt": None}, "'prompt' is missing"),
    ((WRITTEN,), {"prompt": 5}, "prompt=5"),
    ((WRITTEN,), {"prompt": []}, "prompt=[]"),
    ((WRITTEN,), {"prompt": ["a", 5]}, "prompt[1]=5"),
    ((WRITTEN,), {"prompt": [5, True]}, "prompt[1]=True"),
    ((WRITTEN,), {"prompt": [5, -1]}, "token -1"),
    ((WRITTEN,), {"prompt": [[5, 4096]]}, "unknown token 4096"),
    ((WRITTEN,), {"prompt": ["a", "b"], "stream": True}, "2 prompts"),
    ((WRITTEN,), {"prompt": ""}, "the prompt has no tokens"),
    ((WRITTEN,), {"prompt": [[]]}, "the prompt has no tokens"),
    ((WRITTEN,), {"prompt": "river " * 300}, "tokens"),
    ((WRITTEN,), {"prompt": "river " * 500000}, "3000000 characters"),
    ((WRITTEN,), {"prompt": ["a"] * 129}, "up to 128"),
    ((WRITTEN,), {"prompt": "Use <|tool|> now"}, "unknown token 4096"),
    ((CHAT,), {"messages": [{"role": "user", "content": "Use <|tool|> now"}]}, "unknown token 4096"),
    ((CHAT,), {"messages": [{"role": "user", "content": "river " * 500000}]}, "characters"),
    ((CHAT,), {"chat_template_kwargs": {"chat_template": "{{ 1 / 0 }}"}}, "chat_template_kwargs has chat_template"),
    ((CHAT,), {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs has tokenize"),
    (CHATS, {"parallel_tool_calls": False}, "parallel_tool_calls=False"),
    ((CHAT,), {"verbosity": "low"}, "verbosity='low'"),
    ((RESPONSES,), {"truncation": "auto"}, "truncation='auto'"),
    ((WRITTEN,), {"model": "other"}, "use 'reference'"),
    ((CHAT,), {"messages": None}, "'messages' is missing"),
    ((WRITTEN,), {"best_of": 2}, "best_of=2"),
    ((WRITTEN,), {"echo": True}, "echo=True"),
    ((WRITTEN,), {"logprobs": 3}, "log probabilities are not supported"),
    ((WRITTEN,), {"logprobs": 0}, "log probabilities are not supported"),
    ((WRITTEN,), {"suffix": 5}, "suffix=5"),
    ((CHAT,), {"logprobs": True}, "log probabilities are not supported"),
    ((CHAT,), {"top_logprobs": 2}, "log probabilities are not supported"),
    ((CHAT,), {"response_format": SCHEMA}, "structured output"),
    ((CHAT,), {"response_format": {"type": "json_object"}}, "structured output"),
    ((CHAT,), {"modalities": ["text", "audio"]}, "modalities"),
    ((CHAT,), {"functions": [{"name": "now"}]}, "unknown parameter 'functions'"),
    ((CHAT,), {"messages": []}, "messages=[]"),
    ((CHAT,), {"messages": [{"role": "user", "content": "a"}] * 4097}, "up to 4096"),
    ((RESPONSES,), {"input": [{"role": "user", "content": "a"}] * 4097}, "up to 4096"),
    ((CHAT,), {"messages": "hello"}, "messages='hello'"),
    ((CHAT,), {"messages": [{"content": "a"}]}, "messages[0]={'content': 'a'}"),
    ((CHAT,), {"messages": [{"role": "user", "content": [IMAGE]}]}, "'image_url'"),
    ((CHAT,), {"messages": [{"role": "user", "content": 5}]}, "messages[0].content=5"),
    ((CHAT,), {"messages": [{"role": "assistant", "tool_calls": ["now"]}]}, "messages[0].tool_calls[0]='now'"),
    ((CHAT,), {"messages": [{"role": "user", "content": "refuse"}]}, "the template refuses"),
    (CHATS, {"tools": [{"type": "web_search"}]}, "a list of functions"),
    (CHATS, {"tools": [TOOL] * 129}, "at most 128"),
    (CHATS, {"tools": "now"}, "tools='now'"),
    (CHATS, {"tools": [TOOL], "tool_choice": "required"}, "tool_choice='required'"),
    ((RESPONSES,), {"input": 5}, "input=5"),
    ((RESPONSES,), {"input": [{"type": "input_image", "image_url": "x"}]}, "'input_image'"),
    ((RESPONSES,), {"input": [{"type": "other"}, {"role": "user", "content": "a"}]}, "only text"),
    ((RESPONSES,), {"input": [{"type": "reasoning", "content": []}, {"role": "user", "content": "a"}]}, "only text"),
    ((RESPONSES,), {"text": {"format": SCHEMA}}, "structured output"),
    ((RESPONSES,), {"include": ["message.output_text.logprobs"]}, "a list without logprobs"),
    ((RESPONSES,), {"background": True}, "background=True"),
    ((RESPONSES,), {"previous_response_id": "resp_1"}, "unknown parameter 'previous_response_id'"),
    ((RESPONSES,), {"prompt": {"id": "p"}}, "'prompt'"),
    ((RESPONSES,), {"instructions": 5}, "instructions=5"),
]
TAKEN: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (ALL, {"user": "me", "temperature": None, "top_p": None, "seed": 3}),
    (ALL[:2], {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "stop": []}),
    (ALL[:2], {"stream_options": {"include_usage": True}}),
    ((WRITTEN,), {"best_of": 1, "echo": False, "logprobs": None}),
    ((CHAT,), {"logprobs": False, "top_logprobs": 0, "modalities": ["text"], "response_format": {"type": "text"}}),
    ((CHAT,), {"prediction": {"type": "content", "content": "a"}, "reasoning_effort": "low", "verbosity": "medium"}),
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
        served(offloaded, odd(reference_tokenizer), batching=request.param) as server,
    ):
        yield server


def odd(tokenizer: Any) -> Any:
    """Return a copy with a token that the model's embedding lacks, and a template that may refuse."""
    copied = chatting(tokenizer)
    copied.add_tokens(["<|tool|>"])
    copied.chat_template += (
        "{% if 'refuse' in messages[0].content %}{{ raise_exception('the template refuses') }}{% endif %}"
    )
    return copied


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
