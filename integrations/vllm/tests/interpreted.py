"""vLLM's Triton kernel for experts, interpreted on the CPU: over slots, over all experts, and compared with plain
torch.

It runs in a separate process with TRITON_INTERPRET=1: one case per line of JSON on standard input, one result per case
on standard output.

T tokens, D hidden size, I intermediate size, E experts, K experts per token, S slots.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from triton.backends import backends

# vLLM's CPU build disables Triton without a backend of this name; the interpreter needs none
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))  # type: ignore[assignment]

from expertcast_vllm.method import MappingKernel, OffloadedMethod  # noqa: E402
from expertcast_vllm.step import groups  # noqa: E402
from one_run import RESULT  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.fused_moe import fused_moe, unquantized_fused_moe_method  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import (  # noqa: E402
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager  # noqa: E402
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts  # noqa: E402
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend  # noqa: E402
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts  # noqa: E402

from expertcast.runtime.storage.slots import SlotPool  # noqa: E402

# vLLM's choice on CUDA with `--moe-backend triton`: the CPU build knows only CPU kernels.
unquantized_fused_moe_method.select_unquantized_moe_backend = lambda moe_config: (  # type: ignore[assignment]
    UnquantizedMoeBackend.TRITON,
    TritonExperts,
)

# Two operators that exist only in vLLM's CUDA build, implemented from their docstrings and calls.
_MISSING = torch.library.Library("_moe_C", "FRAGMENT")
_MISSING.define(
    "moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, Tensor! sorted_token_ids, "
    "Tensor! experts_ids, Tensor! num_tokens_post_pad, Tensor? expert_map, Tensor? scatter_idx) -> ()"
)
_MISSING.define("moe_sum(Tensor input, Tensor! output, Tensor? topk_ids, Tensor? expert_map) -> ()")


def _align(
    topk_ids: Tensor, num_experts: int, block_size: int, sorted_token_ids: Tensor, experts_ids: Tensor,
    num_tokens_post_pad: Tensor, expert_map: Tensor | None, scatter_idx: Tensor | None,
) -> None:  # fmt: skip
    """Sort pairs by expert and pad each expert's pairs to whole blocks; also return each block's expert.

    Pairs of expert -1 are left out. With a map, a block's expert is the map's entry, and -1 there leaves its pairs out
    too. Values behind the last block are undefined; here they would crash a kernel that reads them.
    """
    assert scatter_idx is None
    flat = topk_ids.reshape(-1).long()
    assert int(flat.max()) < num_experts
    assert expert_map is None or (expert_map.dtype == torch.int32 and len(expert_map) == num_experts)
    sorted_token_ids.fill_(len(flat))
    experts_ids.fill_(1 << 30)
    block = 0
    for expert in range(num_experts):
        place = expert if expert_map is None else int(expert_map[expert])
        pairs = (flat == expert).nonzero()[:, 0]
        if place < 0 or not len(pairs):
            continue
        sorted_token_ids[block * block_size : block * block_size + len(pairs)] = pairs.int()
        more = -(-len(pairs) // block_size)
        experts_ids[block : block + more] = place
        block += more
    num_tokens_post_pad.fill_(block * block_size)


def _sum(input: Tensor, output: Tensor, topk_ids: Tensor | None, expert_map: Tensor | None) -> None:
    """Sum each token's experts in order; with a map, only the experts in it."""
    if expert_map is not None and topk_ids is not None:
        absent_TK = (topk_ids < 0) | (expert_map[topk_ids.long().clamp(min=0)] < 0)
        input = input.masked_fill(absent_TK[..., None], 0)
    output.copy_(input.float().sum(dim=1))


_MISSING.impl("moe_align_block_size", _align, "CPU")
_MISSING.impl("moe_sum", _sum, "CPU")

_HIDDEN, _INTERMEDIATE = 72, 40
"""Not multiples of a tile."""


class _Offloaded(RoutedExperts):
    """The plug-in's layer with :class:`_Slots` instead of a worker's offload."""

    def __init__(self, slots: _Slots, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "offload", slots)
        super().__init__(*args, **kwargs)

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        return OffloadedMethod.in_place_of(super()._get_quant_method(prefix, quant_config, moe_config), prefix, None)


