"""Generating for clients: what they no longer wait for is stopped, what fails is told, nothing else is touched.

Whatever generates runs the model's forwards, so what has to stop does so where the next layer's experts are called.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import torch
from fastapi import HTTPException
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cli.serving.utils import _GenerationCancelled

from expertcast.predictors.errors import first_line
from expertcast.runtime.offloaded import OffloadedModel
from expertcast.runtime.serving.requests import Request, Requests
from expertcast.runtime.serving.writing import Penalties

log = logging.getLogger("expertcast.serving")
PATIENCE_S = 1.0
"""Seconds after which a batch's forward is cut off when the server goes down."""
CLOSING, LEFT = "the server is shutting down", "the client has left"
A = TypeVar("A")


class StoppedError(Exception):
    """Nobody waits for this generation any more, or the server is going down."""


class FailedError(Exception):
    """A generation raised; the line says what."""


class Generating:
    """Runs generations of one offloaded model, and stops them.

    Args:
        offloaded: the model.
        requests: those in flight.
    """

    def __init__(self, offloaded: OffloadedModel, requests: Requests) -> None:
        self.requests = requests
        self._current: Request | None = None
        self._unwanted: set[asyncio.Task[Any]] = set()
        self._hooks = [layer.experts.register_forward_pre_hook(self._go_on) for layer in offloaded.view]
        config = offloaded.model.config.get_text_config()
        self._longest: int | None = getattr(config, "max_position_embeddings", None)

    def admit(self, key: str, tokens: int, config: GenerationConfig, room: int | None = None) -> Request:
        """The request of that id, with as many new tokens as the model has places for.

        Args:
            key: of the request.
            tokens: of its prompt.
            config: its own; changed in place.
            room: tokens that a cache has places for; None: it grows.

        Raises:
            HTTPException: no token, too many, or none to generate.
        """
        if not tokens:
            raise HTTPException(400, "the prompt holds no token: give some text")
        for most, said in ((self._longest, "the model reads"), (room, "by its --kv-tokens this server takes")):
            if most is not None:
                if tokens >= most:
                    raise HTTPException(400, f"the prompt has {tokens} tokens, {said} {most - 1} at most")
                config.max_new_tokens = min(config.max_new_tokens, most - tokens)
        request = self.requests.find(key)
        request.prompt_tokens += tokens
        return request

    def guarded(self, model: PreTrainedModel, request: Request) -> Guarded:
        """The model as a request's generation sees it."""
        return Guarded(self, model, request)

    def run(self, request: Request, generate: Callable[[], Tensor]) -> Tensor:
        """A generation, on the thread that all of them run on.

        Raises:
            StoppedError: nobody waits for it.
            FailedError: it raised.
        """
        self._stop_for(request)
        self._current = request
        try:
            if request.seed is not None:
                torch.manual_seed(request.seed)
            return generate()
        except (StoppedError, _GenerationCancelled):
            raise
        except Exception as error:
            log.exception("%s failed", request.key)
            raise FailedError(first_line(error)) from error
        finally:
            self._current = None

    async def while_wanted(self, request: Request, answer: Coroutine[Any, Any, A]) -> A:
        """An answer, unless nobody waits for it any more: then its end is not waited for.

        Raises:
            StoppedError: nobody waits for it.
        """
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(answer)
        gone = loop.create_future()

        def leave() -> None:
            loop.call_soon_threadsafe(lambda: None if gone.done() else gone.set_result(None))

        request.on_gone(leave)
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        self._unwanted.add(task)
        task.add_done_callback(self._ended)
        raise StoppedError(LEFT if request.left else CLOSING)

    async def all_ended(self, seconds: float) -> None:
        """Wait for what nobody waits for any more: it stops when its turn comes."""
        if self._unwanted:
            await asyncio.wait(self._unwanted, timeout=seconds)

    def idle(self, seconds: float) -> bool:
        """Whether nothing is being generated, waited for as long."""
        until = time.monotonic() + seconds
        while self._current is not None and time.monotonic() < until:
            time.sleep(0.01)
        return self._current is None

    def close(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._unwanted.discard(task)
        if not task.cancelled():
            task.exception()  # which nobody else asks for

    def _go_on(self, *_experts: object) -> None:
        """Before each layer's experts."""
        self._stop_for(self._current)

    def _stop_for(self, request: Request | None) -> None:
        grace = PATIENCE_S if request is None else 0.0  # batches end by themselves between two tokens
        if self.requests.closing_for > grace:
            raise StoppedError(CLOSING)
        if request is not None and request.gone:
            raise StoppedError(LEFT)


class _Counted(StoppingCriteria):  # type: ignore[misc]
    """Stops nothing; sees how many tokens there are."""

    def __init__(self, request: Request, prompt_tokens: int) -> None:
        self._request, self._prompt_tokens, self._tokens = request, prompt_tokens, 0
        request.counted_by(lambda: self._tokens)

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        self._tokens = input_ids.shape[1] - self._prompt_tokens
        self._request.look()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Guarded:
    """Stands for the model where transformers' server calls `generate`."""

    def __init__(self, generating: Generating, model: PreTrainedModel, request: Request) -> None:
        self._generating, self._model, self.request = generating, model, request

    def generate(self, **kwargs: Any) -> Tensor:
        """The model's own; see :meth:`Generating.run`."""
        request, prompt_tokens = self.request, kwargs["input_ids"].shape[1]
        kwargs["stopping_criteria"] = StoppingCriteriaList([_Counted(request, prompt_tokens)])
        if any(request.penalties):
            kwargs["logits_processor"] = LogitsProcessorList([Penalties(*request.penalties, prompt_tokens)])
        return self._generating.run(request, lambda: self._model.generate(**kwargs))
