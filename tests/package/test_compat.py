"""Each private part of another library is there, and no module uses one that `expertcast.compat` does not list."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import expertcast
from expertcast import compat

ROOT = Path(expertcast.__file__).parent
PUBLIC = {"transformers", "transformers.generation", "transformers.quantizers", "transformers.utils"}
"""Packages of transformers whose documented names modules import directly."""
PARTS = [(module, name) for module, names in compat.PARTS.items() for name in names]
MEMBERS = [(owner, name) for owner, names in compat.MEMBERS.items() for name in names]


def test_every_part_has_one_name() -> None:
    assert len({name for _, name in PARTS}) == len(PARTS)


@pytest.mark.parametrize(("module", "name"), PARTS)
def test_part(module: str, name: str) -> None:
    pytest.importorskip(module.split(".")[0])
    if module.startswith("transformers.cli.serving"):
        pytest.importorskip("fastapi", reason="needs transformers[serving]")
    assert getattr(compat, name) is getattr(importlib.import_module(module), name)


def _owner(path: str) -> Any:
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


@pytest.mark.parametrize(("owner", "name"), MEMBERS)
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


def test_an_unknown_part_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_part"):
        compat.no_such_part  # noqa: B018


def test_type_checkers_know_every_part() -> None:
    tree = ast.parse(inspect.getsource(compat))
    typed = {
        (node.module, each.name)
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    }
    assert typed == set(PARTS)


def _trees() -> dict[str, ast.Module]:
    """The package's modules but compat, by path."""
    paths = [*ROOT.glob("*.py"), *(file for folder in ROOT.iterdir() for file in folder.rglob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths if path.name != "compat.py"}


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


def _private_uses(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Imports from undocumented modules, and private attributes that are neither known nor the standard library's."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if module.startswith("transformers") and module not in PUBLIC:
                yield f"line {node.lineno}: from {module}"
            case ast.ImportFrom(module=str(module)) if "._" in module:
                yield f"line {node.lineno}: from {module}"
            case ast.Attribute(value=ast.Name(id=owner)) if owner in sys.stdlib_module_names:
                pass
            case ast.Attribute(attr=name) if re.match(r"_[^_]", name) and name not in known:
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_no_module_uses_another_private_part() -> None:
    trees = _trees()
    known = {*_own_names(trees), *(name for _, name in MEMBERS)}
    found = [f"{path}, {use}" for path, tree in trees.items() for use in _private_uses(tree, known)]
    assert not found
