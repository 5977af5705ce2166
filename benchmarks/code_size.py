"""Measure how much there is to read: files, statements, lengths, names with several meanings, import circles, README.

    python benchmarks/code_size.py [CHECKOUT]

Tests and benchmarks do not count. The spine is everything outside bench/extensions and compressors/auto.
"""

from __future__ import annotations

import ast
import collections
import statistics
import sys
from pathlib import Path

PACKAGES = ("bench", "compressors", "collectives")
EXTENSIONS = ("bench/extensions/", "compressors/auto/")


def main(root: Path) -> None:
    """Print one line for each figure."""
    files = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    statements = {path: sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) for path, tree in trees.items()}
    in_extensions = sum(
        count for path, count in statements.items() if str(path.relative_to(root)).startswith(EXTENSIONS)
    )
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in files]
    functions = [
        (node.end_lineno or 0) - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    circles = import_circles(root, trees)
    for name, value in (
        ("files", len(files)),
        ("lines", sum(lines)),
        ("statements", sum(statements.values())),
        ("statements of the spine", sum(statements.values()) - in_extensions),
        ("lines of the median file", statistics.median(lines)),
        ("lines of the longest file", max(lines)),
        ("lines of the median function", statistics.median(functions)),
        ("names with several meanings", ", ".join(ambiguous_names(trees)) or "none"),
        ("import circles", "; ".join(" -> ".join(circle) for circle in circles) or "none"),
        ("words of the README", len((root / "README.md").read_text(encoding="utf-8").split())),
    ):
        print(f"{name:30} {value}")


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


def import_circles(root: Path, trees: dict[Path, ast.Module]) -> list[list[str]]:
    """Return the groups of modules that import each other, including imports inside functions and for types."""
    modules = {_module_name(path.relative_to(root)): tree for path, tree in trees.items()}
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
