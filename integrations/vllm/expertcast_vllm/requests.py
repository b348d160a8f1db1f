"""Whose tokens a vLLM model's forwards are over. T tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from expertcast.predictors.messages import ExpertcastError


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The tokens of one request in a forward."""

    request: str
    """vLLM's name of it."""
    rows: slice
    """Of the forward's tokens."""
    start: int
    """Position of the first of them in the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Of one forward."""

    parts: tuple[Part, ...]
    token_T: Tensor | None
    """The tokens' ids; None where the model is given embeddings."""


class Told(Protocol):
    """Who is told of forwards."""

    def start(self, running: Requests) -> None:
        """A forward over these requests' tokens is about to run."""

    def finish(self, running: Requests) -> None:
        """It has run to its end."""

    def ended(self) -> None:
        """Requests may have ended."""


def tell_requests(model_runner: Any, told: Told) -> None:
    """From now on `told` hears of a model runner's forwards over requests' tokens; trial runs are none.

    Raises:
        ExpertcastError: this kind of model runner does not say when its forwards start.
    """
    if not hasattr(model_runner, "_model_forward"):
        raise ExpertcastError(
            f"forecasts and collecting do not know {type(model_runner).__module__}: set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    forward, execute = model_runner._model_forward, model_runner.execute_model

    def told_forward(input_ids: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        running = _running(model_runner, input_ids)
        told.start(running)
        output = forward(input_ids, *args, **kwargs)
        told.finish(running)
        return output

    def told_execute(*args: Any, **kwargs: Any) -> Any:
        output = execute(*args, **kwargs)
        told.ended()
        return output

    model_runner._model_forward, model_runner.execute_model = told_forward, told_execute


def prompt_of(running: Any, request: str) -> list[int] | None:
    """The ids of a running request's prompt; None where it is given as embeddings."""
    ids: list[int] | None = running[request].prompt_token_ids
    return ids


def _running(model_runner: Any, input_ids: Tensor | None) -> Requests:
    batch, count = model_runner.input_batch, model_runner.input_batch.num_reqs
    bounds = model_runner.query_start_loc.np[: count + 1].tolist()
    starts = batch.num_computed_tokens_cpu[:count].tolist()
    parts = tuple(
        Part(request=request, rows=slice(begin, end), start=start)
        for request, begin, end, start in zip(batch.req_ids[:count], bounds[:-1], bounds[1:], starts, strict=True)
    )
    return Requests(parts=parts, token_T=None if input_ids is None else input_ids[: bounds[-1]])
