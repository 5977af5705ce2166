"""Options of components: dataclass fields with types and ranges, and the specs (``name:key=value``) that set them.

Every component of the project (compressor, collective, model, data set, optimizer) is a keyword-only dataclass whose
fields are its options, written ``ratio: Annotated[float, Gt(0), Le(1), Doc("kept entries / entries")] = 0.01``. The
same validation applies on the command line (where every value is a string) and in library use
(``GroupTopK(ratio=0.01)``). This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar

import annotated_types
import pydantic
from annotated_types import Ge, Gt, Le
from typing_extensions import Doc

MOST = 10**9  # largest count that an option accepts
Count = Annotated[int, Ge(1), Le(MOST)]
CountOrZero = Annotated[int, Ge(0), Le(MOST)]
Positive = Annotated[float, Gt(0), Le(1e12)]
PositiveOrZero = Annotated[float, Ge(0), Le(1e12)]


class OptionError(ValueError):
    """An option that does not exist, or a value outside its range; the message is one sentence for the user."""


class Incompatible(OptionError):
    """Components that do not work together under their options; the message says why, and what would work."""


def incompatibility(check: Callable[..., None], *args: Any) -> str | None:
    """Call a check and return the sentence with which it raises `Incompatible`, or None if it passes."""
    try:
        check(*args)
    except Incompatible as error:
        return str(error)
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionInfo:
    """The name, type, default, permitted range and meaning of an option, as texts for the user."""

    name: str
    type: str
    default: str
    range: str
    meaning: str


@dataclasses.dataclass(kw_only=True, eq=False)
class Options:
    """Base class of every component: validates its fields on construction, and describes them.

    Raises:
        OptionError: a value does not fit its declared type or range, e.g. "topk: ratio=2 is not possible: Input should
            be less than or equal to 1".
    """

    component_name: ClassVar[str] = ""
    is_component: ClassVar[bool] = False

    def __init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        """Set the name that users write: `name`, or else the name of the file."""
        super().__init_subclass__(**kwargs)
        file_name = cls.__module__.rpartition(".")[2]
        cls.component_name = name or file_name
        cls.is_component = name is not None or cls.__name__.lower() == file_name.replace("_", "")

    def __post_init__(self) -> None:
        hints = hints_of(type(self))
        for name, adapter in adapters_of(type(self)).items():
            value = getattr(self, name)
            try:
                setattr(self, name, adapter.validate_python(_split_list(value, hints[name])))
            except pydantic.ValidationError as error:
                detail = error.errors()[0]["msg"]
                raise OptionError(f"{self.component_name}: {name}={value} is not possible: {detail}") from None

    @classmethod
    def from_text(cls, values: Mapping[str, str]) -> Self:
        """Build the component from option texts, as in ``name:key=value,key=value``.

        Raises:
            OptionError: an option is unknown (the message names the nearest one), or a value is out of range.
        """
        known = list(adapters_of(cls))
        for name in values:
            if name not in known:
                raise OptionError(
                    f"{cls.component_name} has no option '{name}'{did_you_mean(name, known)}; "
                    + (f"its options are {', '.join(known)}" if known else "it has none")
                )
        hints = hints_of(cls)
        return cls(**{name: _chosen(text, hints[name]) for name, text in values.items()})

    @classmethod
    def option_names(cls) -> list[str]:
        """Return the names of the options, in declaration order."""
        return list(adapters_of(cls))

    @classmethod
    def describe_options(cls) -> list[OptionInfo]:
        """Describe each option, for ``bench list KIND --long`` and the docs."""
        hints = hints_of(cls)
        return [
            OptionInfo(
                name=field.name,
                type=_type_text(hints[field.name]),
                default=value_text(_default(field)),
                range=range_text(hints[field.name]),
                meaning=meaning(hints[field.name]),
            )
            for field in _option_fields(cls)
        ]

    def option_texts(self, *, only_changed: bool = False) -> dict[str, str]:
        """Return the options as texts that ``from_text`` accepts, sorted by name.

        Args:
            only_changed: leave out options that have their default value.
        """
        defaults = {field.name: value_text(_default(field)) for field in _option_fields(type(self))}
        texts = {name: value_text(getattr(self, name)) for name in sorted(defaults)}
        return {name: text for name, text in texts.items() if not (only_changed and text == defaults[name])}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint such as ``" (did you mean 'topk'?)"``, or an empty string if no known name is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{near[0]}'?)" if near else ""


def value_text(value: Any) -> str:
    """Return an option's value as written on the command line: ``true``, ``0.01``, ``norm+bias``, ``none``."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list, frozenset, set)):
        items = sorted(value) if isinstance(value, (frozenset, set)) else value
        return "+".join(value_text(item) for item in items) or "none"
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return str(value)


_FINITE = pydantic.ConfigDict(allow_inf_nan=False)
_ADAPTERS: dict[type, dict[str, pydantic.TypeAdapter[Any]]] = {}  # built once per class, because it is slow


def hints_of(cls: type) -> dict[str, Any]:
    """Return the type of every field with its annotations, by name."""
    return typing.get_type_hints(cls, include_extras=True)


def adapters_of(cls: type) -> dict[str, pydantic.TypeAdapter[Any]]:
    """Return a validator per field of a dataclass, by name, for its type and range; infinity and NaN are invalid."""
    if cls not in _ADAPTERS:
        hints = hints_of(cls)
        _ADAPTERS[cls] = {f.name: pydantic.TypeAdapter(hints[f.name], config=_FINITE) for f in _option_fields(cls)}
    return _ADAPTERS[cls]


