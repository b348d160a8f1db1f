"""What vLLM runs: the options that offloading needs, the forward that is running, and whose tokens it is over.

T tokens, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context, is_forward_context_available

from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape
from expertcast_vllm.settings import Settings

if TYPE_CHECKING:
    from expertcast_vllm.watching import Watching


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward over the tokens of some requests."""

    tokens: int
    """Of requests; rows behind them are padding. Where the forward becomes a CUDA graph, all rows."""
    requests: int
    decodes: bool
    """One token of each request."""


def running_step() -> Step | None:
    """The forward that is running; None: one that only measures memory or warms up, over no request's tokens.

    Raises:
        ExpertcastError: vLLM's attention does not say whose tokens they are.
    """
    metadata = get_forward_context().attn_metadata if is_forward_context_available() else None
    if not metadata:
        return None
    assert isinstance(metadata, dict), "one batch at a time"
    for each in metadata.values():
        step = _step(each)
        if step is not None:
            return step
    kinds = ", ".join(sorted({type(each).__name__ for each in metadata.values()}))
    raise ExpertcastError(
        f"vLLM's {kinds} does not say which tokens a step is over: choose another --attention-backend, or switch "
        "expertcast off"
    )


def _step(metadata: Any) -> Step | None:
    """What one layer's attention knows: backends name it in one of two ways."""
    tokens = getattr(metadata, "num_actual_tokens", 0)
    if not tokens:
        return None
    starts, longest = getattr(metadata, "query_start_loc", None), getattr(metadata, "max_query_len", 0)
    if starts is not None and longest:
        return Step(tokens=tokens, requests=len(starts) - 1, decodes=longest == 1)
    decodes, prefills = getattr(metadata, "num_decodes", None), getattr(metadata, "num_prefills", None)
    if decodes is None or prefills is None:
        return None
    only = not prefills and getattr(metadata, "num_decode_tokens", 0) == decodes
    return Step(tokens=tokens, requests=decodes + prefills, decodes=only)


def without_padding(rows_TX: Tensor) -> Tensor:
    """The first row in place of each of padding, so that no expert is brought or forecast for that. Asks the device for
    nothing: which rows are padding differs between replays of a CUDA graph."""
    padding_T = get_forward_context().is_padding
    return rows_TX if padding_T is None else rows_TX.where(~padding_T[: len(rows_TX), None], rows_TX[:1])


# Requests' tokens


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


