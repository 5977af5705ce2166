"""Check options without importing torch, which takes seconds, so that wrong options are refused at once.

Checking options imports components, which import torch and numpy. So the functions that check options are called in a
forked process in which components import placeholders instead of these packages. Modules may refer to a placeholder,
call it, and derive classes from it. A function that needs a value from a placeholder raises an exception. The call's
result is then None, and the caller repeats the call in a process that has imported torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from bench.core.errors import PluginError, UsageError

P = ParamSpec("P")
T = TypeVar("T")
LEFT_OUT = ("torch", "torchvision", "numpy")


def without_torch(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Call a function in a forked process without torch; return its result, or None if the function needs torch.

    Raises:
        UsageError: the function raised this error.
    """
    (outcome,) = outcomes_without_torch([functools.partial(function, *args, **kwargs)])
    if isinstance(outcome, UsageError):
        raise outcome
    return outcome


def outcomes_without_torch(calls: Sequence[Callable[[], T]]) -> list[T | UsageError | None]:
    """Make several calls in one forked process without torch; return the result or the UsageError of each call.

    The result of a call is None if the call needs torch, or a third party's module that cannot be imported without
    torch. All results are None if this process has already imported torch, because the calls are as fast in this
    process. All results are also None if this process has several threads, as in Jupyter, because a forked process
    could inherit a lock that another thread holds.
    """
    outcomes: list[T | UsageError | None] = [None] * len(calls)
    if "torch" in sys.modules or threading.active_count() > 1:
        return outcomes
    receiving, sending = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide warnings: calls with torch print them
            sys.meta_path.insert(0, _Placeholders())
            sending.send([_outcome(call) for call in calls])
        finally:
            os._exit(0)
    sending.close()
    with contextlib.suppress(EOFError):  # the child ended: a result cannot be pickled
        outcomes = receiving.recv()
    os.waitpid(child, 0)
    return outcomes


def result_or_refusal(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | UsageError:
    """Call a function and return its result, or the UsageError that it raises."""
    try:
        return function(*args, **kwargs)
    except UsageError as refusal:
        return refusal


def _outcome(call: Callable[[], T]) -> T | UsageError | None:
    try:
        return call()
    except PluginError:
        return None
    except UsageError as refusal:
        return UsageError(str(refusal))
    except Exception:  # noqa: BLE001 - if it is a real error, the same call with torch raises it again
        return None


class _Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that imports modules of placeholders instead of torch, torchvision and numpy (`LEFT_OUT`)."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        is_left_out = fullname.partition(".")[0] in LEFT_OUT
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_left_out else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = _Placeholder().__getattr__


class _Placeholder:
    """Stands for any object of torch or numpy; its attributes are placeholders too, each created at first access."""

    __iter__ = None  # not iterable, although it has items

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

    def __or__(self, other: object) -> _Placeholder:
        return self

    __ror__ = __or__

    def __bool__(self) -> bool:
        raise TypeError("a placeholder is neither true nor false")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, float, str, tuple, list)):
            raise TypeError("a placeholder has no known value")
        return self is other

    __hash__ = object.__hash__
