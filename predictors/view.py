"""The view of a model's MoE layers: what predictors, collection and the runtime stand on.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
Finding the layers in a model is :mod:`expertcast.data.moe_layers`; this module only describes them.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.routing_rule import route

_SAMPLED = 8
"""Places of each of an expert's tensors that its fingerprint looks at."""


@dataclass(frozen=True, slots=True)
class Adds:
    """How a layer's experts' output enters the residual stream: as a term of a sum."""

    factor: float = 1.0
    """What it is multiplied with there."""
    beside: bool = False
    """Whether the layer adds something else there than its block's output."""


@dataclass(frozen=True, slots=True)
class OwnTensor:
    """A parameter or buffer that a router is given by its block; it is looked up when it is needed."""

    path: str
    """In the model."""
    owner: nn.Module

    @property
    def name(self) -> str:
        """In its owner."""
        return self.path.rpartition(".")[2]

    @property
    def tensor(self) -> Tensor:
        """As it is now."""
        tensor: Tensor = getattr(self.owner, self.name)
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MoELayer:
    """One MoE layer of a `transformers` model; modules belong to the model and are never changed here."""

    index: int
    """MoE layer index, 0..L-1 (dense layers are not counted)."""
    block_name: str
    """Path of the MoE block in the model."""
    norm_name: str
    """Path of the norm whose output is the router's input; empty where that is no norm's: the residual is the router's
    input itself then, and `norm` an identity of our own."""
    router_name: str
    """Path of the router module."""
    experts_name: str
    """Path of the decorated experts module."""
    decoder: nn.Module
    """What the block stands in: a decoder layer, attention included."""
    block: nn.Module
    norm: nn.Module
    router: nn.Module
    experts: nn.Module
    num_experts: int
    """E"""
    top_k: int
    """K"""
    hidden_size: int
    """D"""
    has_shared: bool
    """Whether shared experts add to the block's output."""
    adds: Adds | None = field(default_factory=Adds)
    """None: the experts' output is no term of the residual stream, but normalised, gated or projected before."""
    router_dims: int = 2
    """Dimensions of what the block gives its router: 2 for [T, D], 3 for [B, S, D]."""
    router_arguments: tuple[tuple[str, OwnTensor | float | None], ...] = ()
    """What else the block gives its router, by name."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the router's inputs: that of the norm's weight, or of the experts' where it has none. A router may keep
        another for its own weight."""
        for module in (self.norm, self.experts, self.router):
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    return parameter.dtype
        return torch.get_default_dtype()

    def router_input(self, residual_TD: Tensor) -> Tensor:
        """LN of this layer over [T, D] of any float dtype: s_l for its own residual, q for an earlier one's r + d."""
        output: Tensor = self.norm(residual_TD.to(self.dtype))
        return output

    def router_logits(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, E] that this layer's own router gives for [T, D] inputs."""
        return self.routed(hidden_TD)[0]

    def routed(self, hidden_TD: Tensor, *, hooks: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """What this layer's own router returns for [T, D] inputs: logits [T, E], weights and ids [T, K]; without
        `hooks` whatever is hooked to it."""
        given = hidden_TD if self.router_dims == 2 else hidden_TD.unsqueeze(0)
        arguments = {
            name: value.tensor if isinstance(value, OwnTensor) else value for name, value in self.router_arguments
        }
        run = self.router if hooks else self.router.forward
        logits_TE, weights_TK, ids_TK = run(given, **arguments)
        return logits_TE, weights_TK, ids_TK

    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids (int64) and combine weights [T, K] that this layer's router would return with these logits."""
        return route(self, logits_TE)


@dataclass(frozen=True, slots=True)
class MoEView:
    """The MoE layers of one model, first to last."""

    layers: tuple[MoELayer, ...]
    model_id: str
    """Hub id or local path the model came from."""
    experts_known: str | None = None
    """What :meth:`experts_fingerprint` gave when the experts were at hand; a skeleton has none."""

    def __repr__(self) -> str:
        return f"<MoEView of {self.model_id}: {self.shape}>"

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[MoELayer]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> MoELayer:
        return self.layers[index]

    @property
    def shape(self) -> ModelShape:
        """L, E, K and D of the model."""
        first = self.layers[0]
        layers, experts = len(self.layers), first.num_experts
        return ModelShape(layers=layers, experts=experts, top_k=first.top_k, hidden=first.hidden_size)

    def fingerprint(self) -> str:
        """SHA-256 over the weights of the routers, of what their blocks give them, and of the norms before them,
        rounded to bf16 so that the loading dtype does not matter."""
        digest = hashlib.sha256()
        for layer in self.layers:
            _add(digest, f"{layer.index}.router", layer.router.state_dict())
            _add(digest, f"{layer.index}.norm", layer.norm.state_dict())
            given = {name: value.tensor for name, value in layer.router_arguments if isinstance(value, OwnTensor)}
            _add(digest, f"{layer.index}.given", given)
        return digest.hexdigest()

    def experts_fingerprint(self) -> str | None:
        """SHA-256 over a sample of the experts' weights, eight places of every tensor of every expert, in bf16.

        None where they are not at hand: not given, on the meta device, in a skeleton of which nothing is known, in
        slots, or rounded to fp16 or packed in 4 or 8 bits, which is not undone. So whoever compares it compares what is
        there.
        """
        if self.experts_known is not None:
            return self.experts_known
        places: set[int] = set()
        for layer in self.layers:
            tensors = list(layer.experts.parameters())
            if not tensors:
                return None
            for tensor in tensors:
                if tensor.is_meta or len(tensor) != layer.num_experts or tensor.data_ptr() in places:
                    return None
                places.add(tensor.data_ptr())  # layers in slots share one place
        return experts_digest(map(_experts_weights, self.layers))


def experts_digest(layers: Iterable[Iterable[Mapping[str, Tensor]]]) -> str | None:
    """What :meth:`MoEView.experts_fingerprint` gives, of experts' weights by name: of every layer, of each expert."""
    digest = hashlib.sha256()
    for index, experts in enumerate(layers):
        samples: dict[str, list[Tensor]] = {}
        for weights in experts:
            for name, tensor in weights.items():
                if tensor.dtype not in (torch.float32, torch.bfloat16):
                    return None
                at = torch.linspace(0, tensor.numel() - 1, _SAMPLED).long().to(tensor.device)
                samples.setdefault(name, []).append(tensor.detach().reshape(-1)[at])
        _add(digest, f"{index}.experts", {name: torch.stack(rows) for name, rows in samples.items()})
    return digest.hexdigest()


def _experts_weights(layer: MoELayer) -> Iterator[dict[str, Tensor]]:
    """Each expert's own, by name."""
    for expert in range(layer.num_experts):
        yield {name: tensor[expert] for name, tensor in layer.experts.named_parameters()}


def _add(digest: hashlib._Hash, where: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{where}.{name}{tuple(tensor.shape)}".encode())
        rounded = tensor.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()
        digest.update(rounded.view(torch.uint8).numpy().tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The four numbers that a predictor is built for."""

    layers: int
    experts: int
    top_k: int
    hidden: int

    def as_dict(self) -> dict[str, int]:
        """By letter, as checkpoints and traces write it."""
        return {"L": self.layers, "E": self.experts, "K": self.top_k, "D": self.hidden}

    @classmethod
    def from_dict(cls, values: dict[str, int]) -> ModelShape:
        """What :meth:`as_dict` gave."""
        return cls(layers=values["L"], experts=values["E"], top_k=values["K"], hidden=values["D"])


def overfetched(factor: float, top_k: int, experts: int) -> int:
    """Experts fetched for one token at an overfetch factor: ceil(factor x K), never more than there are.

    The one rule of runtime, simulator and evaluation. The product is rounded to nine decimals first: 1.12 x 25 is 28,
    and 28.000000000000004 in floating point.
    """
    return min(experts, math.ceil(round(factor * top_k, 9)))


class RuleCheck:
    """Remembers which layers' routers route otherwise than :meth:`MoELayer.route` says of their own logits.

    A router may go by more than the logits that it returns: nothing that is forecast for its layer would be right.
    """

    def __init__(self, view: MoEView) -> None:
        self._view = view
        self.unseen = set(range(len(view)))
        """Layers of which no input was seen; nothing is left to do when it is empty."""
        self.wrong: set[int] = set()
        self._warned = False

    def see(self, layer: int, router_input_TD: Tensor) -> None:
        """Ask a layer that was not asked yet; warn of the first one that is found wrong.

        Args:
            layer: MoE layer index.
            router_input_TD: what its router reads.
        """
        self.unseen.discard(layer)
        if layer not in self.wrong and not follows_rule(self._view[layer], router_input_TD):
            self.wrong.add(layer)
        if self.wrong and not self._warned:
            self._warned = True
            warnings.warn(self._line() + ": no forecast is made for such layers", stacklevel=2)

    @torch.no_grad()
    def try_out(self) -> None:
        """The same of made inputs, before there are any: a router that ends in an error on its own logits shall not do
        so in a forecast. The layers stay unseen."""
        generator = torch.Generator().manual_seed(0)  # its own: sampled generation must not change
        for layer in self._view:
            weight = next(layer.router.parameters())
            residual_TD = torch.randn(2, layer.hidden_size, generator=generator).to(weight.device)
            self.see(layer.index, layer.router_input(residual_TD))
        self.unseen.update(range(len(self._view)))

    def require(self, layer: int, router_input_TD: Tensor) -> None:
        """The same where nothing can be done without the rule.

        Raises:
            ExpertcastError: the layer's router routes otherwise.
        """
        self.unseen.discard(layer)
        if not follows_rule(self._view[layer], router_input_TD):
            self.wrong.add(layer)
            raise ExpertcastError(
                self._line() + ": what traces keep does not say how it routes; expertcast.offload without a predictor "
                "runs such a model"
            )

    def _line(self) -> str:
        layer = min(self.wrong)
        return (
            f"router {type(self._view[layer].router).__name__} of MoE layer {layer} does not give the experts and "
            "weights that its own logits say: it goes by more than these"
        )


@torch.no_grad()
def follows_rule(layer: MoELayer, router_input_TD: Tensor) -> bool:
    """Whether a router's own logits, sent through the rule, give the router's own ids and weights, bit for bit."""
    logits_TE, weights_TK, ids_TK = layer.routed(router_input_TD, hooks=False)
    if not logits_TE.isfinite().all():  # NaN is like nothing, itself included: others refuse it
        return True
    try:
        routed_TK, given_TK = layer.route(logits_TE)
    except Exception:  # whatever a router does that is not given what it goes by
        return False
    return given_TK.dtype == weights_TK.dtype and torch.equal(routed_TK, ids_TK) and torch.equal(given_TK, weights_TK)
