"""Run checks of the options before torch is imported, because that takes seconds.

Components import torch. So a forked child process imports them with placeholders instead of torch and runs the same
checks that run again with torch later. While modules are imported, they may refer to a placeholder, call it and derive
from it. A check that needs a value from a placeholder raises an exception, and its result is left to the later run.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn, ParamSpec, TypeVar

from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.core.registry import PluginError
from bench.launch.resolve import check

P = ParamSpec("P")
T = TypeVar("T")
LEFT_OUT = ("torch", "torchvision")


def without_torch(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Call the function in a forked process without torch and return its result as JSON brings it back.

    Return None if the function needs torch, if torch is imported here already, or if JSON cannot hold the result.

    Raises:
        UsageError: the function raised it.
    """
    if "torch" in sys.modules:
        return None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the run with torch prints warnings
            sys.meta_path.insert(0, _Placeholders())
            outcome = _outcome(functools.partial(function, *args, **kwargs))
            refusal = str(outcome) if isinstance(outcome, UsageError) else None
            answer = json.dumps({"refusal": refusal, "result": outcome}, default=lambda _: None)
            with os.fdopen(writing, "w", encoding="utf-8") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    told = json.loads(text) if text else {"refusal": None, "result": None}
    if told["refusal"] is not None:
        raise UsageError(told["refusal"])
    result: T | None = told["result"]
    return result


def check_each(options: Sequence[RunConfig]) -> list[str | None]:
    """Return for each run the sentence with which `check` refuses it, or None; to be called by `without_torch`."""
    outcomes = [_outcome(functools.partial(check, each)) for each in options]
    return [str(outcome) if isinstance(outcome, UsageError) else None for outcome in outcomes]


def _outcome(function: Callable[[], T]) -> T | UsageError | None:
    """Return the result or the UsageError; None if the function, or a third party's module, needed a placeholder."""
    try:
        return function()
    except PluginError:
        return None
    except UsageError as refusal:
        return UsageError(str(refusal))
    except Exception:  # noqa: BLE001 - if it is a real error, the same check with torch raises it again
        return None


class _Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that returns a module of placeholders instead of torch."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in LEFT_OUT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = _Placeholder().__getattr__


class _Placeholder:
    """Stands for an object of torch; an attribute is always the same placeholder."""

    def __getattr__(self, name: str) -> _Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Placeholder()
        setattr(self, name, found)
        return found

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[()]:
        return ()

    def __call__(self, *args: object, **kwargs: object) -> _Placeholder:
        return _Placeholder()

    def __getitem__(self, parameters: object) -> _Placeholder:
        return self

    def __iter__(self) -> NoReturn:
        raise TypeError("a placeholder cannot be iterated over")

    def __or__(self, other: object) -> _Placeholder:
        return self

    def __ror__(self, other: object) -> _Placeholder:
        return self

    def __bool__(self) -> bool:
        raise TypeError("a placeholder is neither true nor false")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, float, str, tuple, list)):
            raise TypeError("a placeholder has no known value")
        return self is other

    __hash__ = object.__hash__
