"""`bench compare`, which compares runs with a baseline and says which differences are significant."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.api.comparing import GATES, INPUT, CompareConfig, described, texts
from bench.api.progress import warn
from bench.cli.console import stdout_console
from bench.cli.options import takes
from bench.core.config.run import OUTPUT
from bench.core.errors import NothingToCompare, Regression, UsageError
from bench.core.files import writing
from bench.core.run_folder import RUNS_FOLDER
from bench.report import artifacts, gates, groups, store, tables, verdict
from bench.report.comparison import Comparison

EXAMPLES = """[bold]Examples[/bold]

  bench compare

  bench compare results/runs/2026*-demo-* --baseline none --where dataset=digits

  bench compare results/runs/demo-20261129T150000

  bench compare old.csv results/runs --by git_sha --metric step_time_s --columns step

  bench compare --target 0.9,best-1 --sort test_accuracy --out table.tex

  bench compare --fail-on slower:5% --fail-on accuracy:-0.5 --fail-on bytes:+1%"""

TableFormat = Literal["rich", "markdown", "latex", "html", "csv", "json"]
_SUFFIXES: dict[str, TableFormat] = {
    ".md": "markdown", ".tex": "latex", ".html": "html", ".csv": "csv", ".json": "json",
}  # fmt: skip

RunPaths = Annotated[
    list[Path] | None,
    typer.Argument(
        help=f"Run folders, folders of runs, CSV files, or quoted patterns of these (default: {RUNS_FOLDER}).",
        metavar="PATHS",
        show_default=False,
    ),
]


@takes(CompareConfig)
def compare(
    options: CompareConfig,
    paths: RunPaths = None,
    allow_other_machine: Annotated[
        bool,
        typer.Option(
            "--allow-other-machine",
            help="Do not warn if rows come from different machines or versions.",
            rich_help_panel=INPUT,
        ),
    ] = False,
    as_format: Annotated[
        TableFormat | None,
        typer.Option(
            "--format",
            help="Format of the table (default: by the suffix of --out, else rich); CSV and JSON have raw numbers in "
            "seconds, bytes and shares, and JSON has every column.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Short for --format json.", rich_help_panel=OUTPUT)] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the table to this file, not to stdout.", metavar="FILE", rich_help_panel=OUTPUT),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            help="Exit with code 5 if a row is worse than the baseline by more than this: slower:5% (of the metric), "
            "accuracy:-0.5 (percentage points) or bits_per_byte:+1% (of a text), if the difference is significant; or "
            "bytes:+1% (payload per step). May be repeated, or separated by commas.",
            metavar="GATE",
            rich_help_panel=GATES,
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            help="Exit with code 5 if a run's bytes, accuracy or bits per byte differ from the run with the same "
            "name and seed in this file.",
            metavar="FILE",
            rich_help_panel=GATES,
        ),
    ] = None,
) -> None:
    """Compare runs with a baseline, and print one row per configuration; of a decision, print its table again.

    A factor above 1x means that the row is better than the baseline. Brackets hold 95% confidence intervals over seeds.

    Faster or slower means a significant difference of more than 5%; with a single seed the verdict is always unclear.
    """
    if as_json and as_format not in (None, "json"):
        raise UsageError(f"--json and --format {as_format} contradict each other; give one of them")
    by_suffix = _SUFFIXES.get(out.suffix.lower() if out else "", "rich")
    chosen: TableFormat = "json" if as_json else as_format or by_suffix
    # If the user writes `--fail-on A B`, Typer passes B as a path.
    further = [path for path in paths or [] if fail_on and gates.FORM.fullmatch(str(path))]
    limits = [gates.Gate.parse(text) for text in texts([*(fail_on or []), *further])]
    inputs = [path for path in paths or [] if path not in further] or [RUNS_FOLDER]
    unused = {
        each.flag_name: value
        for each in options.options()
        if (value := getattr(options, each.name)) != getattr(CompareConfig(), each.name)
    }
    if shown := artifacts.to_show(
        inputs, unused | {"--fail-on": fail_on, "--reference": reference, "--allow-other-machine": allow_other_machine}
    ):
        views, path = shown
        table = views.table(path)
        _put(table, None, [], chosen, out)
        for sentence in table.cautions if chosen == "csv" else ():
            warn(sentence)
        return
    rows, compared = options.compared(inputs)
    judged = gates.check(compared, limits)
    if reference is not None:
        sides = (rows, store.read([reference], warn=warn))
        held = gates.check_reference(*(groups.select(store.collect_runs(side), options.conditions) for side in sides))
        judged.crossed.extend(held.crossed)
        judged.unmeasured.extend(held.unmeasured)
    cautions = [] if allow_other_machine else list(verdict.cautions(compared))
    table = options.table(compared, cautions=cautions, is_complete=chosen == "json")
    warnings = [*verdict.caveats(compared), *judged.undecided]
    _put(table, compared, warnings, chosen, out)
    sys.stdout.flush()  # so that the warnings on stderr come after the table
    # The warnings go to stderr; JSON, Markdown and HTML also contain them.
    for sentence in [*warnings, *([] if chosen != "csv" else table.cautions)]:
        warn(sentence)
    if judged.crossed:
        raise Regression("; ".join(judged.crossed))
    if judged.unmeasured:
        raise NothingToCompare("; ".join(judged.unmeasured))


def _put(
    table: tables.Table, compared: Comparison | None, warnings: list[str], chosen: TableFormat, out: Path | None
) -> None:
    if out:
        if out.is_fifo():
            raise UsageError(
                f"{out} is a pipe, and writing to it might wait forever for a reader; choose another --out"
            )
        with writing(out):
            out.write_text(_text(table, compared, warnings, chosen), encoding="utf-8")
        typer.echo(f"wrote {out}", err=True)
    elif chosen == "rich":
        tables.print_rich(table, stdout_console())
    else:
        typer.echo(_text(table, compared, warnings, chosen), nl=False)


def _text(table: tables.Table, compared: Comparison | None, warnings: list[str], chosen: TableFormat) -> str:
    if chosen == "json":
        own = {"answer": table.answer, "warnings": table.cautions, "notes": table.notes}
        more = own if compared is None else described(table, compared, warnings)
        return tables.to_json(table, **more)
    if chosen == "markdown":
        return "\n".join([tables.to_markdown(table), *(f"- warning: {sentence}" for sentence in warnings), ""])
    if chosen == "html":
        return "\n".join(["<!DOCTYPE html>", '<meta charset="utf-8">', tables.to_html(table, warnings), ""])
    return {"csv": tables.to_csv, "latex": tables.to_latex, "rich": tables.to_text}[chosen](table)
