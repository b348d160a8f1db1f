"""expertcast.load_offloaded: load a model from its files into its offloaded form, layer by layer.

Host memory holds the experts' blocks, a few experts in conversion, and all other weights once (until they are on the
device), never more.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import Mxfp4Config, PreTrainedModel
from transformers.quantizers import AutoHfQuantizer, HfQuantizer

from expertcast.data.machine import torch_device, torch_dtype
from expertcast.data.models import LOADING, form_of, meta_model, model_of, one_line, open_weights, put_adapter
from expertcast.data.moe_layers import find_moe_layers, same_layers
from expertcast.data.packed_experts import BlockForm, Forms, for_device, form_for, make_packed, matrices
from expertcast.data.packed_linear import linear_forms, pack_linears
from expertcast.data.source import MXFP4, ModelSource, Quantised, check_release, forget_quantisation
from expertcast.data.weights.files import TensorFile, WeightFiles
from expertcast.predictors.messages import ExpertcastError, Progress
from expertcast.predictors.view import MoEView
from expertcast.runtime.config import BY_FORM, EXPANDED, EXPERTS_BITS, PACKED, OffloadConfig, make_store
from expertcast.runtime.engine.front import refuse_shared
from expertcast.runtime.forecasters import check_forecasters
from expertcast.runtime.offloading import OffloadedModel, offload_layers
from expertcast.runtime.plan import Plan, context_bytes, fits_memory
from expertcast.runtime.policies.base import check_slots
from expertcast.runtime.recording.recorder import Observer
from expertcast.runtime.storage.checkpoint_experts import ExpertSources
from expertcast.runtime.storage.layout import ExpertsForm
from expertcast.runtime.storage.store import ExpertStore

if TYPE_CHECKING:
    from expertcast.runtime.storage.disk_store import DiskStore


def load_offloaded(
    model_id: str | Path,
    config: OffloadConfig | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    observers: Sequence[Observer] = (),
    on_plan: Callable[[str], None] | None = None,
    at_once: int | None = None,
    **fields: object,
) -> OffloadedModel:
    """Load a model into its offloaded form without ever holding it whole.

    Outputs are bit-identical to :func:`expertcast.offload` of the loaded model.

    Args:
        model_id: folder or hub id of a checkpoint in safetensors, in any layout of transformers, or the path of a GGUF
            file (the first part of a split one). Quantised weights (FP8, MXFP4, GPTQ, AWQ, compressed-tensors,
            bitsandbytes, GGUF) are dequantised as transformers or the library of the form does it; with
            `experts="packed"` ggml multiplies by their blocks, and by those of the linear layers beside them.
        device: the device that computes. None: the CUDA device if there is one, else the CPU.
        dtype: `auto`, `bf16`, `fp16`, `fp32` or a torch dtype. None or `auto`: the dtype of the model's configuration,
            or for a quantised GGUF file bf16 where the processor multiplies in it, else float32.
        on_plan: called with a line about memory, slots and reads before any weight is loaded.
        at_once: most tokens of one forward, for whose activations memory is reserved; None: `context`.
        config, observers, fields: as for :func:`expertcast.offload`. Without `slots` and `memory` experts take the free
            memory, less a reserve. Experts that do not fit into memory are read from the checkpoint's own files. With
            `store="disk"` the packed experts stay in
            `store_folder`, and a later load of the same files reuses them. `fields` also takes options of
            `from_pretrained` on files and model: `revision`, `subfolder`, `token`, `cache_dir`, `local_files_only`,
            `trust_remote_code`, `gguf_file`, `attn_implementation` and others.

    Returns:
        An open offload. Its `close()` frees the experts for good, and the model refuses later forwards.

    Raises:
        ExpertcastError: no such model, no safetensors, no MoE, an incomplete checkpoint, an unsupported quantised form,
            a codec for another form, too little memory, an unknown option, dtype, device or store, or as
            :func:`expertcast.offload`.

    Example:
        >>> import expertcast
        >>> with expertcast.load_offloaded("reference", memory="20GB", dtype="bf16") as offloaded:
        ...     offloaded.model.dtype
        torch.bfloat16
    """
    check_release("offloading")
    options, own = ModelSource.split(fields, [field.name for field in dataclasses.fields(OffloadConfig)])
    config = OffloadConfig.of(config, own)
    refuse_shared(config.link, config.store, config.predictor)
    target, source = torch_device(device), ModelSource.of(model_id, options)
    wanted = dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype or "auto")
    skeleton = meta_model(source)
    form = form_of(skeleton.config, source)
    forget_quantisation(skeleton.config)
    wanted = wanted or getattr(skeleton.config, "dtype", None)
    with LOADING, open_weights(source, form, skeleton, wanted) as files:
        skeleton.to(wanted or files.dtype)
        view = find_moe_layers(skeleton)
        if config.slots is not None:
            check_slots(config.slots, view.shape.top_k, source.name)
        check_forecasters(config, view.shape, source.name)
        with one_line(source.name):
            sources = ExpertSources(skeleton, view, files, mxfp4_dequantizer(form))
            forms = packed_forms(config.resolved_experts(), sources, view, target.type)
        linear = _linear_weights(sources, files) if target.type == "cpu" else {}
        with one_line(source.name):
            linears = linear_forms(skeleton, view, linear)
        beside = _other_weights(skeleton, sources, linears) | context_bytes(
            config, skeleton.config, view, skeleton.dtype, at_once
        )
        for layer, layer_forms in zip(view, forms, strict=True):
            make_packed(layer.experts, layer.num_experts, layer_forms)
        known = files.fingerprint() if config.store_folder is not None else ""
        fingerprint = f"{known} {skeleton.dtype} transformers {transformers.__version__}"
        if forms[0]:
            by_layer = [", ".join(f"{name} {each.order}" for name, each in own.items()) for own in forms]
            fingerprint += f" {config.experts} {'; '.join(dict.fromkeys(by_layer))}"
        with one_line(source.name):
            experts_form = ExpertsForm.of(view)
        made = make_store(config, experts_form, target, fingerprint)
        reader = _Reader(sources, len(view), source.name)
        try:
            if made.name == "memory":
                made = _in_place(made, config, sources, source.name, fits=fits_memory(config, made, beside))
            made.source = reader
            if made.codec is not None:
                _choose_file(cast("DiskStore", made), config, sources, source.name)
            plan = Plan.of(
                config, made, beside, name=source.name, form=f"{_words(forms)}, computed in {skeleton.dtype}",
                loading=0 if made.holds(0) else made.layer_nbytes,
            )  # fmt: skip
            if on_plan is not None:
                on_plan(str(plan))
            config = replace(
                config, store=made, store_folder=None, in_place=False, codec="raw", experts=EXPANDED, slots=plan.slots,
                memory=None,
            )  # fmt: skip
            model = _load_others(skeleton, view, sources, files, source, linear, linears).to(target)
            # experts on the meta device: the store replaces them, and a closed model keeps them
            metas = {full: nn.Parameter(meta, requires_grad=False) for full, meta in sources.parameters.items()}
            _replace(model, metas)
            view = same_layers(view, skeleton, model)
            for layer, layer_forms in zip(view, forms, strict=True):
                make_packed(layer.experts, layer.num_experts, layer_forms)
            if put_adapter(model, source):
                view = find_moe_layers(model)  # refuses adapters on what it offloads
            return offload_layers(model, view, config, observers)
        except BaseException:
            made.close()
            raise
        finally:
            made.source = None
            reader.close()


@dataclass(slots=True)
class _Reader:
    """Reads layers for the store, with a progress bar."""

    _sources: ExpertSources
    _layers: int
    _model_id: str
    _bar: Progress | None = None

    def __call__(self, layer: int, views: dict[str, Tensor]) -> None:
        with one_line(self._model_id):
            self._sources.read_layer(layer, views)
        if self._bar is None:
            self._bar = Progress("loading experts", total=self._layers, unit="layer")
        self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _choose_file(store: DiskStore, config: OffloadConfig, sources: ExpertSources, name: str) -> None:
    """Let a store read the checkpoint's own files on request, or if the disk has no room for one of its own.

    Raises:
        ExpertcastError: the experts cannot be read in place.
    """
    full = ""
    if store.in_place is not None:
        return
    if not config.in_place:
        if store.holds(0):
            return
        try:
            store.check_room()
            return
        except ExpertcastError as error:
            if config.pools:
                raise
            full = str(error)
    from expertcast.runtime.storage.in_place import ExpertsInPlace

    try:
        with one_line(name):
            experts = ExpertsInPlace(sources, store.layout, store.layers, store.experts)
    except ExpertcastError as error:
        if not full:
            raise
        raise ExpertcastError(f"{full}; {error}") from error
    if full:
        warnings.warn(f"experts are read {experts}, without a second copy: {full}", stacklevel=3)
    store.read_in_place(experts)


def _load_others(
    skeleton: PreTrainedModel, view: MoEView, sources: ExpertSources, files: WeightFiles, source: ModelSource,
    linear: Mapping[str, TensorFile], forms: Mapping[str, BlockForm],
) -> PreTrainedModel:  # fmt: skip
    """Load everything but the experts to the CPU by transformers' own loading, and then the packed linear layers.

    transformers initialises missing weights at random. Placeholders of the right shape, whose elements share one place
    in memory, stand for the weights that it does not load.

    Args:
        skeleton, view, sources, files, source: the model without weights, its MoE layers, and where its weights are.
        linear: weights of linear layers that may stay packed, by full name.
        forms: forms of those that do, by the module's name.
    """
    state: dict[str, Tensor | TensorFile] = {other: files.tensors[other] for other in sources.others}
    absent = dict(sources.parameters)
    absent |= {sources.unconverted[f"{name}.weight"]: skeleton.get_parameter(f"{name}.weight") for name in forms}
    for full, parameter in absent.items():
        state[full] = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    model = model_of(skeleton, state, source)
    _replace(model, dict.fromkeys(sources.parameters))  # the other weights can then be moved
    with one_line(source.name):
        pack_linears(model, forms, linear, (layer.router_name for layer in view) if forms else ())
    return model


def _replace(model: PreTrainedModel, parameters: Mapping[str, nn.Parameter | None]) -> None:
    """Replace parameters by their full names."""
    for full, parameter in parameters.items():
        module, _, name = full.rpartition(".")
        model.get_submodule(module)._parameters[name] = parameter


def mxfp4_dequantizer(form: Quantised | None) -> HfQuantizer | None:
    """Return the quantizer with which transformers converts MXFP4 experts to the model's dtype; None for other ones."""
    if form is None or form.method != MXFP4:
        return None
    return AutoHfQuantizer.from_config(Mxfp4Config.from_dict({**form.settings, "dequantize": True}), pre_quantized=True)


