"""Postpone torch._dynamo, the front end of torch's compiler, until something is compiled.

DDP and every optimizer import it at their first use, only to be left alone by it: over a second of importing, half as
much as all the rest of torch, in processes that compile nothing.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

DYNAMO = "torch._dynamo"


class Postponed(ModuleType):
    """Answers what a process asks that compiles nothing; asked for anything else, it imports the real module.

    Args:
        name: the real module's.
        answers: what this one has.
    """

    def __init__(self, name: str, **answers: Any) -> None:
        super().__init__(name)
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        if isinstance(sys.modules[DYNAMO], Postponed):
            del sys.modules[DYNAMO]
        return getattr(importlib.import_module(self.__name__), name)


def postpone_compiler() -> None:
    """Have this process import the compiler only when it is needed; for after the process group has been made."""
    utils = Postponed(f"{DYNAMO}.utils", get_optimize_ddp_mode=lambda: "no_optimization")
    compiler = Postponed(DYNAMO, utils=utils, graph_break=lambda: None, disable=lambda function, *_, **__: function)
    sys.modules.setdefault(DYNAMO, compiler)
