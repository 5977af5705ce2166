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
    """Return a configuration's command-line options by keyword, which is the option's name with underscores."""
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
    """Convert the keywords of a Python call to names of options, and return the values by these names.

    Args:
        given: the values by keyword.
        function: the called function, which is decorated with `takes_options`.
        known: all options by keyword; by default the options of `bench run`.

    Raises:
        UsageError: a keyword is unknown: "bench.run has no option 'epoch' (did you mean 'epochs'?); ...".
    """
    for keyword in given:
        if keyword not in known:
            name, shown = function.__name__, list(inspect.signature(function).parameters)
            raise UsageError(
                f"bench.{name} has no option '{keyword}'{did_you_mean(keyword, shown)}; its options are those of "
                f"bench {name}, with underscores"
            )
    return {known[keyword].name: value for keyword, value in given.items()}
