"""vLLM's running forward pass and its requests, and checks of vLLM's options.

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

if TYPE_CHECKING:
    from expertcast_vllm.observer import ModelObserver


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward pass over tokens of some requests."""

    tokens: int
    """Tokens of requests; later rows are padding."""
    requests: int
    decodes: bool
    """Whether each request has one token."""


def running_step() -> Step | None:
    """Return the running forward pass, or None for a memory-profiling or warm-up pass without requests.

    Raises:
        ExpertcastError: vLLM's attention backend does not report the number of tokens.
    """
    metadata = get_forward_context().attn_metadata if is_forward_context_available() else None
    if not metadata:
        return None
    assert isinstance(metadata, dict), "micro-batching is refused"
    for each in metadata.values():
        step = _step(each)
        if step is not None:
            return step
    kinds = ", ".join(sorted({type(each).__name__ for each in metadata.values()}))
    raise ExpertcastError(f"vLLM's {kinds} does not report a step's tokens: choose another --attention-backend")


def _step(metadata: Any) -> Step | None:
    """Read a step from one layer's attention metadata, which has one of two forms."""
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


# Tokens of requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens of one request in a forward pass."""

    request: str
    """vLLM's request id."""
    rows: slice
    """Rows of the forward pass."""
    start: int
    """Position of the first row in the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """All requests of one forward pass."""

    parts: tuple[Part, ...]
    token_T: Tensor | None
    """Token ids; None if the model gets embeddings."""


def observe_requests(model_runner: Any, observer: ModelObserver) -> None:
    """Notify `observer` before and after the forward passes of a model runner, except warm-up passes.

    Raises:
        ExpertcastError: this kind of model runner has no hook for its forward passes.
    """
    if not hasattr(model_runner, "_model_forward"):
        raise ExpertcastError(
            f"forecasts and collecting do not support {type(model_runner).__module__}: set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    forward, execute = model_runner._model_forward, model_runner.execute_model

    def observed_forward(input_ids: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        running = _running_requests(model_runner, input_ids)
        observer.start(running)
        output = forward(input_ids, *args, **kwargs)
        observer.finish(running)
        return output

    def observed_execute(*args: Any, **kwargs: Any) -> Any:
        output = execute(*args, **kwargs)
        observer.ended()
        return output

    model_runner._model_forward, model_runner.execute_model = observed_forward, observed_execute


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
"""Operators with vLLM's MoE layers, which CUDA graphs must leave out."""


def check_config(config: VllmConfig) -> None:
    """Refuse options that offloaded layers do not support, and exclude these layers from CUDA graphs.

    Raises:
        ExpertcastError: an option is not supported; one line about the first.
    """
    parallel, model = config.parallel_config, config.model_config
    gathered = {
        "--data-parallel-size": parallel.data_parallel_size > 1,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size > 1,
    }
    refuse(
        gathered,
        "{} is not supported, because MoE layers then run the tokens of all processes together: start one server per "
        "device instead",
    )
    refused = {
        "--enable-expert-parallel": parallel.enable_expert_parallel,
        "--enable-eplb": parallel.enable_eplb,
        "--enable-dbo": parallel.use_ubatching,
        "--enable-lora": config.lora_config is not None,
        "--enable-sleep-mode": model.enable_sleep_mode,
    }
    refuse(refused, "{} is not supported with experts in slots: leave it out")
    if config.device_config.device.type == "cuda":
        _check_graphs(config)


def refuse(options: Mapping[str, bool], why: str) -> None:
    """Refuse the first option that is set.

    Args:
        options: whether each option is set, by name.
        why: the message, with `{}` for the option's name.

    Raises:
        ExpertcastError: an option is set.
    """
    for option, given in options.items():
        if given:
            raise ExpertcastError(why.format(option))


def _check_graphs(config: VllmConfig) -> None:
    """Exclude MoE layers from CUDA graphs, which would not repeat the host's part."""
    compilation = config.compilation_config
    mode = compilation.cudagraph_mode
    if mode is None or mode == CUDAGraphMode.NONE:
        return
    if mode.has_full_cudagraphs():
        raise ExpertcastError(
            "expertcast chooses copies on the host, outside CUDA graphs: start vLLM with --enforce-eager or with "
            '--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\''
        )
    if not compilation.splitting_ops:
        raise ExpertcastError(
            f"cudagraph_mode {mode.name} without splitting_ops would capture the MoE layers of prompts: leave "
            "splitting_ops out of --compilation-config, or start vLLM with --enforce-eager"
        )
    compilation.splitting_ops.extend(name for name in SPLIT_AT if name not in compilation.splitting_ops)


# Steps that need more experts than slots


def groups(ids_TK: Tensor, experts: int, limit: int, held: Iterable[int] = ()) -> Iterator[Tensor]:
    """Split tokens into groups of at most `limit` distinct experts each.

    A token is computed as a whole, so that its bits are those of the step in one piece. A group starts from the token
    whose experts are most requested, and takes in the most requested experts.

    Args:
        ids_TK: expert ids of a layer, on the CPU.
        experts: E.
        limit: experts per group, at least K.
        held: resident experts, preferred by the first group.

    Yields:
        Row numbers of each group's tokens; each token is in one group.
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
