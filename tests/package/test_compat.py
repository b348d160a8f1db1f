"""Private and undocumented parts of other libraries that expertcast uses: each is there, and no module uses another.

All parts were checked with torch 2.13.0 and transformers 5.23.0. A new release of either may change any of them without
notice: run this file alone against it with ``--noconftest``, which reports all missing parts instead of stopping at the
first failed import.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import expertcast

ROOT = Path(expertcast.__file__).parent
PUBLIC = {"transformers", "transformers.generation", "transformers.quantizers", "transformers.utils"}
"""Packages of transformers whose documented names modules import directly."""

PARTS: Mapping[str, Mapping[str, str]] = {
    "torch.fx.experimental": {
        "_config": "Lets a model on the meta device run code that searches its mask for values (data.moe_layers).",
    },
    "torch.jit._trace": {"TracerWarning": "Shows that a trace depends on a tensor's values (data.tracing)."},
    "torch.utils._python_dispatch": {
        "TorchDispatchMode": "Follows every tensor operation of a probing forward (data.moe_layers).",
    },
    "transformers.cache_utils": {
        "DynamicSlidingWindowLayer": "Cache layer that early attention may copy without cloning (data.early).",
        "LinearAttentionCacheLayerMixin": "Cache layers with recurrent states, which drafts roll back (drafts.cache).",
        "MtpCache": "Cache of a model's multi-token prediction heads (drafts.proposals).",
    },
    "transformers.cli.serving.chat_completion": {"ChatCompletionHandler": "Base of /v1/chat/completions (serving)."},
    "transformers.cli.serving.completion": {"CompletionHandler": "Base of /v1/completions (serving)."},
    "transformers.cli.serving.response": {"ResponseHandler": "Base of /v1/responses (serving)."},
    "transformers.cli.serving.utils": {
        "BaseHandler": "Base of all handlers of requests (serving).",
        "CBGenerateManager": "Base of the manager with continuous batching (serving).",
        "CBStreamer": "Stream of one request in a batch (serving).",
        "CBWorkerDeadError": "Raised when the batching thread has died (serving).",
        "DirectStreamer": "Stream of a request that runs alone (serving).",
        "GenerateManager": "Base of the manager that runs one request at a time (serving).",
        "Modality": "Names text models (serving).",
        "ReasoningText": "A piece of a stream that is reasoning (serving).",
        "_GenerationCancelled": "Ends a stream whose client has left (serving).",
        "_StreamError": "Carries an error through a stream (serving).",
    },
    "transformers.conversion_mapping": {
        "get_model_conversion_mapping": "Conversions from a checkpoint's tensors to parameters (checkpoint_experts).",
    },
    "transformers.core_model_loading": {
        "WeightRenaming": "Conversion that changes names only (checkpoint_experts, weights.gguf).",
        "dot_natural_key": "Order of tensor names, numbers by value (weights.files).",
        "rename_source_key": "Parameter name of a checkpoint's tensor (checkpoint_experts, weights.gguf).",
    },
    "transformers.dynamic_module_utils": {
        "TRANSFORMERS_DYNAMIC_MODULE_NAME": "Package of model classes that come with a checkpoint (data.skeleton).",
    },
    "transformers.generation.continuous_batching.cb_logits_processors": {
        "ContinuousBatchingLogitsProcessor": "Base of the sampler for batches (serving).",
    },
    "transformers.generation.continuous_batching.requests": {
        "FutureRequestState": "A request as the sampler for batches receives it (serving).",
    },
    "transformers.integrations.finegrained_fp8": {"Fp8Dequantize": "Formula for FP8 experts (weights.packed)."},
    "transformers.integrations.gguf": {
        "get_gguf_conversion_mapping": "Conversions from GGUF tensors to parameters (weights.gguf).",
        "is_gguf_arch_supported": "Whether transformers reads a GGUF architecture (weights.gguf).",
    },
    "transformers.integrations.gguf.dequant": {
        "GGML_BLOCK": "Block sizes of GGUF types (weights.gguf, packed_experts)."
    },
    "transformers.integrations.gguf.kernels": {
        "dequantize_blocks": "Decodes GGUF blocks (weights.gguf, packed_experts)."
    },
    "transformers.integrations.moe": {
        "ALL_EXPERTS_FUNCTIONS": "Registry of experts' forwards, to which expertcast adds its own (data, engine).",
        "batched_mm_experts_forward": "transformers' kernel for few tokens (engine.kernels).",
        "grouped_mm_experts_forward": "transformers' kernel for many tokens (data.experts, engine).",
    },
    "transformers.integrations.mxfp4": {"Mxfp4Dequantize": "Decodes MXFP4 experts (checkpoint_experts)."},
    "transformers.modeling_gguf_pytorch_utils": {
        "TENSOR_PROCESSORS": "Changes of values by GGUF architecture (weights.gguf).",
        "TensorProcessor": "Base of these changes (weights.gguf).",
        "get_gguf_hf_weights_map": "Names of GGUF tensors in transformers (weights.gguf).",
    },
    "transformers.modeling_layers": {"MtpModel": "A model's multi-token prediction heads (drafts.proposals)."},
    "transformers.utils.hub": {"get_checkpoint_shard_files": "Local paths of a checkpoint's files (weights.files)."},
    "transformers.utils.output_capturing": {
        "_active_collector": "Context variable that turns the gathering of outputs off (data.taps).",
    },
}
"""By module, the names that modules import, with their use."""

MEMBERS: Mapping[str, Mapping[str, str]] = {
    "argparse:ArgumentParser": {
        "_actions": "Options of a command, for suggestions (cli).",
        "_option_string_actions": "Options by their strings (cli).",
        "_subparsers": "Whether the parser has commands (cli).",
    },
    "gguf.gguf_reader:GGUFReader": {
        "_get_field_parts": "Reads an array of a header, replaced for vocabularies (weights.gguf).",
        "_push_field": "Keeps a field of a header (weights.gguf).",
    },
    "torch": {
        "_grouped_mm": "The product inside transformers' kernel, replaced by one that skips empty groups (kernels).",
    },
    "torch._ops:OpOverload": {"_schema": "Whether an operation returns a view (data.moe_layers)."},
    "torch.cpu": {
        "_is_amx_tile_supported": "Whether the processor multiplies in bf16 (data.machine).",
        "_is_avx512_bf16_supported": "Whether the processor multiplies in bf16 (data.machine).",
    },
    "torch:Tensor": {"_base": "Tensor that a view was made of (data.moe_layers)."},
    "torch._C": {
        "_create_function_from_graph": "Makes a program of a traced graph (data.tracing).",
        "_create_graph_by_tracing": "Traces a function (data.tracing).",
        "_get_graph_executor_optimize": "Reads the setting below (data.tracing).",
        "_get_tracing_state": "Suspends a trace, with the setter below (data.tracing, predictors.view).",
        "_jit_pass_dce": "Removes unused operations of a graph (data.tracing).",
        "_set_graph_executor_optimize": "Runs a program without recompiling it for each shape (data.tracing).",
        "_set_tracing_state": "Suspends and resumes a trace (data.tracing, predictors.view).",
    },
    "torch.nn:Module": {
        "_buffers": "Replaces a buffer without checks (data.skeleton).",
        "_call_impl": "Finds running forwards on a thread's stack (engine.front).",
        "_parameters": "Replaces experts' parameters by slot views without checks (data, engine, storage).",
    },
    "torch.ops:aten": {
        "_to_copy": "Operation behind a change of dtype or device (data.moe_layers).",
        "_unsafe_view": "Operation behind a reshape (data.moe_layers).",
    },
    "torch.ops:mkldnn": {"_is_mkldnn_bf16_supported": "Whether oneDNN multiplies in bf16 here (data.packed_experts)."},
    "tqdm:tqdm": {"_instances": "Progress bars that an error left open (predictors.messages)."},
    "transformers:AutoModelForCausalLM": {"_model_mapping": "Whether a class loads a configuration (data.models)."},
    "transformers:GenerationConfig": {
        "_eos_token_tensor": "Ids that end a sequence, on the model's device (drafts).",
        "_pad_token_tensor": "Id of padding, on the model's device (drafts.decoding).",
    },
    "transformers:PreTrainedConfig": {
        "_attn_implementation": "Name of the attention function (data.early).",
        "_experts_implementation": "Name of the experts' forward (data.packed_experts, drafts, engine.front).",
    },
    "transformers:GenerationMixin": {
        "_get_candidate_generator": "Makes an assistant model's draft (drafts.proposals).",
        "_get_logits_processor": "Makes the logits processors of a request (serving.parameters).",
        "_optimize_model_for_decode": "Context in which `generate` runs its decode steps (drafts, engine.kernels).",
        "_prefill": "Runs the prompt as `generate` does (drafts.decoding).",
    },
    "transformers:PreTrainedModel": {
        "_can_record_outputs": "Says which class is the router (data.moe_layers).",
        "_init_weights": "Initialises random benchmark models (benchmarking.shapes).",
        "_is_stateful": "Whether a model has recurrent states (drafts.proposals).",
    },
    "transformers.cli.serving.completion:CompletionHandler": {
        "_non_streaming": "Answers a request at once (serving.handlers).",
        "_streaming": "Answers a request token by token (serving.handlers).",
        "_valid_params_class": "Fields that a request may have (serving.handlers).",
    },
    "transformers.cli.serving.response:ResponseHandler": {
        "_normalize_input": "Chat of an input (serving.handlers).",
        "_normalize_tools": "Tools in the form of chats (serving.handlers).",
    },
    "transformers.cli.serving.utils:CBGenerateManager": {"_cb_config": "Settings of continuous batching (serving)."},
    "transformers.generation.continuous_batching.continuous_api:OutputRouter": {
        "_lock": "Guards the callbacks of requests, from which cancelled ones are removed (serving).",
    },
    "transformers.integrations.finegrained_fp8:Fp8Dequantize": {
        "_dequantize_one": "Decodes one FP8 matrix (weights.packed).",
    },
    "transformers.integrations.moe": {
        "_apply_gate": "Activation of gated experts (data.experts, data.packed_experts).",
        "_grouped_linear": "Projection inside transformers' kernel, replaced while it runs on slots (engine.kernels).",
        "_grouped_mm": "Product inside this projection, replaced as well (engine.kernels).",
        "_is_expert_parallel": "Marks modules of experts (data.moe_layers, engine.kernels).",
    },
}
"""By module, or by module and class, the private members that other modules read in place, with their use."""


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in PARTS.items() for name in names])
def test_part(module: str, name: str) -> None:
    pytest.importorskip(module.split(".")[0])
    if module.startswith("transformers.cli.serving"):
        pytest.importorskip("fastapi", reason="needs transformers[serving]")
    assert hasattr(importlib.import_module(module), name)


def _owner(path: str) -> Any:
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in MEMBERS.items() for name in names])
def test_member(owner: str, name: str) -> None:
    """It is an attribute, or the library's source sets it."""
    if ".cli.serving" in owner:
        pytest.importorskip("fastapi", reason="needs transformers[serving]")
    found = _owner(owner)
    if hasattr(found, name):
        return
    if name in {"_eos_token_tensor", "_pad_token_tensor"}:  # `generate` sets them on a copy of the settings
        found = importlib.import_module("transformers.generation.utils")
    assert re.search(rf"\b{name}\b", inspect.getsource(found)), f"{owner} has no {name} any more"


def _trees() -> dict[str, ast.Module]:
    """The package's modules, by path."""
    paths = [*ROOT.glob("*.py"), *(file for folder in ROOT.iterdir() for file in folder.rglob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def _own_names(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Names that the package defines itself."""
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _is_private(module: str) -> bool:
    return (module.startswith("transformers") and module not in PUBLIC) or "._" in module or module in PARTS


def _private_uses(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Imports from undocumented modules, and private attributes that are neither known nor the standard library's."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if _is_private(module):
                for each in names:
                    if each.name not in PARTS.get(module, ()):
                        yield f"line {node.lineno}: {each.name} from {module}"
            case ast.Attribute(value=ast.Name(id=owner)) if owner in sys.stdlib_module_names:
                pass
            case ast.Attribute(attr=name) if re.match(r"_[^_]", name) and name not in known:
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_no_module_uses_another_private_part() -> None:
    trees = _trees()
    known = {*_own_names(trees), *(name for names in MEMBERS.values() for name in names)}
    found = [f"{path}, {use}" for path, tree in trees.items() for use in _private_uses(tree, known)]
    assert not found
