"""Configuration: what a command was asked for, each option declared once as an annotated field.

``batch_size: Annotated[Count, Doc("samples per rank and step"), Flag(WHAT)] = 32`` says all there is to say of an
option. The command line, the check of its value, the JSON that crosses to the ranks, the columns of the CSV, what
identifies an experiment and the table in `docs/options.md` follow from it. A field without a `Flag` is filled in by the
program.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import pydantic

from bench.core.errors import UsageError
from collectives.options import adapters_of, hints_of, meaning, range_text, split_hint

T = TypeVar("T")

NOT_GIVEN: Any = None
"""Default of an option for which the program chooses a value; it is there once the configuration is resolved."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """How an option stands on the command line.

    Attributes:
        panel: heading under which the help shows it.
        name: the flag, where it is not the field's name.
        chosen: what the program chooses where nothing is given, in words.
        room: the components of this room complete in the shell.
        many: several of them, separated by commas.
    """

    panel: str
    name: str = ""
    chosen: str = ""
    room: str = ""
    many: bool = False


@dataclasses.dataclass(frozen=True)
class Recorded:
    """How an option shows in CSV files; without this note it is a column and identifies the experiment.

    Attributes:
        unit: of the column.
        column: it is one.
        identity: two runs that differ in it are two experiments.
        absent: what rows of files mean that lack the column.
    """

    unit: str = ""
    column: bool = True
    identity: bool = True
    absent: Any = None


NOT_RECORDED = Recorded(column=False, identity=False)


@dataclasses.dataclass(frozen=True)
class Form:
    """A text that has a form of its own.

    Attributes:
        parse: reads it or raises a `UsageError`; what it returns is, as a text, the one way to write it.
    """

    parse: Callable[[str], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """What one field declares.

    Attributes:
        name: the field's, the column's and the JSON key.
        type: bare type, without annotations.
        default: None where the program chooses, or nothing is meant.
        range: permitted numbers in mathematical notation, or empty.
        meaning: one line.
        flag: None: not on the command line.
        recorded: how it shows in CSV files.
        form: None: any text of the type will do.
    """

    name: str
    type: Any
    default: Any
    range: str
    meaning: str
    flag: Flag | None
    recorded: Recorded
    form: Form | None

    @property
    def flag_name(self) -> str:
        """As the command line writes it."""
        return (self.flag and self.flag.name) or f"--{self.name.replace('_', '-')}"

    @property
    def cell_type(self) -> type:
        """Python type of a value that is given: int, float, bool or str."""
        bare = next(each for each in _alternatives(self.type) if each is not type(None))
        return str if typing.get_origin(bare) is typing.Literal else bare


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """Base of every command's configuration; a value that is given is checked against its declaration.

    Class facts:
        panels: headings of the command's help, in this order; options of other panels the command does not offer.

    Raises:
        UsageError: a value does not fit, e.g. "--batch-size 0 is not possible: Input should be greater than or equal to
            1".
    """

    panels: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for option in self.options():
            value = getattr(self, option.name)
            if value is not None or option.default is not None:
                object.__setattr__(self, option.name, self._checked(option, value))

    def _checked(self, option: Option, value: Any) -> Any:
        try:
            value = adapters_of(type(self))[option.name].validate_python(value)
        except pydantic.ValidationError as error:
            detail = error.errors()[0]["msg"]
            raise UsageError(f"{option.flag_name} {value} is not possible: {detail}") from None
        return str(option.form.parse(value)) if option.form else value

    @classmethod
    @functools.cache
    def options(cls) -> tuple[Option, ...]:
        """Every option in the order of the panels, then what the program fills in."""
        hints = hints_of(cls)
        options = [_option(field, hints[field.name], cls.panels) for field in dataclasses.fields(cls)]
        return tuple(sorted(options, key=lambda o: cls.panels.index(o.flag.panel) if o.flag else len(cls.panels)))

    def choose(self, **values: Any) -> Self:
        """The configuration with these values for options that were not given."""
        chosen = {name: value for name, value in values.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **chosen)

    def identity(self) -> dict[str, Any]:
        """What identifies the experiment."""
        return {option.name: getattr(self, option.name) for option in self.options() if option.recorded.identity}

    def columns(self) -> dict[str, Any]:
        """The columns that say what was asked for, equal in all rows."""
        return {option.name: getattr(self, option.name) for option in self.options() if option.recorded.column}

    def to_json(self) -> str:
        """The configuration as JSON text, keys in declaration order."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, path: Path) -> Self:
        """Read what `to_json` wrote.

        Raises:
            UsageError: the file is not such a configuration.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if missing := {field.name for field in dataclasses.fields(cls)} - set(values):
                raise ValueError(f"{', '.join(sorted(missing))} missing")
            return cls(**values)
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"{path} holds no {cls.__name__}: {error}") from None


def short_digest(value: Any) -> str:
    """Ten hex digits over what JSON writes of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


def _option(field: dataclasses.Field[Any], hint: Any, panels: tuple[str, ...]) -> Option:
    bare, notes = split_hint(hint)
    flag = _note(notes, Flag)
    return Option(
        name=field.name,
        type=bare,
        default=field.default,
        range=range_text(hint),
        meaning=meaning(hint),
        flag=flag if flag and flag.panel in panels else None,
        recorded=_note(notes, Recorded) or Recorded(),
        form=_note(notes, Form),
    )


def _note(notes: tuple[Any, ...], kind: type[T]) -> T | None:
    return next((note for note in notes if isinstance(note, kind)), None)


def _alternatives(type_: Any) -> tuple[Any, ...]:
    return typing.get_args(type_) if typing.get_origin(type_) in (typing.Union, types.UnionType) else (type_,)
