"""bench: does compressing gradients make training finish sooner, on this link, without losing accuracy?

`run`, `decide`, `compare`, `report`, `plot`, `predict` and `profile` do in Python what the commands do. They are
imported when they are first used, so that `bench --help` and every rank start without them.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.api.comparing import compare, load
    from bench.api.pictures import Pictures, Report, plot, report
    from bench.api.runs import Runs, run
    from bench.cli.from_python import Found, predict, profile
    from bench.core.errors import BenchError, Interrupted, NothingToCompare, RunFailed, UsageError
    from bench.deciding.answer import Answer
    from bench.deciding.api import decide
else:
    _MODULES = {
        "Answer": "bench.deciding.answer",
        "compare": "bench.api.comparing",
        "decide": "bench.deciding.api",
        "Found": "bench.cli.from_python",
        "load": "bench.api.comparing",
        "Pictures": "bench.api.pictures",
        "plot": "bench.api.pictures",
        "predict": "bench.cli.from_python",
        "profile": "bench.cli.from_python",
        "Report": "bench.api.pictures",
        "Runs": "bench.api.runs",
        "run": "bench.api.runs",
    } | dict.fromkeys(["BenchError", "Interrupted", "NothingToCompare", "RunFailed", "UsageError"], "bench.core.errors")

    def __getattr__(name):
        if name == "report":  # a package, which can be called
            return importlib.import_module("bench.report")
        if name not in _MODULES:
            raise AttributeError(f"module 'bench' has no attribute '{name}'")
        globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return globals()[name]


__all__ = [
    "Answer", "BenchError", "Found", "Interrupted", "NothingToCompare", "Pictures", "Report", "RunFailed", "Runs",
    "UsageError", "compare", "decide", "load", "plot", "predict", "profile", "report", "run",
]  # fmt: skip
