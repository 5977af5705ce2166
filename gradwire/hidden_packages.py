"""Raise an error if a user's module hides a package of this project, before Python imports the wrong one.

`bench`, `compressors` and `collectives` are common names: Python finds a folder or file with such a name beside a
user's script, or in a folder of PYTHONPATH, before the installed package.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

# The packages that a training script uses. `bench` is not among them, because a script may have its own `bench.py`, as
# nanoGPT does.
LIBRARY = ("compressors", "collectives")


def refuse_others(packages: Sequence[str] = LIBRARY) -> None:
    """Check that Python finds this project's packages under these names, and not a user's modules.

    Raises:
        ImportError: "/home/me/compressors hides the package compressors of gradwire; rename it or leave its folder".
    """
    for name in packages:
        spec = find_spec(name)
        found = Path(spec.origin) if spec and spec.origin else None
        if found is not None and found.resolve().parent != Path(__file__).resolve().parents[1] / name:
            hiding = found.parent if found.stem == "__init__" else found
            raise ImportError(
                f"{hiding} hides the package {name} of gradwire; rename it, or take {hiding.parent} out of the folders "
                "where Python looks for modules (the script's own and PYTHONPATH)"
            )


def on_first_use(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package whose names are imported when they are first used (PEP 562).

    Args:
        package: name of the package.
        modules: for each name, the module that defines the name.
    """

    def of(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        refuse_others()
        found = vars(sys.modules[package])[name] = getattr(importlib.import_module(modules[name]), name)
        return found

    return of


def exit_if_hidden(packages: Sequence[str]) -> None:
    """Exit with status 2 and an error message if a user's module hides one of these packages."""
    try:
        refuse_others(packages)
    except ImportError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)
