"""Measure how much there is to read: files, statements, names with several meanings, ancestors, circles.

    python benchmarks/code_size.py [CHECKOUT]

Tests and benchmarks do not count. The core is everything but the extensions, which can be deleted.
results/reference/code-size.txt holds the output at an earlier commit.
"""

from __future__ import annotations

import ast
import collections
import statistics
import sys
from pathlib import Path

PACKAGES = ("gradwire", "bench", "compressors", "collectives")
EXTENSIONS = (
    "bench/extensions/",
    "compressors/auto/",
    "compressors/kernels/triton/",
    "collectives/payloads/codec/triton.py",
    "collectives/schedule/waves.py",
)
MOST_LINES, MOST_ANCESTORS = 450, 4


def main(root: Path) -> None:
    """Print one line for each figure."""
    files = sorted(path for name in PACKAGES for path in [*root.glob(f"{name}.py"), *(root / name).rglob("*.py")])
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    statements = {path: sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) for path, tree in trees.items()}
    in_extensions = sum(
        count for path, count in statements.items() if str(path.relative_to(root)).startswith(EXTENSIONS)
    )
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    functions = [
        (node.end_lineno or 0) - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    modules = {_module_name(path.relative_to(root)): tree for path, tree in trees.items()}
    ancestors = ancestors_of_classes(modules)
    most = max(ancestors.values(), key=len)
    deepest = sorted(name.rpartition(".")[2] for name, own in ancestors.items() if len(own) == len(most))
    circles = import_circles(modules)
    for name, value in (
        ("files", len(files)),
        ("lines", sum(lines.values())),
        ("statements", sum(statements.values())),
        ("statements of the core", sum(statements.values()) - in_extensions),
        *((f"statements of {package}", _sum_below(root, package, statements)) for package in PACKAGES),
        ("lines of the median file", statistics.median(lines.values())),
        ("lines of the longest file", max(lines.values())),
        (f"files above {MOST_LINES} lines", sum(length > MOST_LINES for length in lines.values())),
        ("lines of the median function", statistics.median(functions)),
        ("names with several meanings", ", ".join(ambiguous_names(trees)) or "none"),
        ("most ancestors of ours", f"{len(most)} ({', '.join(deepest)})"),
        (f"classes with over {MOST_ANCESTORS}", sum(len(own) > MOST_ANCESTORS for own in ancestors.values())),
        ("import circles", "; ".join(" -> ".join(circle) for circle in circles) or "none"),
        ("words of the README", len((root / "README.md").read_text(encoding="utf-8").split())),
    ):
        print(f"{name:30} {value}")


def _sum_below(root: Path, package: str, statements: dict[Path, int]) -> int:
    return sum(
        count for path, count in statements.items() if path.relative_to(root).with_suffix("").parts[0] == package
    )


def ancestors_of_classes(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Return the classes of these modules, by their full names, from which each class derives, directly or not."""
    classes = {
        f"{module}.{node.name}": node
        for module, tree in modules.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    imported = {
        (module, alias.asname or alias.name): f"{node.module}.{alias.name}"
        for module, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def defined(module: str, name: str) -> str:  # a class may be imported from a module that imports it itself
        source = imported.get((module, name))
        return defined(*source.rsplit(".", 1)) if source else f"{module}.{name}"

    def bases(name: str) -> set[str]:
        module = name.rpartition(".")[0]
        plain = [base.value if isinstance(base, ast.Subscript) else base for base in classes[name].bases]
        named = [base.id for base in plain if isinstance(base, ast.Name)]
        return {defined(module, base) for base in named} & classes.keys()

    graph = {name: bases(name) for name in classes}
    return {name: _reachable(name, graph) for name in graph}


def ambiguous_names(trees: dict[Path, ast.Module]) -> list[str]:
    """Return the public classes and type names that several modules define, each with its number of definitions."""
    counts = collections.Counter(
        name for tree in trees.values() for node in tree.body for name in _defined_types(node) if name[0] != "_"
    )
    return [f"{name} ({count})" for name, count in sorted(counts.items()) if count > 1]


def _defined_types(node: ast.stmt) -> list[str]:
    """Return the class or capitalised alias that a top-level statement defines; type variables do not count."""
    if isinstance(node, ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        name = node.targets[0].id
        made_by = getattr(node.value.func, "id", "") if isinstance(node.value, ast.Call) else ""
        is_alias = isinstance(node.value, ast.Subscript | ast.BinOp | ast.Name) and name != name.upper()
        return [name] if is_alias and name[0].isupper() and made_by not in ("TypeVar", "ParamSpec") else []
    return []


def import_circles(modules: dict[str, ast.Module]) -> list[list[str]]:
    """Return the groups of modules that import each other, including imports inside functions and for types."""
    graph = {name: {found for found in _imports(tree, modules) if found != name} for name, tree in modules.items()}
    reachable = {name: _reachable(name, graph) for name in graph}
    groups = {
        tuple(sorted(other for other in graph if other in reachable[name] and name in reachable[other]))
        for name in graph
        if name in reachable[name]
    }
    return [list(group) for group in sorted(groups)]


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.Module, modules: dict[str, ast.Module]) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else node.module for name in names}
    return found & set(modules)


def _reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    queue = list(graph[start])
    while queue:
        name = queue.pop()
        if name not in seen:
            seen.add(name)
            queue += graph[name]
    return seen


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
