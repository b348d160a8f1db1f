"""Decode steps as one CUDA graph: model, tables, copies and kernels, without work on the host.

It decodes one sequence over :class:`expertcast.runtime.experimental.kernel_link.KernelLink`. The ordinary engine cannot
be captured because it reads the router's ids on the host at every layer. Its model can be compiled, though:
`torch.compile(model.forward)`, or `generate` with `cache_implementation="static"`, makes graphs of the code between one
layer's experts and the next router, and the runtime runs between these graphs.
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
"""Uncaptured steps before the capture: they compile kernels and allocate the libraries' workspaces."""


class GraphDecoder:
    """Decodes one sequence at a time greedily; all but the first steps replay one graph.

    On the CPU all steps run uncaptured. The offloaded model stays usable for other calls in between.

    Args:
        offloaded: a model offloaded over link 'kernel'.
        max_length: prompt and answer tokens together; the size of the KV cache.
        capture: False runs every step uncaptured on CUDA too, for comparison.

    Raises:
        ExpertcastError: the model has another link, or its decode step or predictor needs the host.
    """

    def __init__(self, offloaded: OffloadedModel, max_length: int, *, capture: bool = True) -> None:
        if not isinstance(offloaded.link, KernelLink):
            raise ExpertcastError(f"link {offloaded.link.name!r} needs the host at every layer: use link='kernel'")
        if offloaded.predictor is not None and offloaded.predictor.uses_previous_token:
            raise ExpertcastError(
                f"predictor {offloaded.predictor.name!r} keeps the last token's routing on the host: choose another one"
            )
        self._offloaded, self._link = offloaded, offloaded.link
        self._device = offloaded.store.device
        self._capturable = capture and self._device.type == "cuda"
        self.max_length = max_length
        self.cache: Any = StaticCache(config=offloaded.model.config, max_cache_len=max_length)
        if any(layer.is_sliding for layer in self.cache.layers):
            raise ExpertcastError(
                f"{type(offloaded.model).__name__} uses sliding-window attention, whose cache is counted on the host: "
                "choose a model without it"
            )
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        self._position = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        self._logits_V: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 0

    @torch.no_grad()
    def start(self, prompt_ids: Tensor) -> Tensor:
        """Run a new prompt and forget any earlier sequence.

        Args:
            prompt_ids: int64 [1, tokens].

        Returns:
            Logits [V] of the last token; the next call overwrites them.

        Raises:
            ExpertcastError: the prompt is not one sequence of 1 to `max_length` - 1 tokens.
        """
        tokens = prompt_ids.shape[1]
        if prompt_ids.shape[0] != 1 or not 0 < tokens < self.max_length:
            raise ExpertcastError(
                f"prompt of shape {list(prompt_ids.shape)}: use one sequence of 1 to {self.max_length - 1} tokens"
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
        """Decode the most probable token after the last logits.

        Returns:
            Logits [V] of the next token; the next call overwrites them.

        Raises:
            ExpertcastError: `max_length` is reached.
        """
        self._offloaded._check_open()
        if not self._left:
            raise ExpertcastError(f"max_length={self.max_length} is reached: create a decoder with a larger one")
        self._left -= 1
        if self._graph is not None:
            # The graph waits only for its own copies, not for another stream's or an aborted forward pass.
            self._link.follow()
            self._link.join(self._link.calls_in_flight())
            self._graph.replay()
        else:
            self._step()
            self._steps += 1
            if self._capturable and self._steps >= _WARM_UP:
                self._capture()
        assert self._logits_V is not None
        return self._logits_V

    def generate(self, prompt_ids: Tensor, new_tokens: int) -> Tensor:
        """Return prompt and answer, int64 [1, tokens + new_tokens].

        Raises:
            ExpertcastError: they exceed `max_length`.
        """
        if prompt_ids.shape[1] + new_tokens > self.max_length:
            raise ExpertcastError(
                f"{prompt_ids.shape[1]} + {new_tokens} tokens exceed max_length={self.max_length}: increase it"
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
        """Store logits and next token in the graph's input tensors."""
        if self._logits_V is None:
            self._logits_V = torch.empty_like(logits_V)
        self._logits_V.copy_(logits_V)
        self._token.copy_(logits_V.argmax().view(1, 1))

    def _capture(self) -> None:
        """Record a step without running it. Steps may differ only in the values of tensors."""
        self._link.synchronize()  # the graph cannot wait for work launched before it
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        try:
            with recording(graph, stream):
                self._step()
        except RuntimeError as error:
            raise ExpertcastError(
                f"a decode step cannot be captured in a graph ({error}): before offloading, call "
                "model.set_experts_implementation('batched_mm')"
            ) from error
        finally:
            self._link.synchronize()
        self._graph = graph


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture the launched kernels into a graph instead of running them.

    torch's default capture stream belongs to the device that was current first: kernels on another device would run and
    not be captured. Calls that a capture forbids are blocked in this thread only.

    Args:
        graph: an empty graph.
        stream: a stream of the device whose kernels are captured.
    """
    with (
        torch.cuda.device(stream.device),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        yield