def tell_requests(model_runner: Any, told: Watching) -> None:
    """Have `told` called before and after a model runner's forwards over requests' tokens; trial runs are none.

    Raises:
        ExpertcastError: this kind of model runner does not say when its forwards start.
    """
    if not hasattr(model_runner, "_model_forward"):
        raise ExpertcastError(
            f"forecasts and collecting do not know {type(model_runner).__module__}: set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    forward, execute = model_runner._model_forward, model_runner.execute_model

    def told_forward(input_ids: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        running = _running_requests(model_runner, input_ids)
        told.start(running)
        output = forward(input_ids, *args, **kwargs)
        told.finish(running)
        return output

    def told_execute(*args: Any, **kwargs: Any) -> Any:
        output = execute(*args, **kwargs)
        told.ended()
        return output

    model_runner._model_forward, model_runner.execute_model = told_forward, told_execute


def _running_requests(model_runner: Any, input_ids: Tensor | None) -> Requests:
    batch, count = model_runner.input_batch, model_runner.input_batch.num_reqs
    bounds = model_runner.query_start_loc.np[: count + 1].tolist()
    starts = batch.num_computed_tokens_cpu[:count].tolist()
    parts = tuple(
        Part(request=request, rows=slice(begin, end), start=start)
        for request, begin, end, start in zip(batch.req_ids[:count], bounds[:-1], bounds[1:], starts, strict=True)
    )
    return Requests(parts=parts, token_T=None if input_ids is None else input_ids[: bounds[-1]])


# Options of vLLM

SPLIT_AT = ("vllm::moe_forward", "vllm::moe_forward_shared")
"""Operators that hold vLLM's MoE layers: what CUDA graphs must leave out."""


def check_config(config: VllmConfig, settings: Settings) -> None:
    """Refuse what offloaded layers cannot do, and take them out of CUDA graphs.

    Raises:
        ExpertcastError: one line about the first such option.
    """
    parallel, model = config.parallel_config, config.model_config
    gathered = {
        "--data-parallel-size": parallel.data_parallel_size > 1,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size > 1,
    }
    refuse(
        gathered,
        "with {} vLLM's MoE layers run tokens of all processes together, which is not supported: start one server for "
        "each device in place of it",
    )
    refused = {
        "--enable-expert-parallel": parallel.enable_expert_parallel,
        "--enable-eplb": parallel.enable_eplb,
        "--enable-dbo": parallel.use_ubatching,
        "--enable-lora": config.lora_config is not None,
        "--enable-sleep-mode": model.enable_sleep_mode,
    }
    refuse(refused, "expertcast keeps experts in slots, which {} does not go with: leave it out")
    if config.device_config.device.type == "cuda":
        _check_graphs(config, settings)


def refuse(options: Mapping[str, bool], why: str) -> None:
    """Refuse the first option that is given, by its name in the place of `{}`.

    Raises:
        ExpertcastError: one is given.
    """
    for option, given in options.items():
        if given:
            raise ExpertcastError(why.format(option))


def captures_whole_steps(config: VllmConfig) -> bool:
    """Whether vLLM makes CUDA graphs of whole steps: inside, no host decides."""
    mode = config.compilation_config.cudagraph_mode
    return config.device_config.device.type == "cuda" and mode is not None and mode.has_full_cudagraphs()


def _check_graphs(config: VllmConfig, settings: Settings) -> None:
    """A captured graph would run the host's part of a step once and for all: graphs end before the MoE layers, or the
    device decides what is copied."""
    compilation = config.compilation_config
    mode = compilation.cudagraph_mode
    if mode is None or mode == CUDAGraphMode.NONE:
        return
    whole = captures_whole_steps(config)
    if whole and settings.offload.link != "kernel":
        raise ExpertcastError(
            "expertcast decides on the host which experts are copied, outside CUDA graphs: start vLLM with "
            '--enforce-eager, with --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\', or give expertcast the '
            'option "link": "kernel", which decides on the device'
        )
    if whole and settings.collect is not None:
        raise ExpertcastError(
            "collect reads every step on the host, which whole CUDA graphs leave out: start vLLM with --enforce-eager"
        )
    if not mode.has_piecewise_cudagraphs():
        return
    if not compilation.splitting_ops:
        raise ExpertcastError(
            f"cudagraph_mode {mode.name} without splitting_ops would capture the MoE layers of prompts: leave "
            "splitting_ops out of --compilation-config, or start vLLM with --enforce-eager"
        )
    compilation.splitting_ops.extend(name for name in SPLIT_AT if name not in compilation.splitting_ops)


def check_slots(config: VllmConfig, shape: ModelShape, slots: int) -> None:
    """Refuse fewer slots than the largest step needs that becomes a whole graph: nobody could run it in groups.

    Args:
        config: vLLM's.
        shape: of the model.
        slots: of the worker.

    Raises:
        ExpertcastError: one line with what would do.
    """
    if not captures_whole_steps(config):
        return
    largest = config.compilation_config.max_cudagraph_capture_size or 0
    needed = min(largest * shape.top_k, shape.experts)
    if slots < needed:
        fit = slots // shape.top_k
        raise ExpertcastError(
            f"slots={slots} is fewer than the {needed} experts that a layer may need in a CUDA graph of {largest} "
            f"tokens: give {needed} slots, or start vLLM with --max-cudagraph-capture-size {fit}"
        )


# Steps that need more experts than slots


def groups(ids_TK: Tensor, experts: int, limit: int, held: Iterable[int] = ()) -> Iterator[Tensor]:
    """Rows of tokens, each token once, those of one group with at most `limit` experts together.

    A token is computed as a whole, so that its bits are those of the step in one piece. A group is grown from the token
    whose experts are wanted most, by the experts that are wanted most.

    Args:
        ids_TK: what a layer executes, on the CPU.
        experts: E.
        limit: at least K.
        held: experts that are there already: the first group prefers them.
    """
    ids_TK = ids_TK.long()
    left_T = torch.arange(len(ids_TK))
    bonus_E = torch.zeros(experts, dtype=torch.long)
    bonus_E[list(held)] = len(ids_TK)
    while len(left_T):
        left_TK = ids_TK[left_T]
        wanted_E = torch.bincount(left_TK.reshape(-1), minlength=experts)
        wanted_E += bonus_E * (wanted_E > 0)
        seed_K = left_TK[wanted_E[left_TK].sum(dim=1).argmax()]
        wanted_E[seed_K] += wanted_E.sum()
        chosen_E = torch.zeros(experts, dtype=torch.bool)
        chosen_E[wanted_E.topk(min(limit, experts)).indices] = True
        inside_T = chosen_E[left_TK].all(dim=1)
        yield left_T[inside_T]
        left_T, bonus_E = left_T[~inside_T], torch.zeros_like(bonus_E)
