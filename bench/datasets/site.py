"""Source text of installed Python packages without their tests, as bytes: `site:packages=torch+sympy`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from typing_extensions import Doc, override

from bench.datasets.base import DatasetError
from bench.datasets.corpus import Files
from bench.datasets.text import AbsentText, TextDataset, is_library
from collectives.options import did_you_mean


@dataclasses.dataclass(kw_only=True)
class Site(TextDataset):
    """The Python files of installed packages, as the packages' installer has listed them.

    About a 14th is held out, in whole files, so that copies stay on one side. Other versions of the packages are
    another text.
    """

    packages: Annotated[tuple[str, ...], Doc("names of installed packages, as pip knows them, joined by +")] = (
        *("networkx", "sympy", "torch"),
    )
    versions: Annotated[str, Doc("versions of the packages, in their order, joined by /; any: not checked")] = "any"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_present(Path()):
            self.packages, self.versions = tuple(self._found), "/".join(self._found.values())

    @functools.cached_property
    def _found(self) -> Mapping[str, str]:
        """Return the version of each package by its name, sorted by name."""
        if not self.packages:
            raise AbsentText("no packages are named; name installed ones, such as site:packages=torch+sympy")
        found = {}
        for package in self.packages:
            try:
                version = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                raise AbsentText(f"no package {package} is installed{_hint(package)}; install it") from None
            if not version:  # what an interrupted installation leaves behind
                raise AbsentText(f"the package {package} is installed without a version; install it again")
            found[_normalised(package)] = version
        return dict(sorted(found.items()))

    @override
    def _files(self) -> Files:
        versions = "/".join(self._found.values())
        if self.versions not in ("any", versions):
            raise DatasetError(
                f"the packages {'+'.join(self._found)} have the versions {versions} instead of {self.versions}; "
                "install those, or leave out versions and hash and start a new run"
            )
        paths = [path for package in self._found.items() for path in _modules(*package)]
        folder = paths[0][0]
        listing = []
        for root, name in paths:
            with contextlib.suppress(FileNotFoundError):  # removed after the installation
                facts = (root / name).stat()
                if facts.st_size:
                    name = name if root == folder else os.path.relpath(root / name, folder)
                    listing.append((name, facts.st_size, facts.st_mtime_ns))
        return Files(folder, "+".join(self._found), tuple(sorted(set(listing))))


@functools.lru_cache(maxsize=32)  # the list of torch's files is long
def _modules(package: str, version: str) -> list[tuple[Path, str]]:
    """Return (folder into which the package is installed, name relative to it) of each of its Python files.

    Raises:
        AbsentText: the package has no Python files.
    """
    distribution = importlib.metadata.distribution(package)
    root = Path(str(distribution.locate_file("")))
    files = [
        path.as_posix()
        for path in distribution.files or ()
        if path.suffix == ".py" and ".." not in path.parts and all(map(is_library, path.parts))
    ]
    if not files:
        raise AbsentText(
            f"the package {package} has no list of Python files, because it is compiled, or installed in editable "
            "mode; name another one"
        )
    return [(root, name) for name in files]


def _normalised(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def _hint(package: str) -> str:
    """Return the name of an installed package that is meant: by the name of its module, or a similar name."""
    if names := importlib.metadata.packages_distributions().get(package):
        return f" (did you mean '{names[0]}'?)"
    return did_you_mean(
        package, {name for each in importlib.metadata.distributions() if (name := each.metadata["Name"])}
    )
