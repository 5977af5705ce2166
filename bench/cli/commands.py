"""Find the commands of `bench`: built-in ones, and those that extensions add.

Extensions add commands by entry points of the group ``bench.commands``.

The module of a command is imported when the command is called, or when all commands are listed.
"""

import ast
import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typing_extensions import override

from bench.core import registry
from bench.core.errors import PluginError, UsageError

ANSWER, MEASURE = "Decide, train and compare", "Measure compressors and collectives alone"
MODEL, LOOK_AFTER = "Predict steps on other links and machines", "Components, data and this machine"
PANELS = (ANSWER, MEASURE, MODEL, LOOK_AFTER)
GROUP = "commands"

# Built-in commands in the order of the help: (panel, function). The module with the command's name contains the
# function and EXAMPLES.
BUILT_IN = {
    "decide": (ANSWER, "decide"),
    "run": (ANSWER, "run"),
    "sweep": (ANSWER, "sweep"),
    "compare": (ANSWER, "compare"),
    "report": (ANSWER, "report"),
    "plot": (ANSWER, "plot"),
    "list": (LOOK_AFTER, "list_components"),
    "data": (LOOK_AFTER, "data"),
    "doctor": (LOOK_AFTER, "doctor"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """One command of `bench`; an entry point of the group ``bench.commands`` can name such an object.

    Attributes:
        function: the function to call; Typer reads the command's options from its parameters, and the help from its
            docstring.
        epilog: text below the options, such as examples.
        panel: heading under which `bench --help` lists the command.
        context_settings: settings of the command's context, as Typer takes them.
    """

    function: Callable[..., None]
    epilog: str = ""
    panel: str = "Extensions"
    context_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Commands(TyperGroup):
    """The group of all commands of `bench`; each command is imported when it is called or listed."""

    @override
    def format_help(self, ctx: Any, formatter: Any) -> None:
        # Do not import the built-in commands, and read no command's options, because both take long.
        for name, (panel, function) in BUILT_IN.items():
            self.commands[name] = TyperCommand(name, help=_docstring(name, function), rich_help_panel=panel)
        for name in registry.plugins(GROUP).keys() - BUILT_IN:
            with contextlib.suppress(PluginError):  # `list_commands` warns about the error
                found = _load(name)
                self.commands[name] = TyperCommand(
                    name, help=inspect.getdoc(found.function), rich_help_panel=found.panel
                )
        super().format_help(ctx, formatter)

    @override
    def list_commands(self, ctx: Any) -> list[str]:  # the commands that can be imported, by panel
        for name in (*BUILT_IN, *registry.plugins(GROUP)):
            try:
                self._import(name)
            except PluginError as error:
                registry.warn_once(f"left out: {error}")
        order = {panel: number for number, panel in enumerate(PANELS)}
        names = [name for name in dict.fromkeys((*BUILT_IN, *registry.plugins(GROUP))) if name in self.commands]
        return sorted(names, key=lambda name: order.get(vars(self.commands[name])["rich_help_panel"], len(PANELS)))

    @override
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in registry.plugins(GROUP) and (package := registry.package_of(GROUP, cmd_name)):
            raise UsageError(
                f"bench {cmd_name} comes with the extension {package}, which is missing here; install gradwire again "
                "to get it (pip install --force-reinstall gradwire; in a checkout: make setup)"
            )
        if cmd_name in BUILT_IN or cmd_name in registry.plugins(GROUP):
            self._import(cmd_name)
        else:
            self.list_commands(ctx)  # so that Typer can suggest a similar name
        return self.commands.get(cmd_name)

    def _import(self, name: str) -> None:
        if name in self.commands:
            return
        found = _load(name)
        alone = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)
        alone.command(
            name,
            epilog=found.epilog or None,
            rich_help_panel=found.panel,
            context_settings=dict(found.context_settings),
        )(found.function)
        self.commands[name] = typer.main.get_command(alone)


def _load(name: str) -> Command:
    """Import a command's module and return the command.

    Raises:
        PluginError: the module cannot be imported, or the entry point names no command.
    """
    if name in BUILT_IN:
        panel, function = BUILT_IN[name]
        module = importlib.import_module(f"bench.cli.{name}")
        return Command(function=getattr(module, function), epilog=module.EXAMPLES, panel=panel)
    loaded = registry.load_plugin(GROUP, name)
    if not callable(loaded) and not isinstance(loaded, Command):
        raise PluginError(
            f"command '{name}' of {registry.plugins(GROUP)[name].provider} is neither a function nor "
            "a bench.cli.commands.Command"
        )
    return loaded if isinstance(loaded, Command) else Command(function=loaded)


def _docstring(command: str, function: str) -> str | None:  # read from the command's file
    tree = ast.parse(Path(__file__).with_name(f"{command}.py").read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return next(ast.get_docstring(node) for node in functions if node.name == function)
