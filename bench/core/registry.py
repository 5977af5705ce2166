"""The registry of components, which finds and describes them without importing any.

Each kind of component has a package. A component is a top-level class in one of the package's files that derives,
directly or through a class in the same folder, from the kind's base class. A component has the name of its file
(``GroupTopK`` in ``group_topk.py``); if several components share a file, each class states its own name:
``class ResNet18(Model, name="resnet18")``. Names, one-line descriptions and presets are read from
the files' text, so finding a name takes milliseconds and does not import torch.

Extensions of this project, such as ``auto``, and third parties add components by entry point (group
``bench.compressors``, ``bench.collectives``, ...). An error in a third party's component becomes a `PluginError`, which
is raised only for users who name that component.
"""

import collections
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from bench.core import functions
from bench.core.errors import PluginError, UsageError
from collectives.options import Options, did_you_mean

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ComponentKind:
    """One kind of component.

    Attributes:
        name: plural of the kind, such as ``compressors``.
        package: package that holds the built-in components.
        base: name of the components' base class, in the package's module `base`.
        meaning: explanation of the kind in one line.
    """

    name: str
    package: str
    base: str
    meaning: str

    @property
    def singular(self) -> str:
        """Return the singular of the name: ``compressors`` -> ``compressor``, ``strategies`` -> ``strategy``."""
        return self.name.removesuffix("ies") + "y" if self.name.endswith("ies") else self.name.removesuffix("s")

    @property
    def with_article(self) -> str:
        """Return the singular with its article: ``a compressor``, ``an optimizer``."""
        return f"{'an' if self.singular[0] in 'aeiou' else 'a'} {self.singular}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A component's name and description, found without importing the component.

    Attributes:
        name: name on the command line.
        description: description of the component in one line.
        target: location of the component's class (``module:Class``).
        provider: package and version of the third party that provides the component; empty for built-in components.
        presets: names of the presets that a built-in component's file mentions.
    """

    name: str
    description: str
    target: str
    provider: str = ""
    presets: frozenset[str] = frozenset()


KINDS = {
    kind.name: kind
    for kind in (
        ComponentKind("compressors", "compressors", "Compressor", "How a gradient becomes a payload"),
        ComponentKind("collectives", "collectives", "Collective", "How ranks sum payloads"),
        ComponentKind("strategies", "bench.strategies", "Strategy", "What ranks exchange, and when"),
        ComponentKind("optimizers", "bench.optimizers", "Optimizer", "How a gradient changes the weights"),
        ComponentKind("models", "bench.models", "Model", "What is trained"),
        ComponentKind("datasets", "bench.datasets", "Dataset", "What it is trained on"),
    )
}

# Kinds of which a component can be a function in a user's file, such as ``path/net.py:build``.
FROM_FUNCTIONS = ("models", "datasets")

# Patterns of: the first line of a docstring; a preset that a file mentions (``preset=diloco``); the head of a top-level
# class (name, bases) with the first line of its docstring.
# Parsing the files with `ast` would take 80 ms in each process of a run.
_QUOTES = "\"\"\"|'''"
_DOCSTRING = rf"[rR]?(?:{_QUOTES})\s*(.*?)(?:{_QUOTES}|$)"
_MODULE = re.compile(rf"(?:#.*\n|\n)*{_DOCSTRING}", re.MULTILINE)
_PRESET = re.compile(r"\bpreset=(\w+)")
_CLASS = re.compile(rf"^class (\w+)(?:\(([^:]*)\))?:.*(?:\n\s+{_DOCSTRING})?", re.MULTILINE)


@functools.cache
def entries(kind: str) -> dict[str, Entry]:
    """Return all components of one kind by name, sorted; a built-in component hides an entry point of the same name."""
    return dict(sorted((plugins(kind) | _built_in(KINDS[kind])).items()))


def warn_of_clashes(kind: str) -> None:
    """Warn on stderr of each third party's component that is hidden by another component of the same name."""
    for entry in _added().get(f"bench.{kind}", ()):
        chosen = entries(kind)[entry.name]
        if chosen != entry:
            winner = f"that of {chosen.provider}" if chosen.provider else "the built-in one"
            warn_once(
                f"{KINDS[kind].singular} '{entry.name}' of {entry.provider} is left out: {winner} has the same name"
            )


