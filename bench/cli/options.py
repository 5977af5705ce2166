"""Turn the options that a configuration declares into options of a Typer command."""

import inspect
import itertools
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.core import registry
from bench.core.columns import Column
from bench.core.config.configuration import CommandOption, Configuration
from bench.core.config.run import OUTPUT
from bench.core.errors import UsageError
from bench.core.rows import RowWriter, StoreError


def given_options(context: typer.Context) -> list[str]:
    """Return the names of a command's parameters that the user gave."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]


def complete_from(
    words: Callable[[], Mapping[str, str]], *, several: bool = False
) -> Callable[[str], list[tuple[str, str]]]:
    """Return a function with which Typer completes words on the command line.

    The returned function takes what the user has typed, and returns a tuple (word, description) for each word that
    begins with this text.

    Args:
        words: returns the words with their descriptions.
        several: the user types a list of words, separated by commas; complete the last of them.
    """

    def completer(incomplete: str) -> list[tuple[str, str]]:
        before, comma, last = incomplete.rpartition(",") if several else ("", "", incomplete)
        return [(f"{before}{comma}{name}", text) for name, text in words().items() if name.startswith(last)]

    return completer


def complete(kind: str, *, several: bool = False) -> Callable[[str], list[tuple[str, str]]]:
    """Return a function with which Typer completes the names of one kind of component on the command line.

    Args:
        kind: the kind, such as ``compressors``.
        several: the user types a list of names, separated by commas; complete the last of them.
    """
    return complete_from(
        lambda: {name: entry.description for name, entry in registry.entries(kind).items()}, several=several
    )


RowFile = Annotated[
    Path | None,
    typer.Option(
        help="Append each row to this CSV file as soon as it is measured.", metavar="FILE", rich_help_panel=OUTPUT
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print data as JSON on stdout.", rich_help_panel=OUTPUT)]


def takes(
    *configurations: type[Configuration], several: Mapping[str, str] | None = None, hidden: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command's function so that the command also takes all options of the given configurations.

    The function gets the options of each configuration as one object; these objects are its first arguments.

    Args:
        configurations: classes of these objects.
        several: for each option that may be repeated, a text to add to its help. The configuration gets all values of
            the option as one text, separated by commas.
        hidden: names of options that the help does not show, because the command refuses them with its own message.
    """
    lists = several or {}
    panels = [panel for configuration in configurations for panel in configuration.panels]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[len(configurations) :]
        flags = {each: [option for option in each.options() if option.flag] for each in configurations}
        options = itertools.chain(*flags.values())
        declared = [_parameter(each, lists.get(each.name), is_hidden=each.name in hidden) for each in options]

        def command(**given: Any) -> None:
            given |= {name: ",".join(given[name]) for name in lists if given.get(name) is not None}
            objects = [
                configuration(**{each.name: given.pop(each.name) for each in taken if each.name in given})
                for configuration, taken in flags.items()
            ]
            function(*objects, **given)

        parameters = sorted([*declared, *own], key=lambda each: _place(each, panels))
        command.__doc__ = function.__doc__
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        )
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _place(parameter: inspect.Parameter, panels: list[str]) -> int:
    note = getattr(parameter.annotation, "__metadata__", (None,))[0]  # the help does not show the context
    heading = getattr(note, "rich_help_panel", None)
    return panels.index(heading) if heading in panels else -1  # the command's own panels come first


def row_writer(out: Path | None, columns: tuple[Column, ...]) -> RowWriter | None:
    """Return a writer for the CSV file `out` that the user named; None if `out` is None.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        return RowWriter(out, columns) if out else None
    except StoreError as error:
        raise UsageError(str(error)) from None


def _parameter(option: CommandOption, several: str | None, *, is_hidden: bool) -> inspect.Parameter:
    flag, is_tuple = option.flag, typing.get_origin(option.value_type) is tuple
    assert flag is not None
    is_list = is_tuple or several is not None
    completed = complete(flag.kind, several=flag.many or is_list) if flag.kind else None
    info = typer.Option(
        *([flag.name] if flag.name else []),
        help=f"{option.meaning[0].upper()}{option.meaning[1:]}{f'; {several}' if several else ''}.",
        rich_help_panel=flag.panel,
        hidden=is_hidden,
        metavar=flag.metavar or (f"{option.cell_type.__name__} {option.range}" if option.range else None),
        show_default=flag.chosen or True,
        autocompletion=complete_from(flag.words) if flag.words else completed,
    )
    default = None if is_tuple else [option.default] if is_list and option.default is not None else option.default
    kind = list[str] if is_list else option.value_type
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind if default is not None else kind | None, info],
    )
