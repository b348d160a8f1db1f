"""How the code is built, in figures: lines, functions, docstrings, parameters, `Any`, and imports that run upward.

    python scripts/measure_structure.py            # the working tree
    python scripts/measure_structure.py 670e318 .  # a revision beside it

`package` is what is installed. A function's lines are those from `def` to its end, its parameters are counted without
`self`. A docstring is owed by every public module, class, function and method (no underscore in front, none nested in
a function, no override of a documented method); one of a function with four parameters or more names them all. An
upward import is one of the fewest that would have to go for the rooms of the runtime (its folders, and each module
beside them) to have an order.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

PACKAGE = ("predictors", "data", "training", "runtime", "checkpoints", "src")
BESIDE = ("scripts", "benchmarks")
LONG_FILE = 250
MANY_PARAMETERS = 8
NAMED_FROM = 4  # parameters

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class Source:
    """One Python file, its path relative to the root of the tree."""

    path: str
    lines: int
    tree: ast.Module
    text: str

    @property
    def folder(self) -> str:
        return self.path.split("/")[0]


def main() -> None:
    """Print a column per tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", default=["."], help="revisions, or . for the working tree")
    parser.add_argument("--list", action="store_true", help="name the long files, long signatures and upward imports")
    args = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    found = {tree: figures(read(root, tree)) for tree in args.trees}
    names = list(dict.fromkeys(name for column in found.values() for name in column["figures"]))
    width = max(map(len, names))
    print(" " * width, *(f"{tree:>10}" for tree in found))
    for name in names:
        print(f"{name:<{width}}", *(f"{column['figures'].get(name, 0):>10}" for column in found.values()))
    for tree, column in found.items() if args.list else ():
        print(f"\n{tree}", *(f"  {line}" for line in column["named"]), sep="\n")


def read(root: Path, tree: str) -> list[Source]:
    """The Python files that git tracks (and, in the working tree, those that it does not ignore)."""
    if tree != ".":
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "archive", tree], cwd=root, capture_output=True, check=True).stdout
            subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
            return list(_sources(Path(folder), [str(p.relative_to(folder)) for p in Path(folder).rglob("*.py")]))
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], cwd=root, capture_output=True, text=True, check=True
    )
    return list(_sources(root, listed.stdout.splitlines()))


def _sources(root: Path, paths: list[str]) -> Iterator[Source]:
    for path in sorted(paths):
        file = root / path
        through_link = any((root / parent).is_symlink() for parent in Path(path).parents)  # src/expertcast/NAME
        if path.split("/")[0] in PACKAGE + BESIDE and file.is_file() and not through_link:
            text = file.read_text()
            yield Source(path, text.count("\n"), ast.parse(text), text)


def figures(sources: list[Source]) -> dict[str, dict[str, float] | list[str]]:
    """`figures` by name, and `named`: what is behind the counts."""
    package = [source for source in sources if source.folder in PACKAGE]
    lengths = sorted((node.end_lineno or 0) - node.lineno + 1 for s in sources for node in functions(s.tree))
    long_files = [f"{s.lines:>4} {s.path}" for s in sources if s.lines > LONG_FILE]
    wide = [
        f"{count:>4} {source.path}: {node.name}"
        for source in sources
        for node in functions(source.tree)
        if (count := len(parameters(node))) >= MANY_PARAMETERS
    ]
    upward = upward_imports(package)
    owing = dict(owing_docstrings(sources))
    bare = [name for name, node in owing.items() if not ast.get_docstring(node)]
    many = {
        name: unnamed_parameters(node)
        for name, node in owing.items()
        if isinstance(node, Function) and ast.get_docstring(node) and len(parameters(node)) >= NAMED_FROM
    }
    silent = [f"{name} does not name {', '.join(missing)}" for name, missing in many.items() if missing]
    folders = {folder: [source for source in sources if source.folder == folder] for folder in (*PACKAGE, *BESIDE)}
    column: dict[str, float] = {f"lines: {name}": sum(own.lines for own in held) for name, held in folders.items()}
    column |= {
        "lines: package": sum(source.lines for source in package),
        "lines: package, of them code": sum(code_lines(source) for source in package),
        "files: runtime": sum(source.folder == "runtime" for source in sources),
        "function lines, median": statistics.median(lengths),
        "function lines, p90": lengths[int(0.9 * len(lengths))],
        "public docstrings, %": round(100 * (1 - len(bare) / len(owing)), 1),
        f"with {NAMED_FROM} parameters or more, naming all, %": round(100 * (1 - len(silent) / len(many)), 1),
        f"files over {LONG_FILE} lines": len(long_files),
        f"functions of {MANY_PARAMETERS} parameters or more": len(wide),
        "uses of Any": sum(
            isinstance(node, ast.Name) and node.id == "Any" for s in package for node in ast.walk(s.tree)
        ),
        "upward imports in runtime": len(upward),
    }
    named = [*long_files, *wide, *(f"   ^ {line}" for line in upward), *(f"     {name}" for name in (*bare, *silent))]
    return {"figures": column, "named": named}


