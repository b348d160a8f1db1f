"""Describe a model's MoE layers, for `expertcast inspect MODEL`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel

from expertcast.data.early import refusal_lines, static_refusals
from expertcast.data.means import adds_experts
from expertcast.data.models import form_of, meta_model, open_weights
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.source import BITSANDBYTES, FP8, ModelSource, Quantised, forget_quantisation
from expertcast.data.weights.files import WeightFiles
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoELayer, MoEView


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """Properties of a model; sizes in bytes."""

    model: str
    architecture: str
    supported: bool
    reason: str
    """Why the model is not supported; empty if it is."""
    layers: int = 0
    """L, the number of MoE layers."""
    dense_layers: int = 0
    """Decoder layers without experts."""
    experts: int = 0
    """E, routed experts per layer."""
    top_k: int = 0
    """K, experts per token."""
    hidden: int = 0
    """D, the hidden size."""
    shared_experts: bool = False
    router: str = ""
    """Class of the routers."""
    default_vectors: str = ""
    """Form of the default vectors."""
    router_reads: str = ""
    shipped: str = ""
    """Format of the checkpoint's quantised weights, such as fp8; empty for plain weights."""
    loaded: str = ""
    """How quantised weights are loaded, and the codec that keeps experts in their format, if any."""
    shipped_bytes: int = 0
    """Size of the checkpoint's weight files; 0 if they are not on this machine."""
    dtype: str = ""
    """Dtype of the model, after the quantised format if there is one."""
    expert_bytes: int = 0
    """Size of one routed expert in the model's dtype."""
    all_experts_bytes: int = 0
    other_bytes: int = 0
    """Size of all parameters other than routed experts."""
    early_attention: int = 0
    """Number of MoE layers whose structure allows early attention."""
    not_early: tuple[str, ...] = ()
    """Reasons why other layers do not, each with its layers."""


class OpenModel(ExitStack):
    """A model without weights, its MoE layers and the files of its checkpoint, each opened once; closes the files.

    Args:
        source: location of the model. Only its configuration is downloaded.

    Raises:
        ExpertcastError: the model does not exist.
    """

    def __init__(self, source: ModelSource) -> None:
        super().__init__()
        self.source = source
        self.model = meta_model(source)
        """The model, whose configuration describes no quantised weights."""
        self.form: Quantised | None = None
        self.view: MoEView | None = None
        """None: the model is not supported."""
        self.files: WeightFiles | None = None
        """None: there are none on this machine, or they cannot be read."""
        self.error = ExpertcastError("")
        """Reason if there is no view, or are no files."""
        here = replace(source, options={**source.options, "local_files_only": True})
        try:
            self.form = form_of(self.model.config, source)
            forget_quantisation(self.model.config)
            self.view = find_moe_layers(self.model)
            self.files = self.enter_context(open_weights(here, self.form, self.model))
        except ExpertcastError as error:
            self.error = error

    def report(self) -> ModelReport:
        """Describe the model."""
        if self.view is None or (self.files is None and self._is_here()):
            return ModelReport(
                model=self.source.name, architecture=type(self.model).__name__, supported=False, reason=str(self.error)
            )
        report = describe(self.model, self.source.name, self.form, self.view)
        paths = [] if self.files is None else self.files.paths
        return replace(report, shipped_bytes=sum(Path(path).stat().st_size for path in paths))

    def _is_here(self) -> bool:
        weights = ("*.safetensors", "pytorch_model*.bin")
        return bool(self.source.gguf()) or any(any(Path(self.source.path).glob(each)) for each in weights)


def describe(model: PreTrainedModel, model_id: str, form: Quantised | None, view: MoEView) -> ModelReport:
    """Describe a supported model on any device, including meta."""
    first = view[0]
    expert_bytes = sum(p[0].nbytes for p in first.experts.parameters() if p.shape[0] == first.num_experts)
    all_experts = expert_bytes * first.num_experts * len(view)
    total = sum(parameter.nbytes for parameter in model.parameters())
    refused = static_refusals(model, view)
    return ModelReport(
        model=model_id,
        architecture=type(model).__name__,
        supported=True,
        reason="",
        layers=len(view),
        dense_layers=int(model.config.get_text_config().num_hidden_layers) - len(view),
        experts=first.num_experts,
        top_k=first.top_k,
        hidden=first.hidden_size,
        shared_experts=first.has_shared,
        router=type(first.router).__name__,
        default_vectors=_each(view, _default_vectors),
        router_reads=_each(view, _router_reads),
        shipped="" if form is None else form.kind,
        loaded=_loaded(form),
        dtype=("" if form is None else f"{form.kind}, computed in ") + str(model.dtype).removeprefix("torch."),
        expert_bytes=expert_bytes,
        all_experts_bytes=all_experts,
        other_bytes=total - all_experts,
        early_attention=len(view) - len(refused),
        not_early=tuple(refusal_lines(refused)),
    )


def _loaded(form: Quantised | None) -> str:
    if form is None:
        return "unchanged"
    kept = ", as these sizes; packed, a CPU's default, experts and linear layers keep their codes where ggml has them"
    return f"dequantised while loading{'' if form.method in (FP8, BITSANDBYTES) else kept}"


def _each(view: MoEView, say: Callable[[MoELayer], str]) -> str:
    """Describe the layers, with layer numbers if they differ."""
    found: dict[str, list[int]] = {}
    for layer in view:
        found.setdefault(say(layer), []).append(layer.index)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{words} (layers {', '.join(map(str, layers))})" for words, layers in found.items())


def _default_vectors(layer: MoELayer) -> str:
    if layer.adds is None or not adds_experts(layer):
        return "one per layer, the mean change to the next layer: expert outputs are normalised, gated or projected"
    words = "one per expert" + ("" if layer.adds.factor == 1 else f", times {layer.adds.factor:.3g}")
    if layer.has_shared or layer.adds.beside:
        words += ", and one for the other terms of the sum"
    return words


def _router_reads(layer: MoELayer) -> str:
    words = "the output of a norm" if layer.norm_name else "the residual"
    return words + "".join(f", and {name}" for name, value in layer.router_arguments if value is not None)
