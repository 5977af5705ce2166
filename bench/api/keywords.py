"""Turn keywords of a Python call into options of a command."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from bench.core.config.configuration import CommandOption, Configuration
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from collectives.options import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])


def keywords_of(configuration: type[Configuration]) -> dict[str, CommandOption]:
    """Return the options that a command has of a configuration by keyword: the option's name with underscores."""
    return {option.keyword: option for option in configuration.options() if option.flag}


KEYWORDS = keywords_of(RunConfig)


def takes_options(*configurations: type[Configuration]) -> Callable[[F], F]:
    """Decorate a function so that `help` and completion show every keyword that its ``**options`` can hold.

    Args:
        configurations: the classes that declare these options.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        names = {each.name for each in own}
        further = [
            inspect.Parameter(
                keyword, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=option.value_type
            )
            for configuration in configurations
            for keyword, option in keywords_of(configuration).items()
            if keyword not in names
        ]
        vars(function)["__signature__"] = signature.replace(parameters=[*own, *further])
        return function

    return decorate


def by_option_name(
    given: Mapping[str, Any], function: Callable[..., Any], known: Mapping[str, CommandOption] = KEYWORDS
) -> dict[str, Any]:
    """Return the values of keywords by option name.

    Args:
        given: the keywords.
        function: the function that got them, decorated with `takes_options`.
        known: the options by keyword; by default those of `bench run`.

    Raises:
        UsageError: "bench.run has no option 'epoch' (did you mean 'epochs'?); ...".
    """
    for keyword in given:
        if keyword not in known:
            name, shown = function.__name__, list(inspect.signature(function).parameters)
            raise UsageError(
                f"bench.{name} has no option '{keyword}'{did_you_mean(keyword, shown)}; its options are those of "
                f"bench {name}, with underscores"
            )
    return {known[keyword].name: value for keyword, value in given.items()}
