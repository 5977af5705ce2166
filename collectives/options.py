"""Options: dataclass fields with types, ranges and meanings, and the specs (``name:key=value``) that set them.

Every component of the project (compressor, collective, model, data set, optimizer) and the configuration of every
command is a keyword-only dataclass. Its fields are the options, written ``ratio: Annotated[float, Gt(0), Le(1),
Doc("sent entries / all entries")] = 0.01``. Values are checked in the same way on the command line (where every value
is a string) and in library use (``GroupTopK(ratio=0.01)``). This module does not import torch.
"""

import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import pkgutil
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import annotated_types
import pydantic
from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import Doc

MOST = 10**9  # largest count that an option accepts
Count = Annotated[int, Ge(1), Le(MOST)]
CountOrZero = Annotated[int, Ge(0), Le(MOST)]
Positive = Annotated[float, Gt(0), Le(1e12)]
PositiveOrZero = Annotated[float, Ge(0), Le(1e12)]


class OptionError(ValueError):
    """An option does not exist, or its value is out of range; the message is one sentence for the user."""


class Incompatible(OptionError):
    """Components, with their options, do not work together; the message says why, and what would work."""


def incompatibility(check: Callable[..., None], *args: Any) -> str | None:
    """Return the message of the `Incompatible` that `check(*args)` raises; None if the call raises nothing."""
    try:
        check(*args)
    except Incompatible as error:
        return str(error)
    return None


def raise_first(error: type[Exception], *rules: tuple[object, str]) -> None:
    """Raise `error` with the sentence of the first rule that applies; each rule is (True if it applies, sentence)."""
    for applies, sentence in rules:
        if applies:
            raise error(sentence)


_LISTS = (tuple, list, frozenset, set)
N = TypeVar("N")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of one option: a field of a component, or of a command's configuration.

    Attributes:
        name: name of the field.
        hint: type of the field, with its annotations (range and meaning).
        default: default value of the field.
    """

    name: str
    hint: Any
    default: Any

    @property
    def value_type(self) -> Any:
        """Return the option's type without its annotations."""
        return typing.get_args(self.hint)[0] if typing.get_origin(self.hint) is Annotated else self.hint

    def notes(self, kind: type[N]) -> list[N]:
        """Return the annotations of class `kind` in the option's type, including its union members and list items."""
        return [note for note in _notes(self.hint) if isinstance(note, kind)]

    @functools.cached_property
    def _adapter(self) -> pydantic.TypeAdapter[Any]:  # made on first use, because making it takes long
        return pydantic.TypeAdapter(self.hint, config=pydantic.ConfigDict(allow_inf_nan=False))

    def check(self, value: Any) -> Any:
        """Return the value converted to the option's type.

        Raises:
            OptionError: the value does not fit the type or the range, or is infinite or NaN; the message says why.
        """
        try:
            checked = self._adapter.validate_python(value)
        except pydantic.ValidationError as error:
            raise OptionError(_what_to_give(error, self.meaning)) from None
        if isinstance(value, bool) and not isinstance(checked, bool):  # pydantic reads True as 1
            raise OptionError("give a number")
        return checked

    def from_text(self, text: str) -> Any:
        """Convert a user's text to a value, if it stands for None, a list, or a choice of a `Literal`.

        Examples: ``none`` becomes None, ``norm+bias`` becomes a list, and ``4`` becomes the number 4 if the choices are
        numbers. Other text is returned unchanged; `check` converts it.
        """
        alternatives, origin = typing.get_args(self.value_type), typing.get_origin(self.value_type)
        if text == "none" and type(None) in alternatives:
            return None
        if origin in _LISTS:
            return [] if text == "none" else [item for item in text.split("+") if item]
        if origin is Literal:
            return next((choice for choice in alternatives if value_text(choice) == text), text)
        return text

    @property
    def meaning(self) -> str:
        """Return the text of the option's `Doc` annotation."""
        return next((note.documentation for note in self.notes(Doc)), "")

    @property
    def range(self) -> str:
        """Return the permitted interval in mathematical notation, e.g. ``(0, 1]``; empty if there is none."""
        low, high = "(-inf", "inf)"
        for note in self.notes(annotated_types.BaseMetadata):
            match note:
                case Gt(gt=bound):
                    low = f"({_bound_text(bound)}"
                case Ge(ge=bound):
                    low = f"[{_bound_text(bound)}"
                case Lt(lt=bound):
                    high = f"{_bound_text(bound)})"
                case Le(le=bound):
                    high = f"{_bound_text(bound)}]"
        return "" if (low, high) == ("(-inf", "inf)") else f"{low}, {high}"

    def describe(self) -> dict[str, str]:
        """Return the option's name, type, default, range and meaning as text for the user, under these five keys."""
        return {
            "name": self.name,
            "type": _type_text(self.value_type),
            "default": value_text(self.default),
            "range": self.range,
            "meaning": self.meaning,
        }