class _Slots:
    """Puts experts into random slots; all other slots are NaN."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.count, self.generator = count, generator

    def prepared(self, layer: Any) -> None:
        method = layer.quant_method
        self.memory, self.pool = method.memory, SlotPool(method.layout, self.count, torch.device("cpu"))
        method.use_slots(layer, self.pool.views)
        assert not self.pool.views["w13_weight"].is_contiguous()

    def bring(self, ids_TK: Tensor, experts: int) -> Tensor:
        """Load these experts into random slots; return the slots [T, K]."""
        for view in self.pool.views.values():
            view.fill_(torch.nan)
        used = ids_TK[ids_TK >= 0].unique()
        slot_of = torch.full((experts,), -1)
        slot_of[used.long()] = torch.randperm(self.count, generator=self.generator)[: len(used)]
        size = self.pool.layout.block_bytes
        for expert in used.tolist():
            self.pool.block(int(slot_of[expert])).copy_(self.memory.bytes[expert * size : (expert + 1) * size])
        return slot_of[ids_TK.long()]


def compare(asked: dict[str, Any]) -> dict[str, Any]:
    """Return whether slots give the same bits as all experts, and the largest distance of these from plain torch."""
    generator = torch.Generator().manual_seed(asked["seed"])
    experts, top_k, tokens = asked["experts"], asked["top_k"], asked["tokens"]
    dtype, id_dtype = getattr(torch, asked["dtype"]), getattr(torch, asked["ids"])
    slots = _Slots(asked["slots"], generator)
    resident = RoutedExperts(**_layer(asked, dtype))
    offloaded = _Offloaded(slots, **_layer(asked, dtype))
    for name, parameter in resident.named_parameters(recurse=False):
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
        getattr(offloaded, name).data.copy_(parameter.data)
    plain = {name: each.data.float() for name, each in resident.named_parameters(recurse=False)}
    for layer in (resident, offloaded):
        layer.quant_method.process_weights_after_loading(layer)
    hidden_TD = torch.randn(tokens, _HIDDEN, generator=generator).to(dtype)
    ids_TK = torch.rand(tokens, asked["among"], generator=generator).topk(top_k).indices.to(id_dtype)
    weights_TK = torch.rand(tokens, top_k, generator=generator)
    whole = tokens - asked["padding"]
    ids_TK[whole:], weights_TK[whole:] = -1, 0  # as vLLM's routers mark padding rows
    launched = _watch_launches()
    expected_TD = resident.quant_method.forward_cuda(resident, hidden_TD, weights_TK, ids_TK, None, None)
    tiles = launched.copy()
    launched.clear()
    kernel = MappingKernel(slots.pool.views)
    kernel.tokens, kernel.ids_dtype = tokens, id_dtype
    got_TD, parts = torch.full_like(hidden_TD, torch.nan), 0
    together = [torch.arange(tokens)] if asked["padding"] else groups(ids_TK, experts, asked["slots"])
    for rows in together:
        slots_TK = slots.bring(ids_TK[rows], experts)
        got_TD[rows] = kernel.run(offloaded, hidden_TD[rows], slots_TK, weights_TK[rows], ids_TK[rows])
        parts += 1
    assert not got_TD[whole:].any()
    got_TD, expected_TD = got_TD[:whole], expected_TD[:whole]
    reference_TD = _plainly(hidden_TD[:whole].float(), plain, ids_TK[:whole].long(), weights_TK)
    return {
        "same": torch.equal(got_TD, expected_TD), "parts": parts, "launches": len(launched),
        "tiles": all(each == tiles[0] for each in launched + tiles),
        "away": float((expected_TD.float() - reference_TD).abs().max() / reference_TD.abs().max()),
    }  # fmt: skip


def _watch_launches() -> list[dict[str, Any]]:
    """Record the tile sizes of every launch of the kernel from now on."""
    tiles: list[dict[str, Any]] = []
    fused_moe.fused_moe_kernel.pre_run_hooks = [
        lambda *args, **options: tiles.append({name: options[name] for name in options if name.startswith("BLOCK")})
    ]
    return tiles


def _layer(asked: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    experts = asked["experts"]
    parallel = FusedMoEParallelConfig.make_no_parallel()
    config = FusedMoEConfig(
        num_experts=experts, experts_per_token=asked["top_k"], hidden_dim=_HIDDEN, intermediate_size=_INTERMEDIATE,
        num_local_experts=experts, num_logical_experts=experts, activation=MoEActivation.SILU, device="cpu",
        routing_method=RoutingMethodType.Renormalize, moe_parallel_config=parallel, in_dtype=dtype,
        has_bias=asked["biased"],
    )  # fmt: skip
    manager = ExpertMapManager(
        max_num_batched_tokens=512, top_k=asked["top_k"], global_num_experts=experts, num_redundant_experts=0,
        num_expert_group=None, moe_parallel_config=parallel, placement_strategy="linear", enable_eplb=False,
    )  # fmt: skip
    return {
        "layer_name": "experts", "params_dtype": dtype, "moe_config": config, "quant_config": None,
        "expert_map_manager": manager,
    }  # fmt: skip


def _plainly(hidden_TD: Tensor, plain: dict[str, Tensor], ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Compute the experts in float32, one pair after the other."""
    output_TD = torch.zeros_like(hidden_TD)
    for token, (ids_K, weights_K) in enumerate(zip(ids_TK.tolist(), weights_TK[: len(ids_TK)], strict=True)):
        for expert, weight in zip(ids_K, weights_K, strict=True):
            both = plain["w13_weight"][expert] @ hidden_TD[token]
            both = both + plain["w13_bias"][expert] if "w13_bias" in plain else both
            gate, up = both.chunk(2)
            down = plain["w2_weight"][expert] @ (silu(gate) * up)
            down = down + plain["w2_bias"][expert] if "w2_bias" in plain else down
            output_TD[token] += weight * down
    return output_TD


if __name__ == "__main__":
    with set_current_vllm_config(VllmConfig()):
        for line in sys.stdin:
            print(RESULT + json.dumps(compare(json.loads(line))), flush=True)