def packed_forms(experts: str, sources: ExpertSources, view: MoEView, device: str = "cpu") -> Sequence[Forms]:
    """Return the packed forms of the experts by layer and parameter name; empty for expanded experts.

    Args:
        experts: `experts` of :class:`OffloadConfig`. `auto` packs on the CPU only.
        sources: the experts in the checkpoint.
        view: MoE layers of the model without weights.
        device: type of the device that computes.

    Raises:
        ExpertcastError: `packed`, and the checkpoint has plain floats or a form that cannot be packed.
    """
    if experts == PACKED or (experts == BY_FORM and device == "cpu"):
        try:
            forms = [{name: for_device(form, device) for name, form in own.items()} for own in sources.forms()]
        except ExpertcastError as error:
            if experts == PACKED:
                raise
            if sources.quantised:
                warnings.warn(f"experts are expanded: {error}", stacklevel=3)
            return [{}] * len(view)
        sources.as_shipped = True
        return forms
    return rounded_forms(experts, view, device)


def rounded_forms(experts: str, view: MoEView, device: str = "cpu") -> list[Forms]:
    """Return the forms of experts that are rounded, by layer and parameter name; empty for expanded experts."""
    bits, first = EXPERTS_BITS.get(experts), view[0]
    found = {} if bits is None else matrices(first.experts, first.num_experts)
    return [{name: form_for(first.experts, matrix, bits or 0, device) for name, matrix in found.items()}] * len(view)


