"""Generating for clients: what they no longer wait for is stopped, what fails is told, nothing else is touched.

transformers' server generates on one thread, request by request, or by continuous batching on another. Both run the
model's forwards, so what has to stop does so where the next layer's experts are called.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import torch
from fastapi import HTTPException
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    CBGenerateManager,
    CBStreamer,
    CBWorkerDeadError,
    DirectStreamer,
    GenerateManager,
    GenerationState,
    _GenerationCancelled,
    _StreamError,
)

from expertcast.predictors.errors import first_line
from expertcast.runtime.offloaded import OffloadedModel
from expertcast.runtime.serving.requests import Request, Requests

log = logging.getLogger("expertcast.serving")
PER_REQUEST = ("max_new_tokens", "eos_token_id", "transformers_version")
"""What continuous batching takes from each request; the rest is the first one's."""
MOST_AT_ONCE = 1024
"""Tokens of a batch at most, where the cache has a bound: activations take memory too."""
PATIENCE_S = 1.0
"""Seconds after which a batch's forward is cut off when the server goes down."""
_CLOSING, _LEFT = "the server is shutting down", "the client has left"
A = TypeVar("A")


class GenerationStopped(Exception):
    """Nobody waits for this generation any more, or the server is going down."""


class GenerationFailed(Exception):
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

    def admit(self, key: str, tokens: int, config: GenerationConfig) -> Request:
        """The request of that id, with as many new tokens as the model has places for.

        Args:
            key: of the request.
            tokens: of its prompt.
            config: its own; changed in place.

        Raises:
            HTTPException: no token, too many, or none to generate.
        """
        if not tokens:
            raise HTTPException(400, "the prompt holds no token: give some text")
        if self._longest is not None:
            if tokens >= self._longest:
                raise HTTPException(400, f"the prompt has {tokens} tokens, the model reads {self._longest - 1} at most")
            config.max_new_tokens = min(config.max_new_tokens, self._longest - tokens)
        request = self.requests.find(key)
        request.prompt_tokens = tokens
        return request

    def guarded(self, model: PreTrainedModel, request: Request) -> Guarded:
        """The model as a request's generation sees it."""
        return Guarded(self, model, request)

    def run(self, request: Request, generate: Callable[[], Tensor]) -> Tensor:
        """A generation, on the thread that all of them run on.

        Raises:
            GenerationStopped: nobody waits for it.
            GenerationFailed: it raised.
        """
        self._stop_for(request)
        self._current = request
        try:
            if request.seed is not None:
                torch.manual_seed(request.seed)
            return generate()
        except (GenerationStopped, _GenerationCancelled):
            raise
        except Exception as error:
            log.exception("%s failed", request.key)
            # transformers' server writes it between quotes
            raise GenerationFailed(first_line(error).replace("\\", "/").replace('"', "'")) from error
        finally:
            self._current = None

    async def while_wanted(self, request: Request, answer: Coroutine[Any, Any, A]) -> A:
        """An answer, unless nobody waits for it any more: then its end is not waited for.

        Raises:
            GenerationStopped: nobody waits for it.
        """
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(answer)
        gone = loop.create_future()
        request.on_gone(lambda: loop.call_soon_threadsafe(lambda: gone.done() or gone.set_result(None)))
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        self._unwanted.add(task)
        task.add_done_callback(self._ended)
        raise GenerationStopped(_LEFT if request.left else _CLOSING)

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
            raise GenerationStopped(_CLOSING)
        if request is not None and request.gone:
            raise GenerationStopped(_LEFT)


class _Counted(StoppingCriteria):  # type: ignore[misc]
    """Stops nothing; sees how many tokens there are."""

    def __init__(self, request: Request) -> None:
        self._request, self._tokens = request, 0
        request.counted_by(lambda: self._tokens)

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        self._tokens = input_ids.shape[1] - self._request.prompt_tokens
        self._request.look()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Guarded:
    """Stands for the model where transformers' server calls `generate`."""

    def __init__(self, generating: Generating, model: PreTrainedModel, request: Request) -> None:
        self._generating, self._model, self.request = generating, model, request

    def generate(self, **kwargs: Any) -> Tensor:
        """The model's own; see :meth:`Generating.run`."""
        criteria = StoppingCriteriaList([_Counted(self.request)])
        return self._generating.run(self.request, lambda: self._model.generate(**kwargs, stopping_criteria=criteria))


