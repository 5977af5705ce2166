"""Components that a user defines as a function in their own file: `path/net.py:build` or `package.module:build`.

The function's parameters are the component's options: `net.py:build:width=64` calls `build(width=64)`. A hash of the
file is an option too, so that the hash is part of every result row and of the experiment's identity.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import random
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast

import pydantic
from typing_extensions import Doc, override

from bench.core.errors import PluginError, UsageError
from collectives.options import OptionError, Options, did_you_mean

HASH_DIGITS = 12
_SHOWN = 8  # most functions of a file that a message lists


@dataclasses.dataclass(frozen=True, kw_only=True)
class Function:
    """A function in a user's file.

    Attributes:
        name: the text that names the function, such as ``path/net.py:build``.
        path: the file.
        hash: first 12 hexadecimal digits of the SHA-256 of the file.
        call: the function itself.
    """

    name: str
    path: Path
    hash: str
    call: Callable[..., Any]

    def failure(self, error: BaseException) -> PluginError:
        """Return an error that says in one sentence which line of the file raised an exception."""
        return _failure(self.name, self.path, error)


@dataclasses.dataclass(kw_only=True, eq=False)
class FunctionOptions(Options):
    """Base of the components that call a user's function; see `component_of`."""

    function: ClassVar[Function]
    parameters: ClassVar[tuple[str, ...]]  # the names of the parameters that are options
    passed: ClassVar[tuple[str, ...]] = ()  # names of parameters that the component itself fills

    hash: Annotated[str, Doc("first 12 hex digits of the file's SHA-256; if given, the file must have this hash")] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hash = self.function.hash

    @classmethod
    @override
    def from_text(cls, values: Mapping[str, str]) -> Self:
        # Check the hash before the other options, because another version of the file may lack these.
        if values.get("hash", "") not in ("", cls.function.hash):
            raise OptionError(
                f"{cls.function.path} has the hash {cls.function.hash} instead of {values['hash']}, so it has changed; "
                "restore it, or leave out hash and start a new run"
            )
        for option in dataclasses.fields(cls):
            if option.name in cls.parameters and option.default is dataclasses.MISSING and option.name not in values:
                raise OptionError(
                    f"{cls.component_name} needs a value for {option.name}; write "
                    f"{cls.component_name}:{option.name}=VALUE"
                )
        return super().from_text(values)

    def call(self, **given: Any) -> Any:
        """Call the function with its options and with those arguments in `given` that match its parameters.

        Raises:
            PluginError: the function raised an exception.
        """
        accepted = inspect.signature(self.function.call).parameters
        arguments = {name: getattr(self, name) for name in self.parameters}
        arguments |= {name: value for name, value in given.items() if name in accepted}
        try:
            return self.function.call(**arguments)
        except (Exception, SystemExit) as error:
            raise self.function.failure(error) from error


def seed_generators(*seeds: int) -> None:
    """Seed the global random number generators of Python and numpy, which only users' code uses.

    Args:
        seeds: the run's seed if all ranks must draw the same numbers; otherwise the seed and the rank.
    """
    import numpy as np

    random.seed(repr(seeds))
    np.random.seed(seeds)


def generator_states() -> dict[str, Any]:
    """Return the states of the generators that `seed_generators` seeds, as values that a checkpoint can hold."""
    import numpy as np

    name, words, *rest = cast("tuple[Any, ...]", np.random.get_state())
    return {"python": random.getstate(), "numpy": (name, words.tolist(), *rest)}


def restore_generators(states: Mapping[str, Any]) -> None:
    """Restore the generators to states that `generator_states` returned."""
    import numpy as np

    random.setstate(states["python"])
    np.random.set_state(states["numpy"])