def load(kind: str, name: str) -> type[Options]:
    """Import and return a component's class.

    Raises:
        UsageError: no component has that name (the message suggests a name, and says how to list all).
        PluginError: the component is a third party's or a user's file, and cannot be imported or is not of this kind.
    """
    if ":" in name:  # a function in a user's file
        if kind not in FROM_FUNCTIONS:
            raise UsageError(f"'{name}' is a function, and only {' and '.join(FROM_FUNCTIONS)} can be functions")
        base = importlib.import_module(f"{KINDS[kind].package}.from_function").COMPONENT
        return functions.component_of(base, name)
    if kind in FROM_FUNCTIONS and name.endswith(".py"):
        raise UsageError(f"{name} names no function; write {name}:FUNCTION")
    known = entries(kind)
    if name not in known:
        raise unknown(name, kind)
    warn_of_clashes(kind)
    module, _, attribute = known[name].target.partition(":")
    with blaming_provider(KINDS[kind].singular, known[name]):
        component: type[Options] = getattr(importlib.import_module(module), attribute)
        if known[name].provider:
            _check_class(component, KINDS[kind])
        component.component_name = name  # an entry point's name may differ from that of the file
    return component


def unknown(name: str, *kinds: str) -> UsageError:
    """Return the error for a name that no component of these kinds has.

    The error's message suggests what the user may have meant, and says how to list all components.
    """
    for kind in kinds:
        if package_of(kind, name):
            return UsageError(
                f"{KINDS[kind].singular} '{name}' is an extension that is not installed here; install gradwire with "
                f"this extension, or choose another that `bench list {kind}` shows"
            )
    *most, last = (KINDS[kind].singular for kind in kinds)
    wanted = f"{', '.join(most)} or {last}" if most else last
    command = "bench list" if most else f"bench list {kinds[0]}"
    return UsageError(f"there is no {wanted} '{name}'{_suggestion(name, kinds)}; `{command}` shows them all")


def _suggestion(name: str, kinds: Sequence[str]) -> str:
    """Return a hint for a name that no component of these kinds has.

    The hint says that the name belongs to another kind or to a preset, or suggests the most similar name. The hint
    begins with a space; it is empty if no name is similar.
    """
    for other in KINDS.values():
        if name in entries(other.name):
            return f" ({name} is {other.with_article})"
    for other in KINDS.values():
        for entry in entries(other.name).values():
            if name in entry.presets:
                return f" ({name} is a preset of {other.with_article}: {entry.name}:preset={name})"
    return did_you_mean(name, [known for kind in kinds for known in entries(kind)])


def ask_each(kind: str, question: Callable[[type[Options]], T]) -> dict[str, T]:
    """Call a function with the class of every component of a kind; return the results by component name.

    Args:
        kind: kind of the components, such as ``compressors``.
        question: the function. If it raises for a third party's component, the component is left out with a warning.
    """
    answers = {}
    for name, entry in entries(kind).items():
        try:
            with blaming_provider(KINDS[kind].singular, entry):
                answers[name] = question(load(kind, name))
        except PluginError as error:
            warn_once(f"left out: {error}")
    return answers


def plugins(group: str) -> dict[str, Entry]:
    """Return the entries that installed packages add by entry point to a group, such as ``commands``, by name."""
    return {entry.name: entry for entry in _added().get(f"bench.{group}", ())}


def package_of(group: str, name: str) -> str:
    """Return the package that an entry is in, such as `bench.extensions.tune`, even if its files are missing now.

    The result is empty if the installation names no such entry.
    """
    points = (point for point in _entry_points() if (point.group, point.name) == (f"bench.{group}", name))
    return next((point.module.rpartition(".")[0] for point in points), "")


def load_plugin(group: str, name: str) -> object:
    """Import and return the object that a package adds under a name to a group, such as ``commands``.

    Raises:
        PluginError: the object is a third party's and cannot be imported.
    """
    entry = plugins(group)[name]
    module, _, attribute = entry.target.partition(":")
    with blaming_provider(group.removesuffix("s"), entry):
        return getattr(importlib.import_module(module), attribute)


def load_plugins(group: str, *types: type[T]) -> list[T]:
    """Import and return all objects of these types that packages add to a group; warn of objects that are left out."""
    found = []
    for name, entry in plugins(group).items():
        try:
            added = load_plugin(group, name)
        except PluginError as error:
            warn_once(f"left out: {error}")
            continue
        if isinstance(added, types):
            found.append(added)
        else:
            wanted = " or ".join(each.__name__ for each in types)
            warn_once(f"left out: '{name}' of {entry.provider or 'bench'} in the group bench.{group} is no {wanted}")
    return found


