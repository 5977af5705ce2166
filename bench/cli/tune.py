"""`bench tune`, which chooses each method's learning rate with equal budgets on held-out training samples."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.cli.console import print_json, stdout_console, table_of
from bench.cli.options import AsJson, flag_values, takes
from bench.cli.sweep import print_state, run_all, say_plan
from bench.core.config.job import MAX_SEED, MEASUREMENT, OUTPUT
from bench.core.config.run import WHAT, RunConfig
from bench.core.config.syntax import parse_seeds
from bench.core.errors import UsageError
from bench.core.files import check_writable, writing
from bench.core.spec import split_list
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.sweeps.file import SweepFile, plan_runs, read_sweep, run_arguments, table_text
from bench.launch.sweeps.state import SweepState
from bench.launch.sweeps.tuning import Tuned, choose, evaluated_base, tuned_file, tuning_sweep, with_defaults

EXAMPLES = """[bold]Examples[/bold]

  bench tune

  bench tune --compressors none,topk,powersgd --rates 0.01,0.02,0.05,0.1 --holdout-size 300 --epochs 5

  bench sweep results/runs/tune/tuned.toml --out results/runs/tuned

FILE is a sweep file with a table \\[tune], which lists the values to try: of lr, and of any other options to tune."""


@takes(RunConfig)
def tune(
    options: RunConfig,
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
            show_default="none,topk,powersgd",
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
    methods = _methods(options, file, compressors, rates, seeds)
    if write is not None and not write.absolute().is_relative_to(out.absolute()):  # the runs make `out`
        check_writable(write)
    with ForkServer(TRAIN) as server:
        state = SweepState.look_up(plan_runs(tuning_sweep(methods, tuning_seed), server), out)
        configs = state.to_do(retry_failed=False)
        say_plan(state, configs, f"to run them again, remove their folders from {out}")
        if dry_run:
            print_state(state, as_json=as_json)
            return
        state = run_all(state, configs, server)
    tuned = choose(methods, state)
    path = write or out / "tuned.toml"
    try:
        with writing(path, "--write"):
            path.write_text(tuned_file(methods, tuned, tuning_seed), encoding="utf-8")
        print(f"wrote {path}", file=sys.stderr)
    finally:
        _print(methods, tuned, as_json=as_json)


def _methods(
    options: RunConfig, file: Path | None, compressors: str | None, rates: str | None, seeds: str | None
) -> SweepFile:
    given = {name: value for name, value in flag_values(options).items() if value != getattr(RunConfig, name)}
    try:
        tried: dict[str, list[Any]] = {"lr": sorted({float(rate) for rate in rates.split(",")})} if rates else {}
    except ValueError:
        raise UsageError(f"--rates {rates} is not a list of numbers; write 0.01,0.02,0.05") from None
    if file is not None:
        if given or compressors or seeds or rates:
            raise UsageError(f"{file} must contain all options; write the other options there, or leave out the file")
        return read_sweep(file, "tune")
    if "compressor" in given and compressors:
        raise UsageError("--compressor and --compressors contradict each other; give one of them")
    if options.nnodes > 1:
        raise UsageError("tuning runs on this machine; leave out --nnodes")
    if "seed" in given and seeds:
        raise UsageError("--seed and --seeds contradict each other; give one of them")
    first_seed = [given.pop("seed")] if "seed" in given else []
    methods, chosen = with_defaults(
        SweepFile(
            where="the command line",
            base=given,
            seeds=parse_seeds(seeds) if seeds else first_seed,
            matrix={"compressor": split_list(compressors)} if compressors else {},
            tune=tried,
        )
    )
    if chosen:
        print(f"chosen by default: {chosen}", file=sys.stderr)
    return methods


def _print(methods: SweepFile, tuned: list[Tuned], *, as_json: bool) -> None:
    seeds = {"seeds": ",".join(map(str, methods.seeds))} if methods.seeds else {}
    commands = [shlex.join(["bench", "run", *run_arguments(evaluated_base(methods) | t.chosen | seeds)]) for t in tuned]
    if as_json:
        print_json([vars(each) | {"command": command} for each, command in zip(tuned, commands, strict=True)])
    else:
        rows = [
            (
                table_text(each.settings) or "[base]",
                table_text(each.best),
                f"{each.accuracy:.2%}",
                str(each.rates_tried),
            )
            for each in tuned
        ]
        stdout_console().print(table_of(("configuration", "best"), ("held-out accuracy", "tried"), rows))
        print(*commands, sep="\n")
    for each in tuned:
        for name in each.at_the_end:
            beyond = f"the best {name}, {each.best[name]}, is the smallest or largest tried; try values beyond it"
            print(f"warning: {table_text(each.settings) or '[base]'}: {beyond}", file=sys.stderr)
