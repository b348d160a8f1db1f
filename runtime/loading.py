"""expertcast.load_offloaded: a model straight from its files into its offloaded form, one layer at a time.

At no time does the host hold more than the experts' blocks, a few experts on their way there, and everything else
of the model once (until it is on its device).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationConfig, Mxfp4Config, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer

from expertcast.data.discovery import find_moe_layers
from expertcast.data.memory import available_memory
from expertcast.data.models import first_line, meta_model, resolve_model, torch_device, torch_dtype
from expertcast.data.quantisation import FP8, MXFP4, forget_quantisation, quantisation_settings, shipped_form
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.progress import Progress
from expertcast.runtime.arguments import slot_count
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.offloaded import OffloadedModel
from expertcast.runtime.offloading import offload
from expertcast.runtime.recording.observer import Observer
from expertcast.runtime.storage.checkpoint_files import SafetensorsFiles, TensorFile
from expertcast.runtime.storage.coded_store import CodedStore
from expertcast.runtime.storage.expert_sources import ExpertSources
from expertcast.runtime.storage.fp8_tensors import join_scales
from expertcast.runtime.storage.shipped_experts import Shipped, ShippedExperts
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.transport import make_store


def load_offloaded(
    model_id: str | Path,
    config: OffloadConfig | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    observers: Sequence[Observer] = (),
    **fields: object,
) -> OffloadedModel:
    """Load a model into its offloaded form without ever holding it whole.

    What :func:`expertcast.offload` of the loaded model computes, this computes bit for bit.

    Args:
        model_id: folder or hub id of a checkpoint in safetensors, of any layout that transformers reads. What is in
            FP8 (by blocks, rows or tensors) or MXFP4 (gpt-oss) is dequantised as transformers dequantises it; experts,
            with `store="disk"` and `codec="fp8"` or `"mxfp4"`, only when they arrive.
        device: where the model computes. None: the CUDA device where there is one, else the CPU.
        dtype: `auto`, `bf16`, `fp16`, `fp32` or a torch dtype. None is `auto`: what the model's configuration says.
        config, observers, fields: as for :func:`expertcast.offload`. With `store="disk"` the packed experts are kept in
            `store_folder`: a later load of the same files finds them there and reads no expert again.

    Returns:
        An open offload. Its `close()` frees the experts for good: the model refuses forwards from then on.

    Raises:
        ExpertcastError: no such model, no safetensors, no MoE, an incomplete checkpoint or one in another quantised
            form, a codec for another form, not enough memory, an unknown dtype, device or store, or what
            :func:`expertcast.offload` refuses.
    """
    config = OffloadConfig.of(config, fields)
    target, name = torch_device(device), str(model_id)
    wanted = dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype or "auto")
    skeleton = meta_model(name)
    form, settings = shipped_form(skeleton.config, name), quantisation_settings(skeleton.config) or {}
    forget_quantisation(skeleton.config)
    with SafetensorsFiles(resolve_model(name)) as files:
        if form == FP8:
            files.tensors = join_scales(files.tensors, settings.get("weight_block_size"))
        configured = getattr(skeleton.config, "dtype", None) or files.dtype
        skeleton.to(configured if wanted is None else wanted)
        view = find_moe_layers(skeleton)
        sources = ExpertSources(skeleton, view, files, _mxfp4_dequantizer(settings) if form == MXFP4 else None)
        shipped = _as_shipped(config, sources, len(view), form, name)
        if shipped is not None and config.codec == form:
            config = replace(config, codec=shipped.codec)
        model = _load_others(skeleton, sources, files, name).to(target)
        # experts without weights: what the store takes the place of, and what a closed model is left with
        _replace(model, {full: nn.Parameter(meta, requires_grad=False) for full, meta in sources.parameters.items()})
        fingerprint = f"{files.fingerprint()} {skeleton.dtype} transformers {transformers.__version__}"
        made = make_store(config, view, target, fingerprint)
        reader = _Reader(sources, len(view), name, shipped)
        try:
            made.source = reader
            if shipped is not None and isinstance(made, CodedStore):
                made.shipped = reader.shipped
            _check_memory(made, slot_count(config, view) if target.type == "cpu" else 0)
            return offload(model, replace(config, store=made, store_folder=None, codec="raw"), observers=observers)
        except BaseException:
            made.close()
            raise
        finally:
            made.source = None
            if isinstance(made, CodedStore):
                made.shipped = None
            reader.close()


@dataclass(slots=True)
class _Reader:
    """Reads layers for the store, with a progress bar."""

    _sources: ExpertSources
    _layers: int
    _model_id: str
    _shipped: ShippedExperts | None
    _bar: Progress | None = None

    def __call__(self, layer: int, views: dict[str, Tensor]) -> None:
        with self._one_line():
            self._sources.read_layer(layer, views)
        self._step()

    def shipped(self, layer: int, expert: int) -> Shipped:
        """One expert as its checkpoint ships it; called from several threads."""
        assert self._shipped is not None
        with self._one_line():
            read = self._shipped.expert(layer, expert)
        if expert == 0:
            self._step()
        return read

    @contextmanager
    def _one_line(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            if isinstance(error, ExpertcastError):
                raise
            raise _failure(self._model_id, error) from error

    def _step(self) -> None:
        if self._bar is None:
            self._bar = Progress("loading experts", total=self._layers, unit="layer")
        self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _load_others(
    skeleton: PreTrainedModel, sources: ExpertSources, files: SafetensorsFiles, name: str
) -> PreTrainedModel:
    """The model with everything but its experts, on the CPU, by transformers' own loading.

    transformers fills in at random what a checkpoint lacks. So it is given the experts too: tensors of the right
    shape in which every element is the same one in memory.
    """
    state: dict[str, Tensor | TensorFile] = {other: files.tensors[other] for other in sources.others}
    for full, parameter in sources.parameters.items():
        state[full] = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    try:
        model = type(skeleton).from_pretrained(None, config=skeleton.config, state_dict=state, dtype=skeleton.dtype)
        model.generation_config = _generation_config(resolve_model(name))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _failure(name, error) from error
    model.config._name_or_path = name
    _replace(model, dict.fromkeys(sources.parameters))  # so that the rest can be moved
    loaded: PreTrainedModel = model.eval()
    return loaded


def _replace(model: PreTrainedModel, parameters: Mapping[str, nn.Parameter | None]) -> None:
    """Put something else in the place of some parameters, given by their full names."""
    for full, parameter in parameters.items():
        module, _, name = full.rpartition(".")
        model.get_submodule(module)._parameters[name] = parameter


def _generation_config(path: str) -> GenerationConfig:
    """As `from_pretrained` finds it: in its own file, else in the model's configuration."""
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return GenerationConfig.from_pretrained(path, config_file_name="config.json", _from_model_config=True)


