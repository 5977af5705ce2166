"""One declaration per option: a line in a class is a flag, a help text, a check, a key of the JSON and a column."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
import typer
from annotated_types import Le
from typer.testing import CliRunner
from typing_extensions import Doc

from bench.cli.options import takes
from bench.core.columns import declared_columns
from bench.core.config.configuration import NOT_RECORDED, Flag
from bench.core.config.run import COMMUNICATION, RunConfig
from bench.core.errors import UsageError
from bench.core.run_folder import write_json
from tests.testing.configs import make_config

FIELDS = {field.name: getattr(make_config(), field.name) for field in dataclasses.fields(RunConfig)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Farther(RunConfig):
    """The configuration of a run with one more option."""

    hops: Annotated[int, Le(9), Doc("machines that a message passes"), Flag(COMMUNICATION)] = 3
    comment: Annotated[str | None, Doc("what the user thinks"), Flag(COMMUNICATION), NOT_RECORDED] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nearer(RunConfig):
    """A command with only the options of communication."""

    panels: ClassVar[tuple[str, ...]] = (COMMUNICATION,)


seen: list[Farther] = []
app = typer.Typer()


@app.command()
@takes(Farther)
def show(asked: Farther) -> None:
    """Take note of what was asked for."""
    seen.append(asked)


def test_it_is_an_option_of_the_command_line_with_a_default() -> None:
    assert CliRunner().invoke(app, ["--hops", "7", "--timeout", "5", "--no-augment"]).exit_code == 0
    assert CliRunner().invoke(app, []).exit_code == 0
    given, default = seen[-2:]
    assert (given.hops, given.timeout_s, given.augment) == (7, 5.0, False)
    assert (default.hops, default.comment) == (3, None)
    assert default == Farther()


def test_its_help_stands_in_its_panel_with_range_and_default() -> None:
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}).output
    (line,) = (line for line in text.splitlines() if "--hops" in line)
    assert all(part in line for part in ("int (-inf, 9]", "Machines that a message passes.", "[default: 3]"))
    assert text.index("Communication") < text.index("--hops") < text.index("Processes")


def test_a_value_outside_its_range_is_refused_in_one_sentence() -> None:
    result = CliRunner().invoke(app, ["--hops", "10"])
    assert isinstance(result.exception, UsageError)
    assert str(result.exception) == "--hops 10 is not possible: give 9 or less"


def test_a_changed_copy_has_checked_values_of_fields_that_exist() -> None:
    assert RunConfig().changed(epochs=3).epochs == 3
    with pytest.raises(UsageError, match="--epochs 0 is not possible"):
        RunConfig().changed(epochs=0)
    with pytest.raises(TypeError, match="RunConfig has no field epoch"):
        RunConfig().changed(epoch=3)


def test_it_crosses_to_the_ranks_as_json(tmp_path: Path) -> None:
    config = Farther(**FIELDS, hops=5, comment="far")
    path = tmp_path / "config.json"
    write_json(path, dataclasses.asdict(config))
    assert Farther.from_json(path) == config
    write_json(path, dataclasses.asdict(make_config()))
    with pytest.raises(UsageError, match="holds no Farther: comment, hops missing"):
        Farther.from_json(path)


def test_it_is_a_column_and_identifies_the_experiment() -> None:
    known = {column.name for column in declared_columns(RunConfig)}
    (column,) = (column for column in declared_columns(Farther) if column.name not in known)
    assert (column.name, column.type, column.meaning) == ("hops", int, "machines that a message passes")
    one, other, noted = Farther(**FIELDS), Farther(**FIELDS, hops=4), Farther(**FIELDS, comment="same")
    assert one.columns()["hops"] == 3
    assert one.digest != other.digest
    assert one.digest == noted.digest


def test_a_command_offers_the_panels_that_it_names() -> None:
    @takes(Nearer)
    def send(asked: Nearer) -> None:
        """Send."""

    names = set(inspect.signature(send).parameters)
    assert {"compressor", "trigger"} < names
    assert not names & {"model", "hosts", "seed"}
