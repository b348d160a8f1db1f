"""transformers' handlers of the OpenAI routes, with requests checked before they are handled."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from fastapi import HTTPException, Response
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from transformers import BatchEncoding, GenerationConfig, PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler, Modality

from expertcast.predictors.errors import first_line
from expertcast.runtime.serving.errors import error_body
from expertcast.runtime.serving.generation import FailedError
from expertcast.runtime.serving.parameters import COLDEST, biases, checked, prompts
from expertcast.runtime.serving.requests import Request, Requests
from expertcast.runtime.serving.writing import cut

NEW_TOKENS = 1024
"""At most, of a request that does not say how many; transformers' number."""
_OWN = ("temperature", "seed", "stop", "logit_bias", "presence_penalty", "frequency_penalty")
"""What is done here, not by transformers' handlers."""


class Checked(BaseHandler):  # type: ignore[misc]
    """What all routes have in common."""

    requests: Requests
    chats: PreTrainedTokenizerBase | None = None
    """The tokenizer whose chat template the route needs; None: it needs none."""
    _unheeded: frozenset[str] = frozenset()
    """Of what OpenAI's clients may send, what would have to be heeded and is not."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        """As transformers does.

        Raises:
            HTTPException: the model cannot chat, or a request that cannot be answered.
            FailedError: an answer whose tool calls cannot be read.
        """
        if self.chats is not None and self.chats.chat_template is None:
            raise HTTPException(
                400, f"{self.model_manager.force_model!r} has no chat template: ask /v1/completions with a prompt"
            )
        body = checked(body, self._valid_params_class.__mutable_keys__ - self._unheeded)
        request = self.requests.find(request_id)
        request.seed = body.get("seed")  # set when the generation begins
        request.penalties = (body.get("presence_penalty", 0), body.get("frequency_penalty", 0))
        request.stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop", [])
        body.setdefault("stream", False)
        try:
            answer: Response = await self._answer(body, request_id)
        except (LookupError, TypeError, ValueError, TemplateError) as error:
            if request.generated_tokens:
                raise FailedError(f"what was written cannot be parsed: {first_line(error)}") from error
            missing = f"{error} is missing" if isinstance(error, KeyError) else first_line(error)
            raise HTTPException(400, f"this request cannot be read: {missing}") from error
        except HTTPException as error:
            raise HTTPException(400 if error.status_code == 422 else error.status_code, error.detail) from error
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = self._with_errors(answer.body_iterator, request)
        return answer

    async def _answer(self, body: dict[str, Any], request_id: str) -> Any:
        return await super().handle_request(body, request_id)

    async def _with_errors(self, parts: AsyncIterable[Any], request: Request) -> AsyncIterator[Any]:
        """A stream whose error is an object, where transformers writes a text, and the status of the request."""
        async for part in parts:
            begun, failed, message = part.partition('data: {"error": "')
            status = 503 if self.requests.closing else 500
            if failed or '"type":"response.failed"' in part:
                request.failed = status
            if failed:
                error = error_body(status, message.removesuffix('"}\n\n'))
                part = f"{begun}data: {json.dumps(error)}\n\n"
            yield part

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        """As transformers does, with sampling, biases and stops as OpenAI has them; penalties are no part of it."""
        theirs = {name: value for name, value in body.items() if name not in _OWN}
        config: GenerationConfig = super()._build_generation_config(theirs, model_generation_config, use_cb=use_cb)
        config.max_new_tokens = NEW_TOKENS if config.max_new_tokens is None else config.max_new_tokens
        config.stop_strings = body.get("stop") or config.stop_strings
        if "logit_bias" in body:
            config.sequence_bias = biases(body["logit_bias"], self.model_manager.vocabulary)
        _sample(config, body)
        if use_cb:
            _refuse_in_batches(config, body)
        return config


def _sample(config: GenerationConfig, body: dict[str, Any]) -> None:
    """Sample where a request says how: its temperature is above 0, or it gives none and a `top_p`."""
    temperature = body.get("temperature")
    if temperature is None and "top_p" not in body:
        return
    config.do_sample = temperature is None or temperature >= COLDEST
    config.temperature = None
    if config.do_sample:
        config.temperature = 1.0 if temperature is None else float(temperature)
        config.top_k = config.top_k or 0  # which is none; transformers' own default would be 50


def _refuse_in_batches(config: GenerationConfig, body: dict[str, Any]) -> None:
    asked = [name for name in ("presence_penalty", "frequency_penalty") if body.get(name)]
    asked += ["stop"] if config.stop_strings else []
    if asked:
        raise HTTPException(
            400, f"continuous batching knows no {', '.join(asked)}: leave it out, or serve without "
            "--continuous-batching"
        )  # fmt: skip


class Completions(Checked, CompletionHandler):  # type: ignore[misc]
    """/v1/completions, with prompts in all forms that OpenAI has; several are answered one after another."""

    async def _answer(self, body: dict[str, Any], request_id: str) -> Any:
        name, model, tokenizer = self._resolve_model(body)
        batched = self.generation_state.use_continuous_batching(model, Modality.LLM)
        manager = self.generation_state.get_manager(name, use_cb=batched)
        config = self._build_generation_config(body, model.generation_config, use_cb=batched)
        if batched:
            manager.init_cb(model, config)
        given = prompts(body["prompt"], self.model_manager.vocabulary)
        tokens = [tokenizer(each)["input_ids"] if isinstance(each, str) else each for each in given]
        if body["stream"] and len(tokens) > 1:
            raise HTTPException(400, f"{len(tokens)} prompts are not streamed: leave stream out, or send one prompt")
        answers = []
        for ids in tokens:
            inputs = {"input_ids": ids}
            if not batched:
                rows = {"input_ids": [ids], "attention_mask": [[1] * len(ids)]}
                inputs = BatchEncoding(rows, tensor_type="pt").to(model.device)
            own = request_id, model, tokenizer, name, inputs, copy.copy(config), manager, body.get("suffix")
            if body["stream"]:
                return self._streaming(*own)
            answers.append(json.loads((await self._non_streaming(*own)).body))
        choices = [{**answer["choices"][0], "index": place} for place, answer in enumerate(answers)]
        usage = {kind: sum(answer["usage"][kind] for answer in answers) for kind in answers[0]["usage"]}
        return JSONResponse({**answers[0], "choices": choices, "usage": usage})


class Chats(Checked, ChatCompletionHandler):  # type: ignore[misc]
    """/v1/chat/completions."""

    def _build_completion(self, request_id: str, content: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As transformers does, without the stop and what follows it: a response template reads the tokens again."""
        content = cut(content, self.requests.find(request_id).stops)
        made: dict[str, Any] = super()._build_completion(request_id, content, *args, **kwargs)
        return made


class Responses(Checked, ResponseHandler):  # type: ignore[misc]
    """/v1/responses."""

    _unheeded = frozenset({"prompt"})
