"""The registry: which components exist, found without importing any of them.

A room is a package; a component is a file in it with one top-level class that derives (directly or through a class of
the same folder or of its `families/`) from the room's base class and is named after the file: ``group_topk.py`` holds
``GroupTopK``. Names and one-line descriptions are read with ``ast``, so listing and completing names costs milliseconds
and no torch. Third parties add components by entry point (group ``bench.compressors``, ``bench.collectives``, ...).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import threading
from pathlib import Path

from bench.core.errors import UsageError
from collectives.options import Options, did_you_mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """One kind of component: where its files lie and which base class they derive from."""

    kind: str
    package: str
    base: str

    @property
    def singular(self) -> str:
        """``compressors`` -> ``compressor``, ``strategies`` -> ``strategy``."""
        return self.kind.removesuffix("ies") + "y" if self.kind.endswith("ies") else self.kind.removesuffix("s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A component's name, its one-line description and where its class is found (``module:Class``)."""

    name: str
    description: str
    target: str


ROOMS = {
    room.kind: room
    for room in (
        Room(kind="compressors", package="compressors", base="Compressor"),
        Room(kind="collectives", package="collectives", base="Collective"),
        Room(kind="strategies", package="bench.strategies", base="Strategy"),
        Room(kind="optimizers", package="bench.optimizers", base="Optimizer"),
        Room(kind="models", package="bench.models", base="Model"),
        Room(kind="datasets", package="bench.datasets", base="Dataset"),
    )
}

# CPython 3.11 counts the depth of all parses in one place and fails where two threads parse at once.
_PARSER = threading.Lock()


@functools.cache
def entries(kind: str) -> dict[str, Entry]:
    """All components of one kind, by name and sorted; built-in ones win over entry points of the same name."""
    room = ROOMS[kind]
    found = {
        point.name: Entry(
            name=point.name,
            description=f"(from {point.dist.name} {point.dist.version})" if point.dist else "(entry point)",
            target=point.value,
        )
        for point in importlib.metadata.entry_points(group=f"bench.{kind}")
    }
    found.update(_built_in(room))
    return dict(sorted(found.items()))


def load(kind: str, name: str) -> type[Options]:
    """Import a component's class.

    Raises:
        UsageError: no component of that name (the message names the nearest one and how to list them).
    """
    known = entries(kind)
    if name not in known:
        raise UsageError(
            f"there is no {ROOMS[kind].singular} '{name}'{did_you_mean(name, known)}; "
            f"`bench list {kind}` shows them all"
        )
    module, _, attribute = known[name].target.partition(":")
    component: type[Options] = getattr(importlib.import_module(module), attribute)
    component.component_name = name  # an entry point may name a class otherwise than its file does
    return component


def _built_in(room: Room) -> dict[str, Entry]:
    classes: dict[str, list[str]] = {}  # class name -> names of its bases, over all files of the room
    files: dict[str, tuple[str, str]] = {}  # class name -> (module name, first line of the module's docstring)
    folder = _folder(room.package)
    for path in sorted([*folder.glob("*.py"), *folder.glob("families/*.py")]):
        with _PARSER:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = [_last_name(base) for base in node.bases]
                if (
                    path.parent == folder
                    and not path.stem.startswith("_")
                    and node.name.lower() == path.stem.replace("_", "")
                ):
                    files[node.name] = (path.stem, (ast.get_docstring(tree) or "").partition("\n")[0])
    return {
        stem: Entry(name=stem, description=line, target=f"{room.package}.{stem}:{name}")
        for name, (stem, line) in files.items()
        if _derives(name, room.base, classes)
    }


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"the package {package} is not installed; run `make setup`")
    return Path(spec.submodule_search_locations[0])


def _last_name(base: ast.expr) -> str:
    if isinstance(base, ast.Subscript):
        base = base.value
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def _derives(name: str, base: str, classes: dict[str, list[str]]) -> bool:
    return any(parent == base or _derives(parent, base, classes) for parent in classes.get(name, []))
