"""Decode steps as one CUDA graph: model, tables, copies and kernels, with no work left for the host.

For one sequence with :class:`expertcast.runtime.experimental.kernel_link.KernelLink`. The ordinary engine cannot be
captured: it asks the device for the router's ids at every layer. Its model can be compiled,
though: `torch.compile(model.forward)`, or `generate` with `cache_implementation="static"`, makes graphs of what lies
between router and experts of one layer and the next, and the runtime runs between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.experimental.kernel_link import KernelLink
from expertcast.runtime.offloading import OffloadedModel

_WARM_UP = 3
"""Steps run as they are before the capture: kernels are compiled, and libraries get their workspaces."""


class GraphDecoder:
    """Greedy decoding of one sequence at a time, each step but the first few a replay of one graph.

    On the CPU the same steps run one by one. The offload stays usable for anything else in between.

    Args:
        max_length: tokens of prompt and answer together; the key-value cache has this size.
        capture: False runs every step by itself on CUDA too, for comparison.

    Raises:
        ExpertcastError: another link, or a model or predictor whose decode step needs the host.
    """

    def __init__(self, offloaded: OffloadedModel, max_length: int, *, capture: bool = True) -> None:
        if not isinstance(offloaded.link, KernelLink):
            raise ExpertcastError(
                f"a decode step over link {offloaded.link.name!r} needs the host at every layer: offload with "
                "link='kernel'"
            )
        if offloaded.predictor is not None and offloaded.predictor.uses_previous_token:
            raise ExpertcastError(
                f"predictor {offloaded.predictor.name!r} keeps the last token's routing on the host: choose another "
                "for a graph"
            )
        self._offloaded, self._link = offloaded, offloaded.link
        self._device = offloaded.store.device
        self._capturable = capture and self._device.type == "cuda"
        self.max_length = max_length
        self.cache: Any = StaticCache(config=offloaded.model.config, max_cache_len=max_length)
        if any(layer.is_sliding for layer in self.cache.layers):
            raise ExpertcastError(
                f"{type(offloaded.model).__name__} attends in sliding windows, whose cache is counted on the host: "
                "it cannot be captured in a graph"
            )
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        self._position = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        self._logits_V: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 0

    @torch.no_grad()
    def start(self, prompt_ids: Tensor) -> Tensor:
        """Take in a new prompt [1, tokens]: the logits [V] of its last token. Nothing is left of an earlier one."""
        tokens = prompt_ids.shape[1]
        if prompt_ids.shape[0] != 1 or not 0 < tokens < self.max_length:
            raise ExpertcastError(
                f"prompt of shape {list(prompt_ids.shape)}: give one sequence of 1 to {self.max_length - 1} tokens"
            )
        self.cache.reset()
        positions = torch.arange(tokens, device=self._device).unsqueeze(0)
        self._take(self._forward(prompt_ids, positions))
        self._position.fill_(tokens)
        self._left = self.max_length - tokens
        assert self._logits_V is not None
        return self._logits_V

    @torch.no_grad()
    def step(self) -> Tensor:
        """Decode one token, the likeliest after the last logits: the next ones [V], which the next call overwrites."""
        self._offloaded._check_open()
        if not self._left:
            raise ExpertcastError(f"max_length={self.max_length} is reached: make a decoder with more")
        self._left -= 1
        if self._graph is not None:
            # the graph waits for its own copies only: not for another stream's forward, nor for one cut short
            self._link.follow()
            self._link.join(self._link.ticket())
            self._graph.replay()
        else:
            self._step()
            self._steps += 1
            if self._capturable and self._steps >= _WARM_UP:
                self._capture()
        assert self._logits_V is not None
        return self._logits_V

    def generate(self, prompt_ids: Tensor, new_tokens: int) -> Tensor:
        """Prompt and answer [1, tokens + new_tokens]."""
        if prompt_ids.shape[1] + new_tokens > self.max_length:
            raise ExpertcastError(
                f"{prompt_ids.shape[1]} + {new_tokens} tokens are more than max_length={self.max_length}: give more"
            )
        self.start(prompt_ids)
        tokens = [prompt_ids, self._token.clone()]
        for _ in range(new_tokens - 1):
            self.step()
            tokens.append(self._token.clone())
        return torch.cat(tokens, dim=1)

    def _step(self) -> None:
        self._take(self._forward(self._token, self._position))
        self._position += 1

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        output = self._offloaded.model(
            input_ids=ids, position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        logits_V: Tensor = output.logits[0, -1]
        return logits_V

    def _take(self, logits_V: Tensor) -> None:
        """Keep logits and next token where the graph finds them."""
        if self._logits_V is None:
            self._logits_V = torch.empty_like(logits_V)
        self._logits_V.copy_(logits_V)
        self._token.copy_(logits_V.argmax().view(1, 1))

    def _capture(self) -> None:
        """Record a step without running it; only what lies in tensors may differ from one step to the next."""
        self._link.synchronize()  # the graph may wait for nothing that was launched before it
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        try:
            with recording(graph, stream):
                self._step()
        except RuntimeError as error:
            raise ExpertcastError(
                f"a decode step cannot be captured in a graph ({error}): before offloading, try "
                "model.set_experts_implementation('batched_mm')"
            ) from error
        finally:
            self._link.synchronize()
        self._graph = graph


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """What is launched becomes a graph and does not run.

    torch's own capture stream belongs to whatever device was current first: kernels of another device would run beside
    it and not be captured. Only this thread is kept from calls that a capture forbids.

    Args:
        graph: an empty one.
        stream: of the device whose kernels are launched.
    """
    with (
        torch.cuda.device(stream.device),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        yield