class OneByOne(GenerateManager):  # type: ignore[misc]
    """Request after request, by the model's `generate`.

    Args:
        generating: what runs them.
    """

    def __init__(self, generating: Generating) -> None:
        super().__init__()
        self._generating = generating

    def generate_streaming(
        self, model: PreTrainedModel, processor: PreTrainedTokenizerBase, inputs: Mapping[str, Any],
        gen_config: GenerationConfig, request_id: str, response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], DirectStreamer]:  # fmt: skip
        """As transformers has it."""
        guarded = self._guarded(model, inputs, gen_config, request_id)
        made: tuple[asyncio.Queue[Any], DirectStreamer] = super().generate_streaming(
            guarded, processor, inputs, gen_config, request_id, response_parser
        )
        return made

    async def generate_non_streaming(
        self, model: PreTrainedModel, processor: PreTrainedTokenizerBase, inputs: Mapping[str, Any],
        gen_config: GenerationConfig, request_id: str,
    ) -> tuple[str, int, Tensor]:  # fmt: skip
        """As transformers has it; ended where nobody waits.

        Raises:
            GenerationStopped: nobody waits for it.
            GenerationFailed: it raised.
        """
        guarded = self._guarded(model, inputs, gen_config, request_id)
        answer = super().generate_non_streaming(guarded, processor, inputs, gen_config, request_id)
        return await self._generating.while_wanted(guarded.request, answer)

    @property
    def alive(self) -> bool:
        """Whether the thread is."""
        return bool(self._thread._thread.is_alive())

    def _guarded(
        self, model: PreTrainedModel, inputs: Mapping[str, Any], config: GenerationConfig, key: str
    ) -> Guarded:
        return self._generating.guarded(model, self._generating.admit(key, inputs["input_ids"].shape[-1], config))


class Batched(CBGenerateManager):  # type: ignore[misc]
    """Many requests at once, by continuous batching.

    Args:
        generating: what stops them.
        kv_tokens: tokens that the cache of all requests together has room for; None: as many as fit the device.
    """

    def __init__(self, generating: Generating, kv_tokens: int | None) -> None:
        blocks = None if kv_tokens is None else -(-kv_tokens // ContinuousBatchingConfig().page_size)
        super().__init__(ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=kv_tokens and MOST_AT_ONCE))
        self._generating = generating
        self._first: dict[str, Any] | None = None

    def init_cb(self, model: PreTrainedModel, gen_config: GenerationConfig) -> None:
        """Start batching as the first request asks to sample.

        Raises:
            HTTPException: a later request asks for another way, which would be ignored.
        """
        asked = {name: value for name, value in gen_config.to_diff_dict().items() if name not in PER_REQUEST}
        if "stop_strings" in asked:
            raise HTTPException(400, "continuous batching knows no stop strings: leave `stop` out")
        if self._first is None:
            self._first = asked
        if asked != self._first:
            other = sorted(name for name in {*asked, *self._first} if asked.get(name) != self._first.get(name))
            raise HTTPException(
                400, "continuous batching samples all requests as the first one asked, and this one differs in "
                f"{', '.join(other)}: leave that out, or serve without --continuous-batching"
            )  # fmt: skip
        super().init_cb(model, gen_config)

    def generate_streaming(
        self, model: PreTrainedModel, processor: PreTrainedTokenizerBase, inputs: Mapping[str, Any],
        gen_config: GenerationConfig, request_id: str, response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], CBStreamer]:  # fmt: skip
        """As transformers has it."""
        request = self._generating.admit(request_id, len(inputs["input_ids"]), gen_config)
        queue, streamer = super().generate_streaming(
            model, processor, inputs, gen_config, request_id, response_parser
        )
        request.counted_by(lambda: streamer.total_tokens)
        loop = asyncio.get_running_loop()

        def end() -> None:
            loop.call_soon_threadsafe(queue.put_nowait, _StreamError(_CLOSING))
            streamer.cancel()

        request.on_gone(end)
        return queue, streamer

    async def generate_non_streaming(
        self, model: PreTrainedModel, processor: PreTrainedTokenizerBase, inputs: Mapping[str, Any],
        gen_config: GenerationConfig, request_id: str,
    ) -> tuple[str, int, list[int]]:  # fmt: skip
        """As transformers has it; ended where nobody waits.

        Raises:
            GenerationStopped: nobody waits for it.
            GenerationFailed: it raised.
        """
        request = self._generating.admit(request_id, len(inputs["input_ids"]), gen_config)
        answer = super().generate_non_streaming(model, processor, inputs, gen_config, request_id)
        request.on_gone(lambda: self._cb.cancel_request(request_id))
        try:
            text, tokens, ids = await self._generating.while_wanted(request, answer)
        except CBWorkerDeadError:
            raise
        except RuntimeError as error:
            raise GenerationFailed(first_line(error)) from error
        request.counted_by(lambda: len(ids))
        return text, tokens, ids

    def stop(self) -> None:
        """At once: what runs is lost, and its clients are told."""
        if self._cb is not None:
            self._cb.stop(block=True, timeout=2, hard_stop=True)


class OffloadedGeneration(GenerationState):  # type: ignore[misc]
    """How requests are generated: one by one, or in batches where that was asked for and the model can.

    Args:
        generating: what runs and stops them.
        continuous_batching: whether in batches.
        kv_tokens: as :class:`Batched`.
    """

    def __init__(self, generating: Generating, *, continuous_batching: bool, kv_tokens: int | None) -> None:
        super().__init__(continuous_batching=continuous_batching)
        self._one_by_one = OneByOne(generating)
        self._batched = Batched(generating, kv_tokens)

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        """The only one of its kind, whatever the model is called."""
        if not use_cb:
            return self._one_by_one
        self._cb_manager = self._batched
        return self._batched

    @property
    def alive(self) -> bool:
        """Whether what generates still runs."""
        return self._one_by_one.alive and bool(self.is_cb_alive())