@contextlib.contextmanager
def blaming_provider(what: str, entry: Entry, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn an exception of the block, even `SystemExit`, into an error that names the third party's package.

    Args:
        what: kind of the component, in the singular, for the message.
        entry: the component that the block uses; if it is built-in, all exceptions pass unchanged.
        passing: exceptions that also pass unchanged, because they report mistakes of the user.

    Raises:
        PluginError: the block raised any other exception; `KeyboardInterrupt` always passes.
    """
    try:
        yield
    except BaseException as error:
        if not entry.provider or isinstance(error, (KeyboardInterrupt, PluginError, *passing)):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise PluginError(
            f"{what} '{entry.name}' of {entry.provider} cannot be used ({reason}); repair or uninstall that package"
        ) from error


def required_of(component: type) -> set[str]:
    """Return the names of a component's abstract methods, and of its declared class variables that have no value."""
    return set(getattr(component, "__abstractmethods__", ())) | {
        name
        for parent in component.__mro__
        for name, hint in inspect.get_annotations(parent).items()
        if str(hint).startswith("ClassVar") and not hasattr(component, name)
    }


@functools.cache  # searching all packages takes 0.1 s; forked ranks inherit the result
def _added() -> dict[str, list[Entry]]:
    """Return the entries that extensions of this project and third parties add by entry point, by group.

    An extension whose file was removed is left out, although the installation still names it.
    """
    found = collections.defaultdict(list)
    for point in _entry_points():
        root, *folders = point.module.split(".")
        if root in ("bench", "compressors"):  # an extension of this project
            path = _folder(root).joinpath(*folders).with_suffix(".py")
            if not path.exists():
                continue
            provider, description = "", _first_line(path.read_text(encoding="utf-8"))
        else:
            provider = f"{point.dist.name} {point.dist.version}" if point.dist else "an unnamed package"
            description = f"(from {provider})"
        found[point.group].append(
            Entry(name=point.name, description=description, target=point.value, provider=provider)
        )
    return dict(found)


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    try:
        found = importlib.metadata.entry_points()
        return [point for group in found.groups if group.startswith("bench.") for point in found.select(group=group)]
    except (TypeError, ValueError):  # one package's metadata is broken; a slower search finds which
        points: list[importlib.metadata.EntryPoint] = []
        for package in importlib.metadata.distributions():
            try:
                points += [point for point in package.entry_points if point.group.startswith("bench.")]
            except (TypeError, ValueError) as error:
                said = f"the entry points of {package.name} cannot be read ({error})"
                warn_once(f"{said}; repair or uninstall that package")
        return points


def _check_class(component: object, kind: ComponentKind) -> None:
    base = getattr(importlib.import_module(f"{kind.package}.base"), kind.base)
    if not (isinstance(component, type) and issubclass(component, base)):
        raise TypeError(f"it does not derive from {kind.package}.base.{kind.base}")
    if missing := required_of(component):
        raise TypeError(f"it does not define {', '.join(sorted(missing))}")
    if "__dataclass_fields__" not in vars(component):
        raise TypeError("it is not decorated with @dataclasses.dataclass(kw_only=True)")


@functools.cache
def warn_once(sentence: str) -> None:
    """Print a warning on stderr, unless it was printed before."""
    print(f"warning: {sentence}", file=sys.stderr)


def _built_in(kind: ComponentKind) -> dict[str, Entry]:
    """Return the components in the kind's package by name: classes with `name=...`, and classes named like the file."""
    bases: dict[str, list[str]] = {}  # by class name, in all files of the package
    found: dict[str, Entry] = {}  # by class name
    folder = _folder(kind.package)
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        for name, head, meaning in _CLASS.findall(text):
            parts = [part.strip() for part in head.split(",")]
            bases[name] = [part.partition("[")[0].rpartition(".")[2] for part in parts]
            given = [part.partition("=")[2].strip("\"' ") for part in parts if re.match(r"name\s*=", part)]
            if given or (name.lower() == path.stem.replace("_", "") and path.stem[0] != "_"):
                found[name] = Entry(
                    name=given[0] if given else path.stem,
                    description=meaning if given else _first_line(text),
                    target=f"{kind.package}.{path.stem}:{name}",
                    presets=frozenset(_PRESET.findall(text)),
                )

    def derives(name: str) -> bool:
        return any(base == kind.base or derives(base) for base in bases.get(name, []))

    return {entry.name: entry for name, entry in found.items() if derives(name)}


def _first_line(text: str) -> str:
    """Return the first line of the docstring of a module with this text."""
    match = _MODULE.match(text)
    return match[1] if match else ""


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"the package {package} is not installed; run `make setup`")
    return Path(spec.submodule_search_locations[0])