def _linear_weights(sources: ExpertSources, files: WeightFiles) -> dict[str, TensorFile]:
    """Return the weights beside the experts that may stay packed, by full name; none beside experts in other forms."""
    return {full: files.tensors[name] for full, name in sources.unconverted.items()} if sources.as_shipped else {}


def _other_weights(
    skeleton: PreTrainedModel, sources: ExpertSources, linears: Mapping[str, BlockForm]
) -> dict[str, int]:
    packed = {f"{name}.weight" for name in linears} | sources.parameters.keys()
    others = sum(each.nbytes for name, each in skeleton.named_parameters() if name not in packed)
    return {"weights beside the experts": others + sum(form.nbytes for form in linears.values())}


def _words(forms: Sequence[Forms]) -> str:
    found = dict.fromkeys(str(form) for own in forms for form in own.values())
    return f"packed as {', '.join(found)}" if found else EXPANDED


def _in_place(memory: ExpertStore, config: OffloadConfig, sources: ExpertSources, name: str, fits: bool) -> ExpertStore:
    """Return a store of the checkpoint's own files, for experts that do not fit into memory, or lie in slots alone.

    On the CPU a store in memory beside slots for all experts is a second copy of them. The store in memory is returned
    if another option needs it, or if the experts cannot be read in place.
    """
    if config.store != "memory" or config.link != "auto" or config.latency:
        return memory
    all_in_slots = memory.device.type == "cpu" and config.slots is None and config.cache and config.bandwidth is None
    if fits and not all_in_slots:
        return memory
    form = ExpertsForm(shape=memory.shape, layout=memory.layout, model_id=name)
    disk = replace(config, store="disk", in_place=True)
    made = cast("DiskStore", make_store(disk, form, memory.device, ""))
    try:
        _choose_file(made, disk, sources, name)
    except ExpertcastError as error:
        if not fits:
            warnings.warn(f"experts stay in memory: {error}", stacklevel=3)
        return memory
    return made
