"""Postpone the import of torch._dynamo, the front end of torch's compiler, until something is compiled.

DDP and every optimizer import it at their first use, only to switch it off for their own code. The import takes over a
second, half as long as the rest of torch, in processes that compile nothing.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

DYNAMO = "torch._dynamo"


class Postponed(ModuleType):
    """A stand-in for a module with a few attributes; access to any other attribute imports the real module.

    Args:
        name: name of the real module.
        answers: the stand-in's attributes.
    """

    def __init__(self, name: str, **answers: Any) -> None:
        super().__init__(name)
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        if isinstance(sys.modules[DYNAMO], Postponed):
            del sys.modules[DYNAMO]
        return getattr(importlib.import_module(self.__name__), name)


def postpone_compiler() -> None:
    """Make this process import the compiler only when it is needed; call after the process group has been made."""
    utils = Postponed(f"{DYNAMO}.utils", get_optimize_ddp_mode=lambda: "no_optimization")
    compiler = Postponed(DYNAMO, utils=utils, graph_break=lambda: None, disable=lambda function, *_, **__: function)
    sys.modules.setdefault(DYNAMO, compiler)
