"""Turn keywords of a Python call into options of `bench run`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from collectives.options import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])
# Option name of each keyword; a keyword is the option of the command line with underscores.
KEYWORDS = {option.keyword: option.name for option in RunConfig.options() if option.flag}


def takes_options(function: F) -> F:
    """Decorate a function so that `help` and completion show every keyword that its ``**options`` can hold."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    names = {each.name for each in own}
    further = [
        inspect.Parameter(keyword, inspect.Parameter.KEYWORD_ONLY, default=getattr(RunConfig, name))
        for keyword, name in KEYWORDS.items()
        if keyword not in names
    ]
    vars(function)["__signature__"] = signature.replace(parameters=[*own, *further])
    return function


def by_option_name(given: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Return the values of keywords by option name.

    Args:
        given: the keywords.
        function: the function that got them, decorated with `takes_options`.

    Raises:
        UsageError: "bench.run has no option 'epoch' (did you mean 'epochs'?); ...".
    """
    for keyword in given:
        if keyword not in KEYWORDS:
            known = list(inspect.signature(function).parameters)
            raise UsageError(
                f"bench.{function.__name__} has no option '{keyword}'{did_you_mean(keyword, known)}; its options are "
                "those of bench run, with underscores"
            )
    return {KEYWORDS[keyword]: value for keyword, value in given.items()}
