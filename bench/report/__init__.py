"""Read results, compare configurations over seeds, and write tables, plots and the HTML report.

Importing these modules does not import torch.

`bench.report` is also the Python function for `bench report`, so this package can be called.
"""

import importlib
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.core.run_folder import REPORT, RUNS_FOLDER


class _Callable(types.ModuleType):
    def __call__(
        self,
        paths: str | Path | Sequence[str | Path] = RUNS_FOLDER,
        *,
        baseline: str | None = None,
        out: str | Path = REPORT,
    ) -> Any:
        """Write the report about runs as one HTML file; see `bench.api.pictures.report`."""
        return importlib.import_module("bench.api.pictures").report(paths, baseline=baseline, out=out)


sys.modules[__name__].__class__ = _Callable
