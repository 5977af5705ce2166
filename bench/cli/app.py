"""The Typer application with all commands, and `main`, the entry point of `bench`."""

from __future__ import annotations

import gc
from typing import Annotated

import typer

from bench.cli import (
    calibrate,
    collectives,
    compare,
    compressors,
    data,
    doctor,
    place,
    plot,
    predict,
    report,
    run,
    sweep,
    tune,
)
from bench.cli import list as list_
from bench.cli.ending import one_sentence
from bench.core.environment import version_of
from bench.launch.jobs.unfinished import clear_away

EXIT_CODES = (
    "Exit codes: 0 ok, 1 bug, 2 wrong usage, 3 run failed, 4 nothing to compare or to judge, 5 regression, "
    "130 interrupted."
)

# Importing torch creates very many objects and no garbage. With the default threshold, garbage collection during the
# import and at exit takes up to a third of the import's time.
IMPORTED_OBJECTS = 100_000

app = typer.Typer(
    name="bench",
    help="Will compressing my gradients make training finish sooner, on my link, without losing accuracy?\n\n"
    "Trains real models in real processes with a chosen compressor x collective x optimizer, and counts "
    "the bytes that leave a rank.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", epilog=run.EXAMPLES)(run.run)
app.command("sweep", epilog=sweep.EXAMPLES)(sweep.sweep)
app.command("tune", epilog=tune.EXAMPLES)(tune.tune)
app.command("compare", epilog=compare.EXAMPLES)(compare.compare)
app.command("plot", epilog=plot.EXAMPLES)(plot.plot)
app.command("report", epilog=report.EXAMPLES)(report.report)
app.command("collectives", epilog=collectives.EXAMPLES)(collectives.collectives)
app.command("compressors", epilog=compressors.EXAMPLES)(compressors.compressors)
app.command("calibrate", epilog=calibrate.EXAMPLES)(calibrate.calibrate)
app.command("predict", epilog=predict.EXAMPLES)(predict.predict)
app.command("place", epilog=place.EXAMPLES)(place.place)
app.command("list", epilog=list_.EXAMPLES)(list_.list_components)
app.command("data", epilog=data.EXAMPLES)(data.data)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bench {version_of('gradwire')} (torch {version_of('torch') or 'not installed'})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the versions of bench and torch.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options before the command."""
    clear_away()


def main() -> None:
    """Run the command that the user typed."""
    gc.set_threshold(IMPORTED_OBJECTS)
    try:
        with one_sentence():
            app()
    finally:
        gc.freeze()  # no collection at exit, because the process ends anyway