_OPTIONS: dict[type, tuple[Option, ...]] = {}  # filled once per class, because reading annotations takes long


def options_of(cls: type) -> tuple[Option, ...]:
    """Return the options that the fields of a dataclass declare, in declaration order."""
    if cls not in _OPTIONS:
        hints = typing.get_type_hints(cls, include_extras=True)
        _OPTIONS[cls] = tuple(
            Option(
                name=field.name,
                hint=hints[field.name],
                default=field.default if field.default_factory is dataclasses.MISSING else field.default_factory(),
            )
            for field in dataclasses.fields(cls)
            if field.init
        )
    return _OPTIONS[cls]


@dataclasses.dataclass(kw_only=True, eq=False)
class Options:
    """Base class of every component, such as a collective: it checks its options when it is created.

    A subclass may have an option `preset` (default "none"), whose value changes the defaults of other options. An
    option that the user gives takes precedence over the preset. The docstring of the subclass must mention each preset
    as ``preset=NAME``, because the registry finds presets there.

    Attributes:
        presets: for each preset, the values that it sets, by option name.
        given: names of the options that the user gave.

    Raises:
        OptionError: a value does not fit its declared type or range: "topk: ratio=2 is not possible: give 1 or less".
    """

    component_name: ClassVar[str] = ""
    is_component: ClassVar[bool] = False
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    given: frozenset[str] = dataclasses.field(init=False, repr=False, compare=False)

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Record which options the user gave."""
        component = super().__new__(cls)
        component.given = frozenset(given)
        return component

    def __init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        """Set `component_name`, by which users select the class: `name`, or by default the name of the class's file.

        The class is a component that users can select if `name` is given, or if the class is named after its file.
        """
        super().__init_subclass__(**kwargs)
        file_name = cls.__module__.rpartition(".")[2]
        cls.component_name = name or file_name
        cls.is_component = name is not None or cls.__name__.lower() == file_name.replace("_", "")

    def __post_init__(self) -> None:
        preset = vars(self).get("preset", "none")  # the check below refuses an unknown preset
        for name, value in self.presets.get(preset, {}).items():
            if name not in self.given:
                setattr(self, name, value)
        for option in options_of(type(self)):
            value = getattr(self, option.name)
            try:
                setattr(self, option.name, option.check(option.from_text(value) if isinstance(value, str) else value))
            except OptionError as error:
                raise OptionError(f"{self.component_name}: {option.name}={value} is not possible: {error}") from None

    def __str__(self) -> str:
        """Return the component as a spec such as ``topk:ratio=0.1``, without options that have their default value."""
        return str(Spec(self.component_name, self.option_texts(only_changed=True)))

    @classmethod
    def from_text(cls, values: Mapping[str, Any]) -> Self:
        """Return the component with these options by name; each is a text as in ``name:key=value``, or a value.

        Raises:
            OptionError: an option is unknown (the message names the nearest one), or a value is out of range.
        """
        known = cls.option_names()
        for name in values:
            if name not in known:
                raise OptionError(
                    f"{cls.component_name} has no option '{name}'{did_you_mean(name, known)}; "
                    + (f"its options are {', '.join(known)}" if known else "it has none")
                )
        return cls(**values)

    def obstacle_to_resizing(self) -> str:
        """Return why a run with this component cannot continue with another number of ranks; empty if it can."""
        return ""

    @classmethod
    def option_names(cls) -> list[str]:
        """Return the names of the options, in declaration order."""
        return [option.name for option in options_of(cls)]

    def option_values(self) -> dict[str, Any]:
        """Return each option's value by its name, in a form that the class's constructor accepts."""
        return {name: getattr(self, name) for name in self.option_names()}

    def option_texts(self, *, only_changed: bool = False) -> dict[str, str]:
        """Return each option's value by its name, as text that ``from_text`` accepts, sorted by name.

        Args:
            only_changed: True to leave out options that have their default value.
        """
        defaults = {option.name: value_text(option.default) for option in options_of(type(self))}
        texts = {name: value_text(getattr(self, name)) for name in sorted(defaults)}
        preset = self.presets.get(texts.get("preset", "none"), {})
        defaults |= {name: value_text(value) for name, value in preset.items()}
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


def _notes(hint: Any) -> list[Any]:
    inner = typing.get_args(hint)[:1] if typing.get_origin(hint) is Annotated else typing.get_args(hint)
    return [*getattr(hint, "__metadata__", ()), *(note for part in inner for note in _notes(part))]


def _type_text(bare: Any) -> str:
    """Return a type as text for the user, such as ``float``, ``fast|exact``, ``list of norm|bias`` or ``int|none``."""
    origin, alternatives = typing.get_origin(bare), typing.get_args(bare)
    if origin is Annotated:
        return _type_text(alternatives[0])
    if origin is Literal:
        return "|".join(str(choice) for choice in alternatives)
    if origin in _LISTS:
        return "list of " + _type_text(alternatives[0])
    if alternatives:
        return "|".join("none" if each is type(None) else _type_text(each) for each in alternatives)
    return getattr(bare, "__name__", str(bare))


_WHOLE, _BOOL = "a whole number", "true or false"
_GIVE = {  # type of a pydantic error -> what the user should give; placeholders are filled from the error's context
    "int_type": _WHOLE, "int_parsing": _WHOLE, "int_from_float": _WHOLE, "int_parsing_size": _WHOLE,
    "float_type": "a number", "float_parsing": "a number", "finite_number": "a finite number",
    "bool_type": _BOOL, "bool_parsing": _BOOL, "none_required": "none", "tuple_type": "a list",
    "string_type": "text in quotes ({meaning})",
    "greater_than_equal": "{ge} or more", "greater_than": "more than {gt}",
    "less_than_equal": "{le} or less", "less_than": "less than {lt}", "literal_error": "{expected}",
}  # fmt: skip


def _what_to_give(error: pydantic.ValidationError, meaning: str) -> str:
    """Return advice to replace a value that was refused, such as "give 1 or more" or "give a whole number".

    If the type of an error is not in `_GIVE`, return pydantic's own message.

    Args:
        error: why the value was refused.
        meaning: what the option means; contains an example if the option's text has a special form.
    """
    found = error.errors()  # one error for each alternative of a union, and for each wrong item of a list
    if unknown := [each["msg"] for each in found if each["type"] not in _GIVE]:
        return unknown[0]
    wanted = []
    for each in found:
        context = each.get("ctx", {}).items()
        texts = {k: v.replace("'", "") if isinstance(v, str) else _bound_text(v) for k, v in context}
        wanted.append(_GIVE[each["type"]].format(meaning=meaning, **texts))
    return f"give {', or '.join(dict.fromkeys(wanted))}"


def _bound_text(bound: Any) -> str:
    """Return a bound of an option's range as text; a power of ten above a million is written like ``1e9``."""
    short = f"{bound:.0e}".replace("e+0", "e").replace("e+", "e")
    return short if bound > 1e6 and float(short) == bound else value_text(bound)


