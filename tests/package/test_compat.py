"""Private and undocumented parts of other libraries that expertcast uses: each is there, and members are listed.

All parts were checked with torch 2.13.0 and transformers 5.23.0. A new release of either may change any of them without
notice: run this file alone against it with ``--noconftest``, which reports all missing parts instead of stopping at the
first failed import.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
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
        "_weight_int8pack_mm": "Product of a few rows with a map in int8 (predictors.folded).",
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
        "_get_mkldnn_enabled": "Reads the setting below (data.machine).",
        "_get_tracing_state": "Suspends a trace, with the setter below (data.tracing, predictors.view).",
        "_jit_pass_dce": "Removes unused operations of a graph (data.tracing).",
        "_set_graph_executor_optimize": "Runs a program without recompiling it for each shape (data.tracing).",
        "_set_mkldnn_enabled": "Runs one product without oneDNN (data.machine).",
        "_set_tracing_state": "Suspends and resumes a trace (data.tracing, predictors.view).",
    },
    "torch.nn:Module": {
        "_buffers": "Replaces a buffer without checks (data.skeleton).",
        "_forward_hooks": "Whether a layer is observed, with the next (data.packed_attention).",
        "_forward_pre_hooks": "Whether a layer is observed (data.packed_attention).",
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
        "_get_logits_processor": "Makes the logits processors of a request (serving.parameters).",
        "_optimize_model_for_decode": "Context in which `generate` runs its decode steps (drafts, engine.kernels).",
        "_prefill": "Runs the prompt as `generate` does (drafts.decoding).",
    },
    "transformers:PreTrainedModel": {
        "_can_record_outputs": "Says which class is the router (data.moe_layers).",
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
    "transformers.utils.output_capturing": {
        "_active_collector": "Whether a call gathers outputs, else its hooks do nothing (data.packed_attention).",
    },
}
"""By module, or by module and class, the private members that modules read, with their use."""


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


TREES = _trees()
PARTS = {
    (node.module, each.name)
    for tree in TREES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.ImportFrom) and node.module and not node.level
    if "._" in node.module or (node.module.split(".")[0] in ("torch", "transformers") and node.module not in PUBLIC)
    for each in node.names
}
"""Modules of torch and undocumented ones of transformers, with the names that are imported from them."""


@pytest.mark.parametrize(("module", "name"), sorted(PARTS))
def test_part(module: str, name: str) -> None:
    if module.startswith("transformers.cli.serving"):
        pytest.importorskip("fastapi", reason="needs transformers[serving]")
    assert hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}")


def _private_members(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Private attributes that are neither known nor the standard library's."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=owner)) if owner in sys.stdlib_module_names:
                pass
            case ast.Attribute(attr=name) if re.match(r"_[^_]", name) and name not in known:
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_no_module_uses_another_private_member() -> None:
    known = {*_own_names(TREES), *(name for names in MEMBERS.values() for name in names)}
    assert not [f"{path}, {use}" for path, tree in TREES.items() for use in _private_members(tree, known)]
