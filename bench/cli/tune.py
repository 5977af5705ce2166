"""`bench tune`: the learning rate of each method, chosen within an equal budget on samples held out of training."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli.options import AsJson, takes
from bench.core.config.job import MAX_SEED, MEASUREMENT, OUTPUT
from bench.core.config.run import WHAT, RunConfig
from bench.core.config.seeds import parse_seeds
from bench.core.errors import UsageError
from bench.core.files import check_writable
from bench.core.spec import split_list

if TYPE_CHECKING:
    from bench.launch.sweeps.file import SweepFile
    from bench.launch.sweeps.tuning import Tuned

EXAMPLES = """[bold]Examples[/bold]

  bench tune

  bench tune --compressors none,topk,powersgd --rates 0.01,0.02,0.05,0.1 --holdout-size 300 --epochs 5

  bench sweep results/runs/tune/tuned.toml --out results/runs/tuned

A FILE is a sweep's with a heading \\[tune], under which stand lists: lr, and whatever else is to be chosen."""


@takes(RunConfig)
def tune(
    asked: RunConfig,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="TOML file of a sweep with a table \\[tune], instead of options.", rich_help_panel=WHAT
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
            show_default="a quarter to four times --lr, or the optimizer's own",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="Seeds of the runs that follow, for the written file.", rich_help_panel=MEASUREMENT),
    ] = None,
    tuning_seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Seed of the runs that choose.", rich_help_panel=MEASUREMENT)
    ] = 100,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the runs that choose; what is done is not done again.", rich_help_panel=OUTPUT),
    ] = Path("results/runs/tune"),
    write: Annotated[
        Path | None,
        typer.Option(help="The file for `bench sweep`.", show_default="tuned.toml in --out", rich_help_panel=OUTPUT),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, run nothing.", rich_help_panel=OUTPUT)
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Choose each method's learning rate, and whatever else is named, and write a sweep of the methods at their best.

    Every method tries the same values, trains for equally long, and is judged on training samples that are held out:
    a fifth of them without --holdout-size.
    """
    from bench.cli.output.sweep import SweepProgress, print_agenda, say_plan
    from bench.launch.jobs.fork_server import TRAIN, ForkServer
    from bench.launch.sweeps.agenda import SweepState
    from bench.launch.sweeps.plan import plan_runs
    from bench.launch.sweeps.tuning import choose, tuned_file, tuning_sweep

    methods = _methods(asked, file, compressors, rates, seeds)
    if write is not None and not write.absolute().is_relative_to(out.absolute()):  # which will be there
        check_writable(write)
    with ForkServer(TRAIN) as server:
        agenda = SweepState.look_up(plan_runs(tuning_sweep(methods, tuning_seed), server), out)
        configs = agenda.to_do(retry_failed=False)
        say_plan(agenda, configs, f"to run them again, remove their folders from {out}")
        if dry_run:
            print_agenda(agenda, as_json=as_json)
            return
        agenda = SweepProgress(agenda, configs, server).run_all()
    tuned = choose(methods, agenda)
    try:
        _write(write or out / "tuned.toml", tuned_file(methods, tuned, tuning_seed))
    finally:
        _print(methods, tuned, as_json=as_json)


def _methods(
    asked: RunConfig, file: Path | None, compressors: str | None, rates: str | None, seeds: str | None
) -> SweepFile:
    """What is to be tuned, from a file or from options."""
    from bench.launch.sweeps.file import SweepFile, read_sweep
    from bench.launch.sweeps.tuning import with_defaults

    options = [option for option in RunConfig.options() if option.flag]
    given = {o.name: getattr(asked, o.name) for o in options if getattr(asked, o.name) != o.default}
    tried: dict[str, list[Any]] = {"lr": _rates(rates)} if rates else {}
    if file is not None:
        if given or compressors or seeds or rates:
            raise UsageError(f"{file} says what is run; write there what the other options say, or leave it out")
        return read_sweep(file, "tune")
    if "compressor" in given and compressors:
        raise UsageError("--compressor and --compressors contradict each other; give one of them")
    if asked.nnodes > 1:
        raise UsageError("tuning runs on this machine; leave out --nnodes")
    if "seed" in given and seeds:
        raise UsageError("--seed and --seeds contradict each other; give one of them")
    first_seed = given.pop("seed", None)
    methods, chosen = with_defaults(
        SweepFile(
            where="the command line",
            base=given,
            seeds=parse_seeds(seeds) if seeds else [first_seed] if first_seed is not None else [],
            matrix={"compressor": split_list(compressors)} if compressors else {},
            tune=tried,
        )
    )
    if chosen:
        print(f"not given, so chosen: {chosen}", file=sys.stderr)
    return methods


def _rates(text: str) -> list[float]:
    try:
        return sorted({float(rate) for rate in text.split(",")})
    except ValueError:
        raise UsageError(f"--rates {text} is not a list of numbers; write 0.01,0.02,0.05") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another --write") from None
    print(f"wrote {path}", file=sys.stderr)


def _print(methods: SweepFile, tuned: list[Tuned], *, as_json: bool) -> None:
    """What was chosen, and the commands that run it, on stdout; what should be looked at again on stderr."""
    from rich.markup import escape

    from bench.cli.output.console import plain_table, print_json, stdout_console
    from bench.launch.sweeps.file import table_text
    from bench.launch.sweeps.tuning import evaluated_base
    from bench.launch.sweeps.written import run_arguments

    seeds = {"seeds": ",".join(map(str, methods.seeds))} if methods.seeds else {}
    commands = [shlex.join(["bench", "run", *run_arguments(evaluated_base(methods) | t.chosen | seeds)]) for t in tuned]
    if as_json:
        print_json([vars(each) | {"command": command} for each, command in zip(tuned, commands, strict=True)])
    else:
        table = plain_table()
        for heading in ("configuration", "best", "held-out accuracy", "tried"):
            table.add_column(heading, justify="right" if heading in ("held-out accuracy", "tried") else "left")
        for each in tuned:
            name = table_text(each.settings) or "[base]"
            table.add_row(escape(name), table_text(each.best), f"{each.accuracy:.2%}", str(each.rates_tried))
        stdout_console().print(table)
        print(*commands, sep="\n")
    for each in tuned:
        for name in each.at_the_end:
            where = table_text(each.settings) or "[base]"
            beyond = f"the best {name}, {each.best[name]}, is at the end of those tried; try values beyond it"
            print(f"warning: {where}: {beyond}", file=sys.stderr)
