"""The `bench` command under a name that no module of a user has, and what refuses modules that hide this project's.

`bench`, `compressors` and `collectives` are common names: a folder or file of that name beside a user's script, or in a
folder of PYTHONPATH, is found before the installed package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

# The packages that a training script uses, which may have a `bench.py` of its own, as nanoGPT does.
LIBRARY = ("compressors", "collectives")
ALL = ("bench", *LIBRARY)


def refuse_others(packages: Sequence[str] = ALL) -> None:
    """Make sure that these packages of this project are the ones that Python finds.

    Raises:
        ImportError: "/home/me/compressors hides the package compressors of gradwire; rename it or leave its folder".
    """
    for name in packages:
        spec = find_spec(name)
        found = Path(spec.origin) if spec and spec.origin else None
        if found is not None and found.resolve().parent != Path(__file__).resolve().with_name(name):
            hiding = found.parent if found.stem == "__init__" else found
            raise ImportError(
                f"{hiding} hides the package {name} of gradwire; rename it, or take {hiding.parent} out of the folders "
                "where Python looks for modules (the script's own and PYTHONPATH)"
            )


def main() -> None:
    """Entry point of the `bench` script."""
    try:
        refuse_others()
    except ImportError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)
    from bench.__main__ import main as run

    run()
