"""transformers' handlers of the OpenAI routes, with requests checked before they are handled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import HTTPException, Response
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler

from expertcast.predictors.errors import first_line
from expertcast.runtime.serving.requests import Requests


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_FITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_output_tokens"),
        (lambda value: _whole(value) and value >= 1, "a whole number of 1 or more"),
    ),
    "temperature": (lambda value: _number(value) and value >= 0, "a number of 0 or more"),
    "top_p": (lambda value: _number(value) and 0 < value <= 1, "a number above 0 and up to 1"),
    "seed": (_whole, "a whole number"),
    "n": (lambda value: value == 1, "1: a request gets one answer"),
    "stop": (
        lambda value: isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value)),
        "a text or a list of texts",
    ),
}  # fmt: skip


class Checked(BaseHandler):  # type: ignore[misc]
    """What all routes have in common."""

    requests: Requests
    chats: PreTrainedTokenizerBase | None = None
    """The tokenizer whose chat template the route needs; None: it needs none."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        """As transformers does.

        Raises:
            HTTPException: the model cannot chat, or a request that cannot be answered.
        """
        for name, (fits, expected) in _FITS.items():
            if body.get(name) is not None and not fits(body[name]):
                raise HTTPException(400, f"{name}={body[name]!r}: give {expected}")
        if self.chats is not None and self.chats.chat_template is None:
            raise HTTPException(
                400, f"{self.model_manager.force_model!r} has no chat template: ask /v1/completions with a prompt"
            )
        self.requests.find(request_id).seed = body.pop("seed", None)  # set when the generation begins
        body.setdefault("stream", False)
        try:
            answer: Response = await super().handle_request(body, request_id)
        except (KeyError, TypeError, ValueError, TemplateError) as error:
            missing = f"{error} is missing" if isinstance(error, KeyError) else first_line(error)
            raise HTTPException(400, f"this request cannot be read: {missing}") from error
        return answer


class Completions(Checked, CompletionHandler):  # type: ignore[misc]
    """/v1/completions."""


class Chats(Checked, ChatCompletionHandler):  # type: ignore[misc]
    """/v1/chat/completions."""


class Responses(Checked, ResponseHandler):  # type: ignore[misc]
    """/v1/responses."""