T = TypeVar("T", bound=Options)


@dataclasses.dataclass(frozen=True)
class Spec:
    """The name and the options of a component (such as a compressor), as the user writes them.

    Attributes:
        name: the component's name, e.g. ``topk``; or a function in a user's file, e.g. ``path/net.py:build``.
        options: the options as texts, e.g. ``{"ratio": "0.001"}``.
    """

    name: str
    options: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the spec that a text such as ``topk:ratio=0.001,value_dtype=fp32`` describes.

        Raises:
            OptionError: the text does not have the form ``name:key=value,key=value``, or gives an option twice.
        """
        name, colon, rest = text.strip().partition(":")
        if "." in name and colon:  # a file or module, followed by the function
            function, colon, rest = rest.partition(":")
            name = f"{name}:{function}"
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

    @property
    def is_function(self) -> bool:
        """Return True if the name stands for a function in a user's file."""
        return ":" in self.name

    @property
    def label(self) -> str:
        """Return the name as part of a label; for a user's function, the name of its file or module without folder."""
        return self.name.partition(":")[0].removesuffix(".py").rpartition("/")[2]

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
    for component in _components(package, base, first=spec.name):
        if component.component_name == spec.name:
            return component.from_text(spec.options)
    for point in importlib.metadata.entry_points(group=f"bench.{package}", name=spec.name):
        try:  # an extension, or another distribution
            added: type[T] = point.load()
        except ModuleNotFoundError as error:
            raise OptionError(
                f"'{spec.name}' is an extension that is not installed here ({error}); install it"
            ) from None
        added.component_name = spec.name
        return added.from_text(spec.options)
    near = did_you_mean(spec.name, component_names(package, base))
    raise OptionError(f"there is no {base.__name__.lower()} '{spec.name}'{near}")


def component_names(package: str, base: type[Options]) -> list[str]:
    """Return the sorted names of the components in a package that derive from `base`; this imports all its modules."""
    return sorted({component.component_name for component in _components(package, base)})


def _components(package: str, base: type[T], first: str = "") -> Iterator[type[T]]:
    """Import a package's modules, starting with the one named `first`; yield the components that derive from `base`."""
    found = pkgutil.iter_modules(importlib.import_module(package).__path__)
    for module in sorted((m.name for m in found if not m.ispkg), key=lambda name: (name != first, name)):
        for value in vars(importlib.import_module(f"{package}.{module}")).values():
            if isinstance(value, type) and issubclass(value, base) and value.is_component:
                yield value