@contextlib.contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed the global generators of Python and numpy for the block, and restore their states after it."""
    states = generator_states()
    seed_generators(seed)
    try:
        yield
    finally:
        restore_generators(states)


F = TypeVar("F", bound=FunctionOptions)


def component_of(base: type[F], name: str) -> type[F]:
    """Return a subclass of `base` that calls a user's function; the function's parameters are the subclass's options.

    Parameters that cannot be given on the command line, such as a module or a list, keep their defaults.

    Args:
        base: base class of such components.
        name: the text that names the function, such as ``path/net.py:build``.

    Raises:
        UsageError: there is no such function, or a parameter is unusable: it has no default and cannot be given on the
            command line, or the base class uses its name.
    """
    _ = importlib.import_module("torch").__version__  # raises an error if a placeholder replaces torch
    return _component_of(base, find(name))  # type: ignore[arg-type]


@functools.cache  # one class per function, so that its data are kept
def _component_of(base: type[F], function: Function) -> type[F]:
    try:
        parameters = inspect.signature(function.call).parameters.values()
    except (TypeError, ValueError):
        raise UsageError(f"the parameters of {function.name} cannot be read; write a function that calls it") from None
    fields: list[tuple[str, Any, Any]] = []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name in base.passed:
            continue
        if hasattr(base, parameter.name):
            raise UsageError(
                f"{function.name} has a parameter '{parameter.name}', which has another meaning here; rename it"
            )
        default = dataclasses.MISSING if parameter.default is parameter.empty else parameter.default
        if (hint := _hint(parameter, function)) is not None:
            fields.append((parameter.name, hint, dataclasses.field(default=default)))
        elif default is dataclasses.MISSING:
            raise UsageError(
                f"{function.name} has a parameter '{parameter.name}' that cannot be given on the command line; give it "
                "a default, or annotate it as int, float, str or bool"
            )
    namespace = {"function": function, "parameters": tuple(name for name, _, _ in fields)}
    component: Any = dataclasses.make_dataclass(
        base.__name__, fields, bases=(base,), namespace=namespace, kw_only=True, eq=False
    )
    component.component_name = function.name
    return cast("type[F]", component)


def find(name: str) -> Function:
    """Import the file that a text such as ``path/net.py:build`` names, and return the function.

    Raises:
        UsageError: there is no such file, module or function.
        PluginError: the file raised an exception.
    """
    where, _, attribute = name.rpartition(":")
    path = _path_of(name, where).resolve()
    try:
        module, digest = _imported(path, "" if where.endswith(".py") else where)
    except (Exception, SystemExit) as error:
        raise _failure(name, path, error) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        defined = {key: value for key, value in vars(module).items() if callable(value) and not key.startswith("_")}
        known = [key for key, value in defined.items() if getattr(value, "__module__", "") == module.__name__]
        shown = f"choose one of {', '.join(known[:_SHOWN])}" if known else f"write def {attribute}(...) there"
        raise UsageError(f"{where} has no function '{attribute}'{did_you_mean(attribute, known)}; {shown}")
    return Function(name=name, path=path, hash=digest, call=function)


def _path_of(name: str, where: str) -> Path:
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            folder = "" if path.is_absolute() else f" in {Path.cwd()}"
            raise UsageError(f"there is no file {path}{folder}; write path/file.py:function")
        return path
    if str(Path.cwd()) not in sys.path:  # like `python -m`, but searched after installed packages
        sys.path.append(str(Path.cwd()))
    try:
        origin = _origin(where)
    except Exception as error:  # importing a package that contains the module failed
        raise _failure(name, Path(where), error) from error
    if origin is None:
        raise UsageError(f"there is no module {where}; write path/file.py:function or package.module:function")
    return origin


def _origin(module: str) -> Path | None:
    """Return the file of a module that Python finds under this name, or None."""
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):  # ValueError: a module that was made without a file
        return None
    return Path(spec.origin) if spec and spec.origin and Path(spec.origin).is_file() else None


_modules: dict[Path, tuple[types.ModuleType, str]] = {}


def _imported(path: Path, name: str) -> tuple[types.ModuleType, str]:
    """Return the module of a file and the hash of the text that was imported, even if the file has changed since.

    A process executes a file only once, even if it is named in different ways, because registries of other libraries
    refuse to register the same name twice.

    Args:
        path: the resolved path of the file.
        name: the name under which Python finds the module; empty for a file that was named by its path.
    """
    if path not in _modules:
        source = path.read_bytes()
        loaded = [module for module in list(sys.modules.values()) if _is_of(module, path)]
        with seeded_generators(0):  # so the file draws the same numbers in every process during import
            module = loaded[0] if loaded else importlib.import_module(name) if name else _executed(path, source)
        _modules[path] = module, hashlib.sha256(source).hexdigest()[:HASH_DIGITS]
    return _modules[path]


def _is_of(module: object, path: Path) -> bool:
    file = getattr(module, "__dict__", {}).get("__file__")  # getattr would make a lazy module import something
    return isinstance(file, str) and Path(file).name == path.name and Path(file).resolve() == path


def _executed(path: Path, source: bytes) -> types.ModuleType:
    """Execute a file as a module, under the name by which other files in its folder or package import it.

    As for a script, Python searches the file's folder first for the modules that the file imports.
    """
    root, parts = path.parent, [path.stem]
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    if len(parts) > 1:
        if str(root) not in sys.path:
            sys.path.append(str(root))
        if (origin := _origin(".".join(parts))) is not None and origin.resolve() == path:
            return importlib.import_module(".".join(parts))
    # Another module may have the file's name already.
    unique = f"user_file_{hashlib.sha256(bytes(path)).hexdigest()[:HASH_DIGITS]}"
    name = unique if path.stem in sys.modules else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        exec(compile(source, str(path), "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def described(value: object) -> str:
    """Return the type of a value with details, such as the shape of an array or the length of a list."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} of {value.dtype} and shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"{type(value).__name__} with the keys {', '.join(map(repr, list(value)[:4]))}"
    if isinstance(value, (tuple, list)):
        few = f" ({', '.join(type(each).__name__ for each in value)})" if 0 < len(value) <= 4 else ""
        return f"{type(value).__name__} of {len(value)}{few}"
    is_short = isinstance(value, (str, int, float)) and len(repr(value)) < 30
    return f"{type(value).__name__} {value!r}" if is_short else type(value).__name__


def _failure(name: str, path: Path, error: BaseException) -> PluginError:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else (lines[-1] if lines else None)
    reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
    return PluginError(f"{name} cannot be used: {f'line {line}: ' if line else ''}{reason}")


def _hint(parameter: inspect.Parameter, function: Function) -> Any:
    """Return the type of a parameter that can be given on the command line; None for other parameters."""
    hint = parameter.annotation
    try:
        hint = eval(hint, vars(sys.modules[function.call.__module__])) if isinstance(hint, str) else hint
        if hint is parameter.empty:
            hint = type(parameter.default)
        elif parameter.default is None:
            hint |= None
        schema = pydantic.TypeAdapter(hint).json_schema()
    except Exception:  # noqa: BLE001 - only a type checker can read the hint, or pydantic does not support it
        return None
    kinds = {each.get("type", "string" if "enum" in each else "") for each in schema.get("anyOf", [schema])}
    return hint if kinds <= _OF_TEXT and kinds != {"null"} else None


_OF_TEXT = {"integer", "number", "string", "boolean", "null"}  # JSON types of values that users can give as text
