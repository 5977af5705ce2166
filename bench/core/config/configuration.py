"""Base class of the commands' configurations, and the annotations with which a field declares an option.

``batch_size: Annotated[Count, Doc("samples per rank and step"), Flag(WHAT)] = 32`` declares an option completely. From
this declaration, the program derives the option on the command line, the check of its value, the JSON sent to the
ranks, the CSV column, the option's part in the experiment's identity, and the row in `docs/options.md`. Fields without
a `Flag` are not options; the program fills them in.
"""

import copy
import dataclasses
import functools
import hashlib
import json
import os
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import pydantic

from bench.core.errors import UsageError
from bench.core.functions import described
from collectives.options import Option, OptionError, options_of

# Default of an option for which the program chooses a value if the user gives none.
NOT_GIVEN: Any = None


@dataclasses.dataclass(frozen=True)
class Flag:
    """Annotation that makes a field an option of the command line.

    Attributes:
        panel: heading under which the help shows the option.
        name: the option with its dashes, such as "--cluster"; empty to derive it from the field's name.
        chosen: description of the value that the program chooses if the option is not given.
        kind: kind of component whose names the shell completes, such as "models"; empty if values name no component.
        many: True if the option takes several components, separated by commas.
        metavar: placeholder for the value in the help; empty to show the option's type and range.
        words: returns the words that the shell completes, as a dict from each word to its description; for options
            whose values name no component.
    """

    panel: str
    name: str = ""
    chosen: str = ""
    kind: str = ""
    many: bool = False
    metavar: str = ""
    words: Callable[[], Mapping[str, str]] | None = None


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Annotation that says how an option is recorded in CSV files.

    An option without this annotation has a column and is part of the experiment's identity.

    Attributes:
        unit: unit of the column; empty for text and plain counts.
        column: True if the option has a column.
        identity: True if two runs with different values of the option are different experiments.
    """

    unit: str = ""
    column: bool = True
    identity: bool = True


NOT_RECORDED = Recorded(column=False, identity=False)


def syntax(parse: Callable[[str], object]) -> pydantic.AfterValidator:
    """Return an annotation that checks and normalises the text of an option that has its own syntax.

    Args:
        parse: parses the text or raises `UsageError`; `str` of the parsed object is the normalised text.
    """
    return pydantic.AfterValidator(lambda text: str(parse(text)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandOption(Option):
    """An option of a command, or a field of the command's configuration that the program fills in.

    Attributes:
        flag: declaration of the option on the command line; None if the command line does not have it.
        recorded: declaration of how the option is recorded in CSV files.
    """

    flag: Flag | None
    recorded: Recorded

    @property
    def flag_name(self) -> str:
        """Return the option as it is written on the command line, such as `--batch-size`."""
        return (self.flag and self.flag.name) or f"--{self.name.replace('_', '-')}"

    @property
    def keyword(self) -> str:
        """Return the option as it is written in Python and in sweep files, such as `batch_size`."""
        return self.flag_name.removeprefix("--").replace("-", "_")

    @property
    def cell_type(self) -> type:
        """Return the Python type of the option's value when the value is not None: int, float, bool or str."""
        is_union = typing.get_origin(self.value_type) in (typing.Union, types.UnionType)
        alternatives = typing.get_args(self.value_type) if is_union else (self.value_type,)
        bare = next(each for each in alternatives if each is not type(None))
        return str if typing.get_origin(bare) is typing.Literal else bare


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """Base class of every command's configuration; values are checked when a configuration is created.

    Attributes:
        panels: headings of the command's help, in order; only options under these headings are on the command line.

    Raises:
        UsageError: a value is invalid, e.g. "--batch-size 0 is not possible: give 1 or more".
    """

    panels: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        self._check({option.name: getattr(self, option.name) for option in self.options()})

    def _check(self, values: Mapping[str, Any]) -> None:
        for option in self.options():
            if option.name not in values:
                continue
            value = values[option.name]
            if isinstance(value, os.PathLike):  # in Python, a caller may give a path instead of text
                value = os.fspath(value)
            try:
                is_absent = value is None and option.default is None
                object.__setattr__(self, option.name, None if is_absent else option.check(value))
            except OptionError as error:
                given = value if isinstance(value, (str, int, float, type(None))) else described(value)
                raise UsageError(f"{option.flag_name} {given} is not possible: {error}") from None

    @classmethod
    @functools.cache
    def options(cls) -> tuple[CommandOption, ...]:
        """Return the options in the order of `panels`, then the fields that the program fills in."""
        options = [
            CommandOption(
                name=each.name,
                hint=each.hint,
                default=each.default,
                flag=next((note for note in each.notes(Flag) if note.panel in cls.panels), None),
                recorded=next(iter(each.notes(Recorded)), Recorded()),
            )
            for each in options_of(cls)
        ]
        return tuple(sorted(options, key=lambda o: cls.panels.index(o.flag.panel) if o.flag else len(cls.panels)))

    def changed(self, **values: Any) -> Self:
        """Return a copy in which these values replace the old ones; only the new values are checked.

        Raises:
            UsageError: a value is invalid.
            TypeError: there is no field of such a name.
        """
        if unknown := values.keys() - {field.name for field in dataclasses.fields(self)}:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        copied = copy.copy(self)
        copied._check(values)
        return copied

    def choose(self, **values: Any) -> Self:
        """Return a copy in which these values replace the fields of the same name that are None."""
        return self.changed(**{name: value for name, value in values.items() if getattr(self, name) is None})

    def flag_values(self) -> dict[str, Any]:
        """Return the values of the options that the command line has, by option name."""
        return {option.name: getattr(self, option.name) for option in self.options() if option.flag}

    def identity(self) -> dict[str, Any]:
        """Return the values that identify the experiment, by option name."""
        return {option.name: getattr(self, option.name) for option in self.options() if option.recorded.identity}

    def columns(self) -> dict[str, Any]:
        """Return the values of the recorded options by column name; they are the same in all rows of a run."""
        return {option.name: getattr(self, option.name) for option in self.options() if option.recorded.column}

    @classmethod
    def from_json(cls, path: Path) -> Self:
        """Read a configuration whose fields are in a JSON file, such as `config.json`.

        Raises:
            UsageError: the file cannot be read, lacks a field of this class, or has an unknown field or invalid value.
        """
        try:
            return cls._from_text(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"{path} holds no {cls.__name__}: {error}") from None

    @classmethod
    @functools.lru_cache(maxsize=1)  # forked ranks inherit the configuration that their parent process has read
    def _from_text(cls, text: str) -> Self:
        values = json.loads(text)
        if missing := {field.name for field in dataclasses.fields(cls)} - set(values):
            raise ValueError(f"{', '.join(sorted(missing))} missing")
        return cls(**values)


def short_digest(value: Any) -> str:
    """Return the first ten hex digits of the SHA-256 of a value's JSON text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]
