"""Every number that a user can set has a lower and an upper limit; others are refused before anything is built."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le, Lt

from bench.core import registry
from bench.core.config.configuration import Configuration
from bench.core.config.run import RunConfig
from bench.core.config.syntax import Straggler
from bench.core.errors import UsageError
from bench.core.units import parse_duration, parse_rate, parse_size
from bench.report.gates import Gate
from collectives.options import Option, OptionError, Options, options_of
from tests.testing.invoke import commands, invoke

COMMANDS: dict[type[Configuration], str] = {RunConfig: "run"}
IMPOSSIBLE = ["inf", "-inf", "nan", "1e999", "9" * 30, "-" + "9" * 30, "9" * 5000]


def _is_number(hint: Any) -> bool:
    bare = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
    alternatives = () if typing.get_origin(bare) is typing.Literal else typing.get_args(bare)
    return bare in (int, float) or any(map(_is_number, alternatives))


def _numbers(cls: type) -> list[str]:
    return [option.name for option in options_of(cls) if _is_number(option.hint)]


def _bounds(option: Option) -> tuple[float, float]:
    """Return the limits of a declaration; infinite if it has none."""
    low, high = -math.inf, math.inf
    for note in option.notes(object):
        match note:
            case Gt(gt=bound) | Ge(ge=bound):
                low = typing.cast(float, bound)
            case Lt(lt=bound) | Le(le=bound):
                high = typing.cast(float, bound)
    return low, high


def numbers_of(configurations: Iterable[type[Configuration]]) -> list[tuple[type[Configuration], str]]:
    """Return (configuration, name) of every numeric option of a command."""
    return [
        (cls, option.name)
        for cls in configurations
        for option in cls.options()
        if option.flag and option.name in _numbers(cls)
    ]


def assert_two_finite_ends(cls: type, name: str) -> None:
    """Fail unless an option declares both limits and refuses values beyond them."""
    (option,) = (option for option in options_of(cls) if option.name == name)
    low, high = _bounds(option)
    assert math.isfinite(low), "say the smallest with Ge or Gt"
    assert math.isfinite(high), "say the largest with Le or Lt"
    for value in (*IMPOSSIBLE, math.inf, math.nan, 10 * abs(low) + 10 * abs(high) + 1):
        with pytest.raises(OptionError):
            option.check(value)


def assert_among_options(command_of: dict[type[Configuration], str]) -> None:
    """Fail unless Typer treats exactly those options of these commands as numbers that their configurations declare."""
    declared = {(command_of[cls], option.flag_name) for cls in command_of for option in cls.options() if option.flag}
    numbers = {
        (command_of[cls], option.flag_name) for cls, name in numbers_of(command_of) for option in cls.options()
        if option.name == name
    }  # fmt: skip
    assert numbers == declared & set(_options_of_commands())


OF_CONFIGURATIONS = numbers_of(COMMANDS)
OF_COMPONENTS = [
    (component, name)
    for kind in registry.KINDS
    for component in (registry.load(kind, name) for name in registry.entries(kind))
    for name in _numbers(component)
]
DECLARED: list[tuple[type, str]] = [*OF_CONFIGURATIONS, *OF_COMPONENTS]


def test_there_are_numbers() -> None:
    assert len(OF_CONFIGURATIONS) > 20
    assert len(OF_COMPONENTS) > 60


@pytest.mark.parametrize(("cls", "name"), DECLARED, ids=[f"{cls.__name__}-{name}" for cls, name in DECLARED])
def test_it_has_two_finite_ends_and_takes_nothing_beyond(cls: type, name: str) -> None:
    assert_two_finite_ends(cls, name)


@pytest.mark.parametrize("value", IMPOSSIBLE)
@pytest.mark.parametrize(("component", "name"), OF_COMPONENTS[::7])
def test_a_component_refuses_it_in_one_sentence(component: type[Options], name: str, value: str) -> None:
    with pytest.raises(OptionError, match=f"{name}=.* is not possible"):
        component.from_text({name: value})


def _options_of_commands() -> list[tuple[str, str]]:
    """Return (command, flag) of every option that Typer reads as a number."""
    return [
        (name, parameter.opts[0])
        for name, command in commands().items()
        for parameter in command.params
        if parameter.type_descriptor.annotation in (int, float)
    ]


@pytest.mark.parametrize(("command", "flag"), _options_of_commands())
def test_a_command_refuses_it(command: str, flag: str) -> None:
    for value in IMPOSSIBLE:
        answer = invoke(command, *(["FILE"] if command in ("sweep", "trace") else []), flag, value)
        assert answer.code == 2, value
        assert flag in answer.error


def test_every_declared_option_is_among_those_of_the_commands() -> None:
    assert_among_options(COMMANDS)


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (parse_rate, ["99999gbit", "1e99gbit", "9" * 400 + "bit"]),
        (parse_size, ["1e30GB", "9" * 400, "9" * 5000, "1001GB"]),
        (parse_duration, ["1e99h", "1001d", "9" * 400 + "s"]),
        (Straggler.parse, ["rank=1,slowdown=1e300", f"rank={'9' * 5000},slowdown=2", "rank=1,slowdown=1e999"]),
        (Gate.parse, [f"accuracy:{'9' * 400}", f"slower:{'9' * 5000}%"]),
    ],
    ids=["rate", "size", "duration", "straggler", "gate"],
)
def test_a_number_in_a_text_has_an_end_too(parse: Any, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(UsageError):
            parse(text)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--seeds", "1-100000000000"], "names more than 1000 runs"),
        (["--seeds", "9" * 5000], "is not a list of seeds"),
        (["--hosts", "1000000000000"], "--hosts 1000000000000 is not possible"),
        (["--hosts", "255"], "255 virtual hosts are not possible"),
        (["--lr-scaling", "linear:base=" + "9" * 5000], "write none, linear or linear:base=N"),
        (["--rdzv-endpoint", "nonsense"], "is not HOST:PORT"),
        (["--rdzv-endpoint", "localhost:²²"], "is not HOST:PORT"),
        (["--rdzv-endpoint", "localhost:65536"], "is not HOST:PORT"),
        (["--rdzv-endpoint", ":1"], "is not HOST:PORT"),
    ],
)
def test_a_dry_run_refuses_what_a_run_would(arguments: list[str], sentence: str) -> None:
    answer = invoke("run", "--dry-run", *arguments)
    assert answer.code == 2
    assert sentence in answer.error
    assert "\n" not in answer.error


def test_hosts_of_a_file_are_counted_before_they_are_made(tmp_path: Any) -> None:
    (tmp_path / "many.toml").write_text("[[host]]\ncount = 100000000000\n", encoding="utf-8")
    answer = invoke("run", "--dry-run", "--cluster", str(tmp_path / "many.toml"))
    assert answer.code == 2
    assert "makes more than 254 virtual hosts" in answer.error


def test_the_ends_are_shown_short() -> None:
    (option,) = (option for option in RunConfig.options() if option.name == "steps")
    assert option.range == "[1, 1e9]"