def _option_fields(cls: type) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if field.init]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def split_hint(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the bare type and its annotations."""
    if typing.get_origin(hint) is typing.Annotated:
        bare, *notes = typing.get_args(hint)
        return bare, tuple(notes)
    return hint, ()


def _split_list(value: Any, hint: Any) -> Any:
    """Convert ``norm+bias`` to a list if the option is one, and ``none`` to None or to an empty list."""
    if not isinstance(value, str):
        return value
    bare, _ = split_hint(hint)
    alternatives = typing.get_args(bare)
    if value == "none" and type(None) in alternatives:
        return None
    if typing.get_origin(bare) in (tuple, list, frozenset, set):
        return [] if value == "none" else [item for item in value.split("+") if item]
    return value


def _chosen(text: str, hint: Any) -> Any:
    """Return the choice that a text stands for, which need not be a string (bits=4); otherwise the text itself."""
    bare, _ = split_hint(hint)
    choices = typing.get_args(bare) if typing.get_origin(bare) is typing.Literal else ()
    return next((choice for choice in choices if value_text(choice) == text), text)


def _type_text(hint: Any) -> str:
    bare, _ = split_hint(hint)
    if typing.get_origin(bare) is typing.Literal:
        return "|".join(str(choice) for choice in typing.get_args(bare))
    if typing.get_origin(bare) in (tuple, list, frozenset, set):
        return "list of " + _type_text(typing.get_args(bare)[0])
    alternatives = typing.get_args(bare)
    if alternatives:
        return "|".join("none" if a is type(None) else _type_text(a) for a in alternatives)
    return getattr(bare, "__name__", str(bare))


def range_text(hint: Any) -> str:
    """Return the permitted interval in mathematical notation, e.g. ``(0, 1]``; empty if there is none."""
    _, notes = split_hint(hint)
    low, high = "(-inf", "inf)"
    for note in notes:
        match note:
            case annotated_types.Gt(gt=bound):
                low = f"({_bound_text(bound)}"
            case annotated_types.Ge(ge=bound):
                low = f"[{_bound_text(bound)}"
            case annotated_types.Lt(lt=bound):
                high = f"{_bound_text(bound)})"
            case annotated_types.Le(le=bound):
                high = f"{_bound_text(bound)}]"
    return "" if (low, high) == ("(-inf", "inf)") else f"{low}, {high}"


def _bound_text(bound: Any) -> str:
    """Return the bound as text; write powers of ten above a million as ``1e9``."""
    short = f"{bound:.0e}".replace("e+0", "e").replace("e+", "e")
    return short if bound > 1e6 and float(short) == bound else value_text(bound)


def meaning(hint: Any) -> str:
    """Return the text of an option's `Doc` annotation."""
    _, notes = split_hint(hint)
    return next((note.documentation for note in notes if isinstance(note, Doc)), "")


T = TypeVar("T", bound=Options)


@dataclasses.dataclass(frozen=True)
class Spec:
    """A component's name and its options as written by the user.

    Attributes:
        name: the component's name, e.g. ``topk``.
        options: the option texts, e.g. ``{"ratio": "0.001"}``.
    """

    name: str
    options: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a text such as ``topk:ratio=0.001,value_dtype=fp32``.

        Raises:
            OptionError: the text does not have that form.
        """
        name, colon, rest = text.strip().partition(":")
        options: dict[str, str] = {}
        for item in rest.split(",") if colon else []:
            key, equals, value = (part.strip() for part in item.partition("="))
            if not (key and equals and value):
                raise OptionError(f"'{text}' is malformed at '{item}'; write name:key=value,key=value")
            if key in options:
                raise OptionError(f"'{text}' gives {key} twice; give it once")
            options[key] = value
        if not name:
            raise OptionError(f"'{text}' names no component; write name:key=value,key=value")
        return cls(name, options)

    def __str__(self) -> str:
        items = ",".join(f"{key}={value}" for key, value in sorted(self.options.items()))
        return f"{self.name}:{items}" if items else self.name


def build(package: str, base: type[T], text: str) -> T:
    """Return the component that a spec describes, with validated options.

    Args:
        package: the package that contains the components, e.g. ``collectives``.
        base: the base class of the components, e.g. `Collective`.
        text: the spec, e.g. ``server:placement=sharded``.

    Raises:
        OptionError: the component or an option is unknown (the message names the nearest one), or a value is out of
            range.
    """
    spec = Spec.parse(text)
    component = _component(package, base, spec.name)
    if component is None:
        near = did_you_mean(spec.name, component_names(package, base))
        raise OptionError(f"there is no {base.__name__.lower()} '{spec.name}'{near}")
    return component.from_text(spec.options)


def component_names(package: str, base: type[Options]) -> list[str]:
    """Return the names of all components of a package, sorted; imports all of them."""
    return sorted({name for module in _modules(package) for name in _components(package, base, module)})


def _modules(package: str) -> list[str]:
    path = importlib.import_module(package).__path__
    return sorted(module.name for module in pkgutil.iter_modules(path) if not module.ispkg)


def _component(package: str, base: type[T], name: str) -> type[T] | None:
    """Return the component's class: from the file of its name, or else from the file that it shares with others."""
    modules = _modules(package)
    for module in sorted(modules, key=lambda module: module != name):
        if found := _components(package, base, module).get(name):
            return found
    return None


def _components(package: str, base: type[T], module: str) -> dict[str, type[T]]:
    """Return the components of a module by name."""
    found = importlib.import_module(f"{package}.{module}")
    return {
        value.component_name: value
        for value in vars(found).values()
        if isinstance(value, type) and issubclass(value, base) and value.is_component
    }
