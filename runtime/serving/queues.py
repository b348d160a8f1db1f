"""How requests come to be generated: one after another on one thread, or by continuous batching on another."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    CBGenerateManager,
    CBStreamer,
    CBWorkerDeadError,
    DirectStreamer,
    GenerateManager,
    GenerationState,
    _StreamError,
)
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from expertcast.predictors.errors import first_line
from expertcast.runtime.serving.generation import CLOSING, FailedError, Generating, Guarded
from expertcast.runtime.serving.requests import Request
from expertcast.runtime.serving.sampling import BatchSampling, Sampler
from expertcast.runtime.serving.writing import CutStream, cut

MOST_AT_ONCE = 1024
"""Tokens of a batch at most, where the cache has a bound: activations take memory too."""


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
    ) -> tuple[asyncio.Queue[Any] | CutStream, DirectStreamer]:  # fmt: skip
        """As transformers has it, without the stop."""
        guarded = self._guarded(model, inputs, gen_config, request_id)
        queue, streamer = super().generate_streaming(
            guarded, processor, inputs, gen_config, request_id, response_parser
        )
        stops = guarded.request.stops
        return CutStream(queue, stops) if stops else queue, streamer

    async def generate_non_streaming(
        self, model: PreTrainedModel, processor: PreTrainedTokenizerBase, inputs: Mapping[str, Any],
        gen_config: GenerationConfig, request_id: str,
    ) -> tuple[str, int, Tensor]:  # fmt: skip
        """As transformers has it, without the stop; ended where nobody waits.

        Raises:
            StoppedError: nobody waits for it.
            FailedError: it raised.
        """
        guarded = self._guarded(model, inputs, gen_config, request_id)
        answer = super().generate_non_streaming(guarded, processor, inputs, gen_config, request_id)
        text, tokens, ids = await self._generating.while_wanted(guarded.request, answer)
        return cut(text, guarded.request.stops), tokens, ids

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
        page = ContinuousBatchingConfig().page_size
        blocks = None if kv_tokens is None else -(-kv_tokens // page)
        self._room = None if blocks is None else blocks * page
        config = ContinuousBatchingConfig(
            num_blocks=blocks, max_batch_tokens=kv_tokens and MOST_AT_ONCE,
            use_cuda_graph=False,  # the host decides what is copied, and which request is sampled
        )  # fmt: skip
        super().__init__(config)
        self._generating = generating
        self._cb: ContinuousBatchingManager | None = None

    def init_cb(self, model: PreTrainedModel, gen_config: GenerationConfig) -> None:
        """Start batching, with what the first request asks for left out: every request is sampled by its own sampler.

        Raises:
            HTTPException: a request wants what batches cannot do.
        """
        if (gen_config.repetition_penalty or 1.0) != (model.generation_config.repetition_penalty or 1.0):
            raise HTTPException(
                400, "continuous batching knows no repetition_penalty: leave it out, or serve without "
                "--continuous-batching"
            )  # fmt: skip
        if self._cb is None:
            shared = copy.deepcopy(gen_config)
            shared.do_sample, shared.sequence_bias = False, None
            batching = model.init_continuous_batching(
                generation_config=shared, continuous_batching_config=self._cb_config
            )
            processors = batching.logit_processor
            processors.logits_processor.append(BatchSampling(self._generating.requests.sampler))
            processors.tensors_required += 1
            processors.do_processing = True
            batching.start()
            self._cb = batching

    def generate_streaming(
        self, model: PreTrainedModel, processor: PreTrainedTokenizerBase, inputs: Mapping[str, Any],
        gen_config: GenerationConfig, request_id: str, response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], CBStreamer]:  # fmt: skip
        """As transformers has it."""
        request = self._admit(model, inputs, gen_config, request_id)
        queue, streamer = super().generate_streaming(model, processor, inputs, gen_config, request_id, response_parser)
        request.counted_by(lambda: streamer.total_tokens)
        loop = asyncio.get_running_loop()

        def end() -> None:
            loop.call_soon_threadsafe(queue.put_nowait, _StreamError(CLOSING))
            streamer.cancel()

        request.on_gone(end)
        return queue, streamer

    async def generate_non_streaming(
        self, model: PreTrainedModel, processor: PreTrainedTokenizerBase, inputs: Mapping[str, Any],
        gen_config: GenerationConfig, request_id: str,
    ) -> tuple[str, int, list[int]]:  # fmt: skip
        """As transformers has it; ended where nobody waits.

        Raises:
            StoppedError: nobody waits for it.
            FailedError: it raised.
        """
        request = self._admit(model, inputs, gen_config, request_id)
        answer, batching = super().generate_non_streaming(model, processor, inputs, gen_config, request_id), self._cb
        assert batching is not None
        request.on_gone(lambda: batching.cancel_request(request_id))
        try:
            text, tokens, ids = await self._generating.while_wanted(request, answer)
        except CBWorkerDeadError:
            raise
        except RuntimeError as error:
            raise FailedError(first_line(error)) from error
        request.counted_by(lambda: len(ids))
        return text, tokens, ids

    def _admit(self, model: PreTrainedModel, inputs: Mapping[str, Any], config: GenerationConfig, key: str) -> Request:
        request = self._generating.admit(key, len(inputs["input_ids"]), config, self._room)
        sampler = Sampler(model, config, request.seed)
        request.sampler = sampler if sampler.changes else None
        return request

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