def code_lines(source: Source) -> int:
    """Lines that are neither blank, comments, imports nor texts that stand for themselves, as docstrings do."""
    lines = enumerate(map(str.strip, source.text.splitlines()), 1)
    left = {number for number, line in lines if line and not line.startswith("#")}
    for node in ast.walk(source.tree):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if text or isinstance(node, ast.Import | ast.ImportFrom):
            left.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(left)


def functions(tree: ast.AST) -> list[Function]:
    """Every function and method, nested ones included."""
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def parameters(node: Function) -> list[str]:
    """Parameters but `self` and `cls`; `*args` and `**kwargs` count as one each."""
    given = node.args
    names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    names += [arg.arg for arg in (given.vararg, given.kwarg) if arg is not None]
    return [name for name in names if name not in ("self", "cls")]


def owing_docstrings(sources: list[Source]) -> Iterator[tuple[str, ast.Module | ast.ClassDef | Function]]:
    """Everything public by name; overrides of methods that some class documents need not say it again."""
    classes = [node for source in sources for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]
    documented = {
        each.name for node in classes for each in node.body if isinstance(each, Function) and ast.get_docstring(each)
    }
    for source in sources:
        yield source.path, source.tree
        for node in source.tree.body:
            yield from _public(node, source.path, frozenset())
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                for each in node.body:
                    yield from _public(each, f"{source.path}: {node.name}", documented if node.bases else frozenset())


def _public(node: ast.stmt, where: str, inherited: Set[str]) -> Iterator[tuple[str, ast.ClassDef | Function]]:
    if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
        return
    if ast.get_docstring(node) or node.name not in inherited:
        yield f"{where}: {node.name}", node


def unnamed_parameters(node: Function) -> list[str]:
    """Parameters that the docstring does not mention."""
    words = set(re.findall(r"\w+", ast.get_docstring(node) or ""))
    return [name for name in parameters(node) if name not in words]


def upward_imports(package: list[Source]) -> list[str]:
    """Import statements between rooms of the runtime that no order of the rooms allows: the fewest there can be."""
    edges: dict[tuple[str, str], list[str]] = defaultdict(list)
    for source in package:
        if source.folder != "runtime" or source.path == "runtime/__init__.py":
            continue
        for target in _runtime_imports(source.tree):
            pair = source.path.removesuffix(".py").split("/")[1], target[0]
            if pair[0] != pair[1]:
                edges[pair].append(f"{source.path} imports {'.'.join(target)}")
    lines: list[str] = []
    for rooms in _tangles(edges):
        order = _best_order(rooms, edges)
        for (one, other), names in edges.items():
            if one in rooms and other in rooms and order.index(one) < order.index(other):
                lines += names
    return sorted(lines)


def _runtime_imports(tree: ast.Module) -> Iterator[list[str]]:
    """Modules of the runtime that a file imports when it runs; what only a type checker sees does not count."""
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in hidden:
            parts = node.module.split(".")
            if parts[:2] == ["expertcast", "runtime"]:
                yield parts[2:] or [alias.name for alias in node.names][:1]


def _tangles(edges: dict[tuple[str, str], list[str]]) -> list[frozenset[str]]:
    """Groups of rooms that reach each other."""
    rooms = sorted({room for pair in edges for room in pair})
    reach = {room: {room} for room in rooms}
    for _ in rooms:
        for one, other in edges:
            reach[one] |= reach[other]
    groups = {frozenset(o for o in rooms if o in reach[room] and room in reach[o]) for room in rooms}
    return sorted((group for group in groups if len(group) > 1), key=sorted)


def _best_order(rooms: frozenset[str], edges: dict[tuple[str, str], list[str]]) -> list[str]:
    """Rooms from the bottom up with the fewest imports against it: exact, over all subsets that can lie below."""
    names = sorted(rooms)
    weight = [[len(edges.get((one, other), ())) for other in names] for one in names]
    everything = (1 << len(names)) - 1
    best: dict[int, tuple[int, int]] = {0: (0, -1)}
    """Fewest upward imports among the rooms of a mask when they lie at the bottom, and the room on top of them."""
    for mask in range(1, everything + 1):
        options = []
        for top in range(len(names)):
            if mask >> top & 1:
                below = mask ^ (1 << top)
                cost = sum(weight[low][top] for low in range(len(names)) if below >> low & 1)
                options.append((best[below][0] + cost, top))
        best[mask] = min(options)
    order, mask = [], everything
    while mask:
        top = best[mask][1]
        order.append(names[top])
        mask ^= 1 << top
    return order[::-1]


if __name__ == "__main__":
    main()
