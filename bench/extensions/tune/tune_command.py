"""The command `bench tune`, which chooses each method's learning rate with equal budgets on held-out samples."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from bench.cli.commands import ANSWER, Command
from bench.cli.options import AsJson, given_options, takes
from bench.core.config.run import MAX_SEED, MEASUREMENT, OUTPUT, WHAT, RunConfig
from bench.core.files import check_writable, writing

EXAMPLES = """[bold]Examples[/bold]

  bench tune

  bench tune --strategy local:steps=30 --rates 0.02,0.05,0.1 --outer-rates 0.7,1

  bench tune --compressors none,topk,powersgd --rates 0.01,0.02,0.05,0.1 --holdout-size 300 --epochs 5

  bench sweep results/runs/tune/tuned.toml --out results/runs/tuned

FILE is a sweep file with a table \\[tune], which lists the values to try: of lr, of outer_lr for strategy local,
and of any other options to tune."""


@takes(RunConfig)
def tune(
    options: RunConfig,
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="Sweep file in TOML with a table \\[tune], instead of options.", rich_help_panel=WHAT
        ),
    ] = None,
    compressors: Annotated[
        str | None,
        typer.Option(
            help="Compressors to tune, separated by commas.",
            show_default="those of none,topk,powersgd that work with the other options",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            help="Learning rates to try, separated by commas.",
            show_default="from a quarter to four times --lr, or the optimizer's default",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    outer_rates: Annotated[
        str | None,
        typer.Option(
            help="Outer learning rates of --strategy local to try, separated by commas.",
            show_default="0.4,0.7,1",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="Seeds of the runs after tuning, for the file that is written.", rich_help_panel=MEASUREMENT),
    ] = None,
    tuning_seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Seed of the tuning runs.", rich_help_panel=MEASUREMENT)
    ] = 100,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the tuning runs; runs that are done there are skipped.", rich_help_panel=OUTPUT),
    ] = Path("results/runs/tune"),
    write: Annotated[
        Path | None,
        typer.Option(
            help="Sweep file to write, with the chosen values.",
            show_default="tuned.toml in --out",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan; run nothing.", rich_help_panel=OUTPUT)
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Choose each method's learning rate, and other options on request, and write a sweep file with the best values.

    All methods try the same values, train for the same length, and are judged on held-out training samples (a fifth of
    them, unless --holdout-size is given).
    """
    # imported only here, because `bench --help` imports this module
    from bench.cli.sweep import print_state, run_all, say_plan
    from bench.extensions.tune import tuning
    from bench.launch.jobs.fork_server import TRAIN, ForkServer
    from bench.launch.sweep_file import plan_runs
    from bench.launch.sweep_state import SweepState

    values = options.flag_values()
    given = {name: values[name] for name in given_options(context) if name in values}
    if write is not None and not write.absolute().is_relative_to(out.absolute()):  # the runs make `out`
        check_writable(write)
    with ForkServer(TRAIN) as server:
        methods = tuning.methods_to_tune(given, file, compressors, rates, outer_rates, seeds, server)
        state = SweepState.look_up(plan_runs(tuning.tuning_sweep(methods, tuning_seed), server), out)
        configs = state.to_do(retry_failed=False)
        say_plan(state, configs, f"to run them again, remove their folders from {out}")
        if dry_run:
            print_state(state, as_json=as_json)
            return
        state = run_all(state, configs, server)
    tuned = tuning.choose(methods, state)
    path = write or out / "tuned.toml"
    try:
        with writing(path, "--write"):
            path.write_text(tuning.tuned_file(methods, tuned, tuning_seed), encoding="utf-8")
        print(f"wrote {path}", file=sys.stderr)
    finally:
        tuning.print_tuned(methods, tuned, as_json=as_json)


COMMAND = Command(function=tune, epilog=EXAMPLES, panel=ANSWER)
