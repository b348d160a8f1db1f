"""A front of its own: a small MoE model in plain torch, whose experts run by the engine. It needs no transformers.

python tests/runtime/engine/plain_front.py      decodes with it, resident and offloaded, without transformers
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.modules["transformers"] = None  # type: ignore[assignment]

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expertcast.data.batch import RouterCall
from expertcast.data.packed_experts import combine
from expertcast.predictors import ModelShape, MoEView, PredictorConfig
from expertcast.predictors.baselines import RouterInput
from expertcast.runtime.config import OffloadConfig, make_link, make_store
from expertcast.runtime.engine.engine import Engine
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.policies import CacheShape
from expertcast.runtime.storage.layout import BlockLayout, ExpertsForm
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.plain_view import LinearRouter, plain_view

SHAPE = ModelShape(layers=4, experts=8, top_k=2, hidden=16)
_INNER = 24


class PairKernel:
    """One matrix product after another, pair by pair: the same bits for one call and for many."""

    def run(
        self, experts: nn.Module, hidden_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor, ids_TK: Tensor,
        slots: Sequence[int] | None = None,
    ) -> Tensor:  # fmt: skip
        top_k = slots_TK.shape[1]
        output_PD = self.run_pairs(experts, hidden_TD, top_k, torch.arange(slots_TK.numel()), slots_TK.reshape(-1))
        return combine(output_PD, weights_TK, hidden_TD.dtype)

    def run_pairs(self, experts: nn.Module, hidden_TD: Tensor, top_k: int, pairs: Tensor, slots: Tensor) -> Tensor:
        rows = []
        for pair, slot in zip(pairs.tolist(), slots.tolist(), strict=True):
            up = F.linear(hidden_TD[pair // top_k], experts.get_parameter("w13")[slot])
            gate, value = up.chunk(2)
            rows.append(F.linear(F.silu(gate) * value, experts.get_parameter("w2")[slot]))
        return torch.stack(rows)


class PlainModel:
    """Norm, router, experts, layer after layer; the text goes on with what the last layer gave."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*size: int) -> Tensor:
            return (torch.randn(*size, generator=generator) * size[-1] ** -0.5).to(dtype)

        layers, experts, hidden = SHAPE.layers, SHAPE.experts, SHAPE.hidden
        self.weights = [
            {"w13": random(experts, 2 * _INNER, hidden), "w2": random(experts, hidden, _INNER)} for _ in range(layers)
        ]
        self.norms = [nn.RMSNorm(hidden, eps=1e-6, dtype=dtype) for _ in range(layers)]
        self.routers = [LinearRouter(4 * random(experts, hidden), SHAPE.top_k) for _ in range(layers)]
        self.view: MoEView = plain_view(SHAPE, self.routers, self.norms, "plain")
        self.prompt_TD = random(6, hidden) * 4

    @torch.no_grad()
    def texts(self, engine: Engine | None, steps: int = 24) -> list[Tensor]:
        """Outputs of a prompt and of decode steps."""
        hidden_TD, outputs = self.prompt_TD, []
        for step in range(steps):
            if engine is not None:
                engine.on_start(step == 0)
            for layer in range(SHAPE.layers):
                hidden_TD = hidden_TD + self._experts(engine, layer, hidden_TD)
            outputs.append(hidden_TD)
            hidden_TD = hidden_TD[-1:].roll(1, dims=-1)
        return outputs

    def _experts(self, engine: Engine | None, layer: int, residual_TD: Tensor) -> Tensor:
        read_TD = self.norms[layer](residual_TD)
        logits_TE, weights_TK, ids_TK = self.routers[layer](read_TD)
        if engine is None:
            resident = nn.Module()
            for name, tensor in self.weights[layer].items():
                resident.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            return PairKernel().run(resident, read_TD, ids_TK, weights_TK, ids_TK)
        call = RouterCall(
            layer=layer, sequences=1, tokens=len(read_TD), residual_TD=residual_TD, router_input_TD=read_TD,
            logits_TE=logits_TE, weights_TK=weights_TK, ids_TK=ids_TK,
        )  # fmt: skip
        executed = engine.on_router(call)
        ids_TK, weights_TK = (ids_TK, weights_TK) if executed is None else executed
        return engine.run(self.view[layer], read_TD, ids_TK, weights_TK)

    def store(self, config: OffloadConfig) -> ExpertStore:
        """Filled: in memory expert by expert, last layer first, as a loader may come; on disk layer by layer."""
        layout = BlockLayout.of_tensors({name: tensor[0] for name, tensor in self.weights[0].items()})
        store = make_store(config, ExpertsForm(shape=SHAPE, layout=layout, model_id="plain"), torch.device("cpu"))
        if config.store == "memory":
            opened = {layer: store.open(layer) for layer in reversed(range(SHAPE.layers))}
            for expert in range(SHAPE.experts):
                for layer, views in opened.items():
                    for name, tensor in self.weights[layer].items():
                        views[name][expert].copy_(tensor[expert])
        else:
            for layer, weights in enumerate(self.weights):
                store.fill(layer, lambda views, own=weights: [views[name].copy_(own[name]) for name in own])  # type: ignore[misc]
        store.finish()
        return store


class Front:
    """What stands between the model and the engine, made of an :class:`OffloadConfig`."""

    def __init__(self, model: PlainModel, *, slots: int, **options: Any) -> None:
        config = OffloadConfig(slots=slots, **options)
        device = torch.device("cpu")
        self.store = model.store(config)
        self.pool = SlotPool(self.store.layout, slots, device)
        link = make_link(config, device.type)
        assert link is not None
        self.link = link
        link.attach(self.store, self.pool)
        predictor = RouterInput(PredictorConfig(), SHAPE).bind(model.view) if config.predictor else None
        shape = CacheShape(layers=SHAPE.layers, experts=SHAPE.experts, top_k=SHAPE.top_k, slots=slots)
        self.engine = Engine(
            link=link, pool=self.pool, speculator=Speculator(model.view, predictor),
            policies=config.resolved_policies().make(shape), kernel=PairKernel(),
        )  # fmt: skip
        for layer in model.view:
            self.engine.attach(layer)

    def close(self) -> None:
        self.link.close()
        self.pool.free()
        self.store.close()


def main() -> int:
    model = PlainModel()
    resident = model.texts(None)
    front = Front(model, slots=8, predictor="router_input")
    same = all(torch.equal(one, other) for one, other in zip(resident, model.texts(front.engine), strict=True))
    print(same, front.engine.stats.total.misses, front.engine.stats.total.prefetched)
    front.close()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
