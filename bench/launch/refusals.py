"""Refuse a wrong request before torch is imported, which takes seconds.

Components are modules that import torch. A forked child imports them with placeholders in torch's place and makes the
same checks that are made with torch later. Modules may name a placeholder, call it and derive from it while they are
imported; a check that asks one anything gets an exception, and its answer then waits for torch.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import pickle
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
    """Return what the function returns in a process without torch; None where it needs torch, or torch is there.

    Raises:
        UsageError: what the function refuses.
    """
    if "torch" in sys.modules:
        return None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings are given where torch is
            sys.meta_path.insert(0, _Placeholders())
            answer = pickle.dumps(_outcome(functools.partial(function, *args, **kwargs)))
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    outcome = pickle.loads(answer) if answer else None
    if isinstance(outcome, UsageError):
        raise outcome
    result: T | None = outcome
    return result


def check_each(asked: Sequence[RunConfig]) -> list[UsageError | None]:
    """Return why each of the runs is refused, as far as that shows without torch; for `without_torch`."""
    outcomes = [_outcome(functools.partial(check, each)) for each in asked]
    return [outcome if isinstance(outcome, UsageError) else None for outcome in outcomes]


def _outcome(function: Callable[[], T]) -> T | UsageError | None:
    """Return the result or the refusal; None where the function met a placeholder, or a third party's module did."""
    try:
        return function()
    except PluginError:
        return None
    except UsageError as refusal:
        return UsageError(str(refusal))
    except Exception:  # noqa: BLE001 - the same check with torch meets it again, if it is more than a placeholder
        return None


class _Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives modules without content for what is left out."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in LEFT_OUT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = _Placeholder().__getattr__


class _Placeholder:
    """Stands for something of torch: one and the same for each name."""

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
        raise TypeError("a placeholder holds nothing known")

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
