"""View of a model's MoE layers: the modules and sizes that predictors, collection and the runtime use.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
:mod:`expertcast.data.moe_layers` finds the layers in a model; this module describes them.
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
"""Elements of each expert tensor that the fingerprint hashes."""


@dataclass(frozen=True, slots=True)
class Adds:
    """How the experts' output enters the residual stream: as a term of a sum."""

    factor: float = 1.0
    """Factor of the experts' output in the sum."""
    beside: bool = False
    """Whether the layer adds another term besides its block's output."""


@dataclass(frozen=True, slots=True)
class OwnTensor:
    """Parameter or buffer of the block that is an argument of its router, looked up at each use."""

    path: str
    """Path in the model."""
    owner: nn.Module

    @property
    def name(self) -> str:
        """Attribute name in the owner."""
        return self.path.rpartition(".")[2]

    @property
    def tensor(self) -> Tensor:
        """Current value."""
        tensor: Tensor = getattr(self.owner, self.name)
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MoELayer:
    """One MoE layer of a `transformers` model. The modules are the model's own and stay unchanged."""

    index: int
    """MoE layer index, 0..L-1 (dense layers are not counted)."""
    block_name: str
    """Path of the MoE block in the model."""
    norm_name: str
    """Path of the norm whose output is the router's input. Empty if the router reads the residual directly; `norm` is
    then an identity."""
    router_name: str
    """Path of the router module."""
    experts_name: str
    """Path of the decorated experts module."""
    decoder: nn.Module
    """Decoder layer that contains the block, including attention."""
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
    """Whether shared experts contribute to the block's output."""
    adds: Adds | None = field(default_factory=Adds)
    """How the output joins the residual stream; None if it is normalised, gated or projected first."""
    router_dims: int = 2
    """Rank of the router's input tensor: 2 for [T, D], 3 for [B, S, D]."""
    router_arguments: tuple[tuple[str, OwnTensor | float | None], ...] = ()
    """Further arguments of the router, by name."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of router inputs: that of the norm's weight, or of the experts if the norm has no weight. The router's
        own weight may have another dtype."""
        for module in (self.norm, self.experts, self.router):
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    return parameter.dtype
        return torch.get_default_dtype()

    def router_input(self, residual_TD: Tensor) -> Tensor:
        """Apply this layer's norm to residuals [T, D] of any float dtype: s_l = LN_l(r_l)."""
        output: Tensor = self.norm(residual_TD.to(self.dtype))
        return output

    def router_logits(self, hidden_TD: Tensor) -> Tensor:
        """Return the logits [T, E] of this layer's own router for inputs [T, D]."""
        return self.routed(hidden_TD)[0]

    def routed(self, hidden_TD: Tensor, *, hooks: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Run this layer's own router, with or without its forward hooks: logits [T, E], weights and ids [T, K]."""
        given = hidden_TD if self.router_dims == 2 else hidden_TD.unsqueeze(0)
        arguments = {
            name: value.tensor if isinstance(value, OwnTensor) else value for name, value in self.router_arguments
        }
        run = self.router if hooks else self.router.forward
        logits_TE, weights_TK, ids_TK = run(given, **arguments)
        return logits_TE, weights_TK, ids_TK

    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids (int64) and combine weights [T, K] that this layer's router returns for these logits."""
        return route(self, logits_TE)


@dataclass(frozen=True, slots=True)
class MoEView:
    """The MoE layers of one model, in order."""

    layers: tuple[MoELayer, ...]
    model_id: str
    """Hub id or local path of the model."""
    experts_known: str | None = None
    """Cached result of :meth:`experts_fingerprint`, for a skeleton, which has no experts."""

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
        """L, E, K and D."""
        first = self.layers[0]
        layers, experts = len(self.layers), first.num_experts
        return ModelShape(layers=layers, experts=experts, top_k=first.top_k, hidden=first.hidden_size)

    def fingerprint(self) -> str:
        """Return SHA-256 over the weights of routers, their further tensor arguments, and the norms before them.

        Weights are rounded to bf16, so the dtype at loading does not matter.
        """
        digest = hashlib.sha256()
        for layer in self.layers:
            _add(digest, f"{layer.index}.router", layer.router.state_dict())
            _add(digest, f"{layer.index}.norm", layer.norm.state_dict())
            given = {name: value.tensor for name, value in layer.router_arguments if isinstance(value, OwnTensor)}
            _add(digest, f"{layer.index}.given", given)
        return digest.hexdigest()

    def experts_fingerprint(self) -> str | None:
        """Return SHA-256 over eight elements of every expert tensor, in bf16, or None if they are not available.

        Experts are unavailable on the meta device, in a skeleton without a stored fingerprint, in slots, and after
        rounding to fp16 or packing to 4 or 8 bits. Callers compare fingerprints only if both exist.
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
                places.add(tensor.data_ptr())  # layers in slots share memory
        return experts_digest(map(_experts_weights, self.layers))


def experts_digest(layers: Iterable[Iterable[Mapping[str, Tensor]]]) -> str | None:
    """Compute :meth:`MoEView.experts_fingerprint` from tensors by name, for each expert of each layer."""
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
    for expert in range(layer.num_experts):
        yield {name: tensor[expert] for name, tensor in layer.experts.named_parameters()}


def _add(digest: hashlib._Hash, where: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{where}.{name}{tuple(tensor.shape)}".encode())
        rounded = tensor.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()
        digest.update(rounded.view(torch.uint8).numpy().tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """L, E, K and D of a model: the sizes that a predictor depends on."""

    layers: int
    experts: int
    top_k: int
    hidden: int

    def as_dict(self) -> dict[str, int]:
        """Return the sizes by letter, the format of checkpoints and traces."""
        return {"L": self.layers, "E": self.experts, "K": self.top_k, "D": self.hidden}

    @classmethod
    def from_dict(cls, values: dict[str, int]) -> ModelShape:
        """Create from the result of :meth:`as_dict`."""
        return cls(layers=values["L"], experts=values["E"], top_k=values["K"], hidden=values["D"])


def overfetched(factor: float, top_k: int, experts: int) -> int:
    """Return the experts to fetch for one token at an overfetch factor: ceil(factor x K), at most E.

    Runtime, simulator and evaluation share this rule. The product is rounded to nine decimals first, because 1.12 x 25
    is 28.000000000000004 in floating point.
    """
    return min(experts, math.ceil(round(factor * top_k, 9)))


class RuleCheck:
    """Finds layers whose router disagrees with :meth:`MoELayer.route` on the router's own logits.

    Such a router depends on more than its logits, so forecasts for its layer would be wrong.
    """

    def __init__(self, view: MoEView) -> None:
        self._view = view
        self.unseen = set(range(len(view)))
        """Layers that were not checked on a real input yet."""
        self.wrong: set[int] = set()
        self._warned = False

    def see(self, layer: int, router_input_TD: Tensor) -> None:
        """Check a layer once; the first disagreement raises a warning.

        Args:
            layer: MoE layer index.
            router_input_TD: input of its router.
        """
        self.unseen.discard(layer)
        if layer not in self.wrong and not follows_rule(self._view[layer], router_input_TD):
            self.wrong.add(layer)
        if self.wrong and not self._warned:
            self._warned = True
            warnings.warn(self._line() + ": such layers have no forecasts", stacklevel=2)

    @torch.no_grad()
    def try_out(self) -> None:
        """Check all layers on random inputs, so that errors of the rule appear before the first forecast.

        The layers remain in `unseen`.
        """
        generator = torch.Generator().manual_seed(0)  # leaves the global generator alone
        for layer in self._view:
            weight = next(layer.router.parameters())
            residual_TD = torch.randn(2, layer.hidden_size, generator=generator).to(weight.device)
            self.see(layer.index, layer.router_input(residual_TD))
        self.unseen.update(range(len(self._view)))

    def require(self, layer: int, router_input_TD: Tensor) -> None:
        """Raise :class:`ExpertcastError` if the layer's router disagrees with the rule."""
        self.unseen.discard(layer)
        if not follows_rule(self._view[layer], router_input_TD):
            self.wrong.add(layer)
            raise ExpertcastError(
                self._line() + ": traces cannot record its routing; expertcast.offload without a predictor runs such a "
                "model"
            )

    def _line(self) -> str:
        layer = min(self.wrong)
        return (
            f"router {type(self._view[layer].router).__name__} of MoE layer {layer} does not route by its own logits "
            "alone"
        )


@torch.no_grad()
def follows_rule(layer: MoELayer, router_input_TD: Tensor) -> bool:
    """Return whether the rule, applied to a router's own logits, reproduces its ids and weights bit for bit."""
    logits_TE, weights_TK, ids_TK = layer.routed(router_input_TD, hooks=False)
    if not logits_TE.isfinite().all():  # NaN compares unequal to itself; other code rejects it
        return True
    try:
        routed_TK, given_TK = layer.route(logits_TE)
    except Exception:  # a router may raise anything when run on replaced logits
        return False
    return given_TK.dtype == weights_TK.dtype and torch.equal(routed_TK, ids_TK) and torch.equal(given_TK, weights_TK)
