"""The real forwards of a vLLM model, and whose tokens they are: dummy and profiling runs are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from expertcast.predictors.errors import ExpertcastError


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The tokens of one request in a step."""

    request: str
    """vLLM's name of it."""
    rows: slice
    """Of the step's tokens."""
    start: int
    """Position of the first of them in the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward. T tokens."""

    parts: tuple[Part, ...]
    token_T: Tensor | None
    """Their ids; None where the model is given embeddings."""

    @property
    def tokens(self) -> int:
        """T"""
        return self.parts[-1].rows.stop if self.parts else 0

    @property
    def is_decoding(self) -> bool:
        """Whether every request has one token, with others of it before."""
        return all(part.rows.stop - part.rows.start == 1 and part.start for part in self.parts)


class StepListener:
    """What is told of forwards; does nothing."""

    def start(self, step: Step) -> None:
        """A forward is about to run."""

    def finish(self, step: Step) -> None:
        """It has run to its end."""

    def requests(self, running: Any) -> None:
        """Requests may have ended: those in `running` (by name) have not."""


@contextmanager
def steps_told(model_runner: Any, listener: StepListener) -> Iterator[None]:
    """Inside, the listener is told of a model runner's forwards.

    Raises:
        ExpertcastError: this kind of model runner does not say when its forwards start.
    """
    if not hasattr(model_runner, "_model_forward"):
        raise ExpertcastError(
            f"forecasts and collecting do not know {type(model_runner).__module__}: set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    forward: Callable[..., Any] = model_runner._model_forward
    execute: Callable[..., Any] = model_runner.execute_model

    def told_forward(input_ids: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        step = _step(model_runner, input_ids)
        listener.start(step)
        output = forward(input_ids, *args, **kwargs)
        listener.finish(step)
        return output

    def told_execute(*args: Any, **kwargs: Any) -> Any:
        output = execute(*args, **kwargs)
        listener.requests(model_runner.requests)
        return output

    model_runner._model_forward, model_runner.execute_model = told_forward, told_execute
    try:
        yield
    finally:
        del model_runner._model_forward, model_runner.execute_model


def prompt_of(running: Any, request: str) -> list[int] | None:
    """The ids of a running request's prompt; None where it is given as embeddings."""
    ids: list[int] | None = running[request].prompt_token_ids
    return ids


def _step(model_runner: Any, input_ids: Tensor | None) -> Step:
    batch, count = model_runner.input_batch, model_runner.input_batch.num_reqs
    bounds = model_runner.query_start_loc.np[: count + 1].tolist()
    starts = batch.num_computed_tokens_cpu[:count].tolist()
    parts = tuple(
        Part(request=request, rows=slice(begin, end), start=start)
        for request, begin, end, start in zip(batch.req_ids[:count], bounds[:-1], bounds[1:], starts, strict=True)
    )
    return Step(parts=parts, token_T=None if input_ids is None else input_ids[: bounds[-1]])
