"""Find and show what commands other than `bench run` have written, such as the folder of a decision.

Packages add kinds by entry points of the group ``bench.artifacts``. The commands that show or repeat results ask these
kinds, so they need not know what there is besides runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.core import registry
from bench.core.errors import NothingToCompare, UsageError
from bench.core.files import files_below
from bench.report.store import matching

if TYPE_CHECKING:
    from bench.report.page import Page
    from bench.report.plots.style import Picture
    from bench.report.tables import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Artifact:
    """A folder or file that a command has written.

    Attributes:
        path: the folder or file.
        status: what became of it, in one word, such as "ok" or "unfinished".
        command: the command line that wrote it; empty if it is unknown.
    """

    path: Path
    status: str
    command: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Views:
    """The functions that show an artifact; each takes its path.

    Attributes:
        page: returns the contents of its report.
        pictures: returns its pictures by name.
        table: returns its table, which also holds its answer in words.
    """

    page: Callable[[Path], Page]
    pictures: Callable[[Path], Mapping[str, Picture]]
    table: Callable[[Path], Table]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArtifactKind:
    """One kind of artifact.

    Attributes:
        name: the kind in one word, such as "decision".
        marker: file name of every artifact of this kind, or of a file in its folder; it may be a glob pattern.
        read: describes the artifact at a path whose name, or a file in which, matches `marker`; returns None if it is
            something else.
        again: returns the arguments of `bench` that repeat an artifact; it raises ``UsageError`` if none do.
        views: what shows artifacts of this kind; None if nothing does.
    """

    name: str
    marker: str
    read: Callable[[Path], Artifact | None]
    again: Callable[[Path], list[str]]
    views: Views | None = None

    def at(self, path: Path) -> Artifact | None:
        """Return the artifact of this kind at a path, or None if there is none."""
        is_marked = any(path.glob(self.marker)) if path.is_dir() else path.match(self.marker)
        return self.read(path) if is_marked else None


@functools.cache
def kinds() -> tuple[ArtifactKind, ...]:
    """Return all kinds of artifacts that installed packages add."""
    return tuple(registry.load_plugins("artifacts", ArtifactKind))


def at(path: Path) -> tuple[ArtifactKind, Artifact] | None:
    """Return the artifact at a path with its kind, or None if there is none."""
    return next(((kind, found) for kind in kinds() if (found := kind.at(path))), None)


def artifacts_in(folder: Path) -> list[tuple[ArtifactKind, Artifact]]:
    """Return the artifact that a folder is, and those that lie directly in it, with their kinds."""
    inside = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")] if folder.is_dir() else []
    return [found for path in (folder, *inside) if (found := at(path))]


def to_show(paths: Sequence[Path], unused: Mapping[str, object]) -> tuple[Views, Path] | None:
    """Return the artifact that paths lead to, with what shows it; None if they lead to runs, or to nothing.

    The artifact is the only path, or the only artifact in a folder that holds no runs.

    Args:
        paths: the paths that the user gave.
        unused: values of options that say how to show runs, by flag; None and empty ones are not given.

    Raises:
        UsageError: an artifact is given together with another path or with one of these options.
        NothingToCompare: a folder holds no runs, but several artifacts.
    """
    given = [match for path in paths for match in matching(path)]
    found = [(kind, artifact) for path in given for kind, artifact in filter(None, [at(path)]) if kind.views]
    if found and len(given) > 1:
        kind, artifact = found[0]
        raise UsageError(f"{artifact.path} is a {kind.name}, which is shown alone; give no other path beside it")
    for folder in given if not found else ():
        inside = [(kind, artifact) for kind, artifact in artifacts_in(folder) if kind.views]
        if inside and not files_below(folder, "metrics.csv"):
            found += inside
    if len(found) > 1:
        names = ", ".join(str(artifact.path) for _, artifact in found)
        raise NothingToCompare(f"there is no run in {', '.join(map(str, paths))}; give one of these alone: {names}")
    for kind, artifact in found:
        if flags := [
            flag for flag, value in unused.items() if value is not None and value is not False and value not in ((), [])
        ]:
            raise UsageError(f"{artifact.path} is a {kind.name}, which has its own rule; leave out {', '.join(flags)}")
        if kind.views:
            return kind.views, artifact.path
    return None
