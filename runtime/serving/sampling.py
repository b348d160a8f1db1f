"""Sampling in batches: every request by its own temperature, bounds, biases and seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.continuous_batching.requests import FutureRequestState

SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "sequence_bias")
"""What requests of one batch may differ in."""
_NUMBERS = itertools.count(1)


class Sampler:
    """Changes the logits of one request so that the largest is the token that is drawn.

    Args:
        model: that knows transformers' own processors.
        config: of the request.
        seed: of its draws; None: one of torch's own.
    """

    def __init__(self, model: PreTrainedModel, config: GenerationConfig, seed: int | None) -> None:
        self.number = next(_NUMBERS)
        own = GenerationConfig(**{name: getattr(config, name, None) for name in SAMPLING})
        self._processors: LogitsProcessorList = model._get_logits_processor(own)
        self._generator = None
        if config.do_sample:
            self._generator = torch.Generator()
            self._generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)

    @property
    def changes(self) -> bool:
        """Whether it changes anything."""
        return self._generator is not None or bool(self._processors)

    def __call__(self, logits_1V: Tensor) -> Tensor:
        """Of its next token."""
        logits_1V = self._processors(_NO_TOKENS.to(logits_1V.device), logits_1V)
        if self._generator is None:
            return logits_1V
        # the largest of logits less the logarithms of such noise is a draw from their softmax
        noise_1V = torch.empty(logits_1V.shape).exponential_(generator=self._generator)
        return logits_1V - noise_1V.log().to(logits_1V.device)


class BatchSampling(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """Continuous batching's view of samplers.

    Args:
        find: the sampler of a request by its id; None: it has none.
    """

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012
    ignored_kwargs = ()

    def __init__(self, find: Callable[[str], Sampler | None]) -> None:
        self._find = find
        self._samplers = WeakValueDictionary[int, Sampler]()

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """0: nothing is changed."""
        int32_tensor.fill_(0)

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> Tensor:
        """Numbers of samplers `[B]`."""
        samplers = [self._find(request.state.request_id) for request in requests_with_new_token]
        self._samplers.update({sampler.number: sampler for sampler in samplers if sampler is not None})
        return torch.tensor([0 if sampler is None else sampler.number for sampler in samplers], dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Of logits `[B, V]`, those of which the largest are taken."""
        if not self._samplers:
            return scores
        rows = [self._samplers.get(number) for number in tensor_arg[: len(scores)].tolist()]
        changed = [
            row_1V if sampler is None else sampler(row_1V)
            for sampler, row_1V in zip(rows, scores.unsqueeze(1), strict=True)
        ]
        return torch.cat(changed)


_NO_TOKENS = torch.empty(1, 0, dtype=torch.long)
"""What samplers change does not depend on what came before."""
