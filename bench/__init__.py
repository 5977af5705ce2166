"""bench: does compressing gradients make training finish sooner, on this link, without losing accuracy?

`run`, `decide`, `load` and `compare` do in Python what the commands do. They are imported when they are first used, so
that `bench --help` and every rank start without them.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.api.comparing import compare, load
    from bench.api.runs import Runs, run
    from bench.core.errors import BenchError, Interrupted, NothingToCompare, RunFailed, UsageError
    from bench.deciding.answer import Answer
    from bench.deciding.api import decide
else:
    _MODULES = {
        "Answer": "bench.deciding.answer",
        "compare": "bench.api.comparing",
        "decide": "bench.deciding.api",
        "load": "bench.api.comparing",
        "Runs": "bench.api.runs",
        "run": "bench.api.runs",
    } | dict.fromkeys(["BenchError", "Interrupted", "NothingToCompare", "RunFailed", "UsageError"], "bench.core.errors")

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module 'bench' has no attribute '{name}'")
        globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return globals()[name]


__all__ = [
    "Answer", "BenchError", "Interrupted", "NothingToCompare", "RunFailed", "Runs", "UsageError", "compare", "decide",
    "load", "run",
]  # fmt: skip