def _mxfp4_dequantizer(settings: Mapping[str, Any]) -> HfQuantizer:
    """What has transformers' conversions turn MXFP4 experts into the model's dtype."""
    return AutoHfQuantizer.from_config(Mxfp4Config.from_dict({**settings, "dequantize": True}), pre_quantized=True)


def _as_shipped(
    config: OffloadConfig, sources: ExpertSources, layers: int, form: str | None, name: str
) -> ShippedExperts | None:
    """The experts in the form in which they are shipped, where the codec is of that form; None: they are converted."""
    codec = config.store.codec.name if isinstance(config.store, CodedStore) else config.codec.partition(":")[0]
    if codec == form:
        return ShippedExperts(sources, layers, codec)
    if codec == FP8 or (codec == MXFP4 and form is not None):
        raise ExpertcastError(
            f"codec {codec!r} moves experts as a checkpoint in {codec} ships them, and {name!r} "
            f"{'is not quantised' if form is None else f'is shipped in {form}'}: choose codec 'raw' or 'bitsplit'"
        )
    return None


def _check_memory(store: ExpertStore, slots: int) -> None:
    """
    Args:
        store: that is about to be filled.
        slots: that will lie in host memory.
    """
    available = available_memory()
    if available is None:
        return
    experts, own = store.nbytes if store.name == "memory" else 0, slots * store.layout.block_bytes
    if experts > available:
        raise ExpertcastError(
            f"the experts need {experts} bytes of host memory and {available} are available: use store='disk' "
            "(--store-folder)"
        )
    if experts + own > available:
        beside = f" beside the experts' {experts}" if experts else ""
        remedy = "store='disk'" if experts else "a smaller memory="
        raise ExpertcastError(
            f"{slots} slots need {own} bytes of host memory{beside} and {available} are available: give fewer slots, "
            f"or {remedy}"
        )


def _failure(name: str, error: Exception) -> ExpertcastError:
    return ExpertcastError(f"cannot load model {name!r}: {first_line(error)}")
