"""The view of a model's MoE layers and their routing rule: the base of predictors, collection and the runtime.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
:mod:`expertcast.data.moe_layers` finds the layers in a model; this module describes them.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from expertcast.predictors.messages import ExpertcastError, Json

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
        """Dtype of router inputs: that of the weights of norm, router or experts. A model in half precision may keep
        the norm or the router in float32."""
        found = None
        for module in (self.norm, self.router, self.experts):
            kinds = (each.dtype for each in module.parameters() if each.is_floating_point())
            found = next(kinds, found)
            if found not in (None, torch.float32):
                break
        return found or torch.get_default_dtype()

    def router_input(self, residual_TD: Tensor) -> Tensor:
        """Apply this layer's norm to residuals [T, D] of any float dtype: s_l = LN_l(r_l)."""
        output: Tensor = self.norm(residual_TD.to(self.dtype))
        return output

    def router_logits(self, hidden_TD: Tensor) -> Tensor:
        """Return the logits [T, E] of this layer's own router for inputs [T, D]."""
        return self.routed(hidden_TD)[0]

    def routed(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run this layer's own router on inputs [T, D] and return logits [T, E], weights and ids [T, K].

        The router's hooks do not run: those of an offloaded model belong to its own forward.
        """
        given = hidden_TD if self.router_dims == 2 else hidden_TD.unsqueeze(0)
        arguments = {
            name: value.tensor if isinstance(value, OwnTensor) else value for name, value in self.router_arguments
        }
        logits_TE, weights_TK, ids_TK = self.router.forward(given, **arguments)
        return logits_TE, weights_TK, ids_TK

    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids (int64) and combine weights [T, K] that this layer's router returns for these logits."""
        return _run(self, _Answers(self, logits_TE))


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
    def from_dict(cls, values: Mapping[str, Any]) -> ModelShape:
        """Create from the result of :meth:`as_dict`."""
        return cls(layers=values["L"], experts=values["E"], top_k=values["K"], hidden=values["D"])


def overfetched(factor: float, top_k: int, experts: int) -> int:
    """Return the experts to fetch for one token at an overfetch factor: ceil(factor x K), at most E.

    Runtime, simulator and evaluation share this rule. The product is rounded to nine decimals first, because 1.12 x 25
    is 28.000000000000004 in floating point.
    """
    return min(experts, math.ceil(round(factor * top_k, 9)))


# The routing rule: how a layer's own router turns logits into expert ids and combine weights.
#
# The router module itself runs. The operation that produces its logits returns the given logits instead, and its last
# `topk` returns the given ids, if there are any. Earlier operations on the result of its linear map (a multiplier, a
# soft cap, a softmax) belong to the logits, not to the rule.

_PROBES = 64
"""Random routings that test whether a router depends on its logits alone."""
_SAME_SUM = 0.02
"""Relative tolerance for sums of bf16 weights."""


def route_all(view: MoEView, logits_TLE: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return ids and combine weights [T, K] of each layer by its own rule, for logits of the first layers or all."""
    routed = [view[layer].route(logits_TE) for layer, logits_TE in enumerate(logits_TLE.unbind(1))]
    return [ids_TK for ids_TK, _ in routed], [weights_TK for _, weights_TK in routed]


def weights_over(layer: MoELayer, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Return the combine weights [T, K] that the layer's own rule assigns to fixed experts under given logits.

    The router runs with the result of its final `topk` over E scores replaced by `ids_TK`, so its own code gathers and
    renormalises the scores. A rule without such a topk (sparsemixer) runs on logits that are minus infinity outside
    `ids_TK`.

    Args:
        layer: MoE layer.
        logits_TE: router logits.
        ids_TK: expert ids.
    """
    answers = _Answers(layer, logits_TE, ids_TK)
    routed_TK, weights_TK = _run(layer, answers)
    if not answers.chose:
        outside = torch.ones_like(logits_TE, dtype=torch.bool).scatter(1, ids_TK, False)
        routed_TK, weights_TK = layer.route(logits_TE.masked_fill(outside, float("-inf")))
        order = (routed_TK.unsqueeze(-2) == ids_TK.unsqueeze(-1)).int().argmax(dim=-1)
        weights_TK = weights_TK.gather(1, order)
    return weights_TK


def renormalises(layer: MoELayer) -> bool:
    """Return whether a token's K weights sum to a constant under the layer's rule, whatever the logits."""
    steep_E = torch.linspace(-2.0, 2.0, layer.num_experts)
    _, weights_2K = layer.route(torch.stack([torch.zeros_like(steep_E), steep_E]))
    flat, steep = weights_2K.float().sum(dim=-1).tolist()
    return bool(abs(flat - steep) < _SAME_SUM * abs(flat))


def routes_by_logits(view: MoEView) -> bool:
    """Return whether every router takes the K experts with the highest logits, tested on random logits.

    The test logits lie on a grid around 0 that bf16 represents without ties.
    """
    generator = torch.Generator().manual_seed(0)
    experts, top_k = view.shape.experts, view.shape.top_k
    order_TE = torch.stack([torch.randperm(experts, generator=generator) for _ in range(_PROBES)])
    logits_TE = (order_TE - experts // 2) * 2.0 ** -max(0, experts.bit_length() - 4)
    best_TK = logits_TE.topk(top_k).indices.sort(dim=1).values
    for layer in view:
        ids_TK, _ = layer.route(logits_TE)
        if not torch.equal(ids_TK.sort(dim=1).values.cpu(), best_TK):
            return False
    return True


@contextmanager
def untraced() -> Iterator[None]:
    """Keep operations out of a trace that is being recorded."""
    tracing = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


class Functions(TorchFunctionMode):
    """A context in which :meth:`run` is called in place of torch's functions."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Json | None = None
    ) -> Any:
        return self.run(func, *args, **kwargs or {})

    @abstractmethod
    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns in this context."""


class _Watched(Functions):
    """Records the result of every operation, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[object] = []

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
        result = func(*args, **kwargs)
        self.results.append(result)
        return result


class _Answers(Functions):
    """Replaces the result of the operation that produces a router's logits, and optionally the ids of its `topk`.

    If the router first chooses groups of experts, that `topk` returns the groups of the ids. All else runs unchanged.
    """

    def __init__(self, layer: MoELayer, logits_TE: Tensor, ids_TK: Tensor | None = None) -> None:
        super().__init__()
        self._made = _logits_of(layer)
        self.logits_TE, self._experts = logits_TE, layer.num_experts
        self._ids_TK = ids_TK
        self._left = self._made.number
        """Operations left before the one whose result is replaced."""
        self.chose = False
        """Whether a `topk` has returned the ids."""

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
        self._left -= 1
        if self._left == -1:
            return self.logits_TE.to(dtype=self._made.dtype, device=self._made.device)
        if self._ids_TK is not None and func in (torch.topk, Tensor.topk) and args[0].dim() == 2:
            chosen = self._choice(self._ids_TK, args[0], args[1] if len(args) > 1 else kwargs["k"])
            if chosen is not None:
                return torch.return_types.topk((args[0].gather(1, chosen), chosen))
        return func(*args, **kwargs)

    def _choice(self, ids_TK: Tensor, scores: Tensor, count: int) -> Tensor | None:
        experts = self._experts
        if scores.shape[1] == experts and count == ids_TK.shape[1]:
            self.chose = True
            return ids_TK
        if experts % scores.shape[1]:
            return None
        # the router chooses groups first: choose the groups of the ids, as it masks the experts of other groups
        group_TK = ids_TK // (experts // scores.shape[1])
        return torch.zeros_like(scores).scatter(1, group_TK, 1.0).topk(count).indices


@dataclass(frozen=True, slots=True)
class _MadeLogits:
    """Identifies the operation of a router that produces its logits."""

    number: int
    """Index of the operation."""
    dtype: torch.dtype
    device: torch.device


_MADE: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], _MadeLogits]] = WeakKeyDictionary()


def _logits_of(layer: MoELayer) -> _MadeLogits:
    """Find the operation that produces a router's logits; cached until the router's device or dtype changes.

    Raises:
        ExpertcastError: no operation produces them.
    """
    weight = next(layer.router.parameters())
    placeholder_1D = _placeholder(layer, 1)
    key = (weight.device, weight.dtype, placeholder_1D.dtype, layer.router.training)
    known = _MADE.setdefault(layer.router, {})
    if key not in known:
        with untraced(), torch.no_grad(), _Watched() as watched:
            logits_TE = layer.routed(placeholder_1D)[0]
        made = [number for number, result in enumerate(watched.results) if result is logits_TE]
        if not made:
            raise ExpertcastError(
                f"{type(layer.router).__name__}: no operation of the router produces its logits, so expertcast cannot "
                "apply its routing rule"
            )
        known[key] = _MadeLogits(made[-1], logits_TE.dtype, logits_TE.device)
    return known[key]


@torch.no_grad()
def _run(layer: MoELayer, answers: _Answers) -> tuple[Tensor, Tensor]:
    """Return the router's ids and weights under the replacements."""
    placeholder_TD = _placeholder(layer, len(answers.logits_TE))
    with answers:
        _, weights_TK, ids_TK = layer.routed(placeholder_TD)
    return ids_TK, weights_TK


def _placeholder(layer: MoELayer, tokens: int) -> Tensor:
    weight = next(layer.router.parameters())
    return weight.new_zeros(1, 1, dtype=layer.dtype).expand(tokens, layer.hidden_size)


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
        """Check a layer whose rule is indispensable.

        Raises:
            ExpertcastError: the layer's router disagrees with the rule.
        """
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
    logits_TE, weights_TK, ids_TK = layer.routed(router_input_TD)
    if not logits_TE.isfinite().all():  # NaN compares unequal to itself; other code rejects it
        return True
    try:
        routed_TK, given_TK = layer.route(logits_TE)
    except Exception:  # a router may raise anything when run on replaced logits
        return False
    return given_TK.dtype == weights_TK.dtype and torch.equal(routed_TK, ids_TK) and torch.equal(given_TK, weights_TK)
