"""`bench compare`, which compares runs with a baseline and says which differences are significant."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.api.comparing import described, read_and_compare
from bench.api.progress import warn
from bench.cli.console import stdout_console
from bench.cli.options import complete_from
from bench.core.errors import NothingToCompare, Regression, UsageError
from bench.core.files import writing
from bench.core.run_folder import RUNS_FOLDER
from bench.core.schema import METRICS
from bench.report import comparison, gates, groups, store, tables, verdict
from bench.report.columns import ALL, COLUMNS_BY_NAME, find_numbers
from bench.report.comparison_table import answer_table, comparison_table
from bench.report.statistics import SeedRule

MEANING = "Meaning"
INPUT = "Input"
OUTPUT = "Output"
GATES = "Gates"
EXAMPLES = """[bold]Examples[/bold]

  bench compare

  bench compare results/runs/2026*-demo-* --baseline none --where dataset=digits

  bench compare old.csv results/runs --by git_sha --metric step_time_s --columns step

  bench compare --target 0.9,best-1 --sort test_accuracy --out table.tex

  bench compare --fail-on slower:5% --fail-on accuracy:-0.5 --fail-on bytes:+1%"""

Format = Literal["rich", "markdown", "latex", "csv", "json"]
_SUFFIXES: dict[str, Format] = {".md": "markdown", ".tex": "latex", ".csv": "csv", ".json": "json"}


_COMPLETE_METRIC = complete_from(lambda: {c.name: c.meaning for c in COLUMNS_BY_NAME.values() if c.better})

RunPaths = Annotated[
    list[Path] | None,
    typer.Argument(
        help=f"Run folders, folders of runs, CSV files, or quoted patterns of these (default: {RUNS_FOLDER}).",
        metavar="PATHS",
        show_default=False,
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        help="Row that the others are compared with: a compressor, COMPRESSOR+COLLECTIVE, or a run's name (default: "
        "none, on native, else bf16; for speeds bf16 first).",
        metavar="SPEC",
        show_default=False,
        rich_help_panel=MEANING,
    ),
]


def compare(
    paths: RunPaths = None,
    baseline: Baseline = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Column that the verdict is about, or bytes_to_target (default: samples_per_s; with --target, "
            "time_to_target_s; for runs too short to be timed, test_accuracy or test_bits_per_byte).",
            metavar="COLUMN",
            show_default=False,
            autocompletion=_COMPLETE_METRIC,
            rich_help_panel=MEANING,
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="Accuracies to reach, separated by commas: 0.9, or best-1 for one point below the baseline's mean "
            "final accuracy; for a text bits per byte: 2.1, or best-1 for 1 % above the baseline's (default: the "
            "target of each run).",
            metavar="TARGETS",
            show_default=False,
            rich_help_panel=MEANING,
        ),
    ] = None,
    rule: Annotated[
        SeedRule,
        typer.Option(
            help="fixed: the number of seeds was chosen before the first run. anytime: seeds were added until the "
            "result was clear; only seeds that both rows have are compared.",
            rich_help_panel=MEANING,
        ),
    ] = "fixed",
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Group by these columns, separated by commas (default: everything but the seed).",
            metavar="COLUMNS",
            show_default=False,
            autocompletion=complete_from(lambda: {column.name: column.meaning for column in METRICS}),
            rich_help_panel=MEANING,
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            help="Use only runs with these values: 'dataset=digits,world_size=4' ('steps=-': an empty cell). A "
            "component's name without options matches any options; an item that is an option of the component before "
            "it belongs to it.",
            metavar="COLUMN=VALUE",
            show_default=False,
            rich_help_panel=INPUT,
        ),
    ] = None,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going",
            help="Skip, with a warning, paths that do not exist and files that cannot be read or are not bench's.",
            rich_help_panel=INPUT,
        ),
    ] = False,
    allow_other_machine: Annotated[
        bool,
        typer.Option(
            "--allow-other-machine",
            help="Do not warn if rows come from different machines or versions.",
            rich_help_panel=INPUT,
        ),
    ] = False,
    sort: Annotated[
        str | None,
        typer.Option(
            help="Order the rows by this column, or by bytes_to_target, best first (default: in the order of the "
            "files).",
            metavar="COLUMN",
            show_default=False,
            autocompletion=complete_from(lambda: {c.name: c.meaning for c in COLUMNS_BY_NAME.values()}),
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            help="Also show these columns, separated by commas; step: the parts of a step's time; all: every column, "
            "with intervals, as in the other formats.",
            metavar="COLUMNS",
            show_default=False,
            autocompletion=_COMPLETE_METRIC,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_format: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="Format of the table (default: by the suffix of --out, else rich); CSV and JSON have raw numbers in "
            "seconds, bytes and shares.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Short for --format json.", rich_help_panel=OUTPUT)] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the table to this file instead.", metavar="FILE", rich_help_panel=OUTPUT),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            help="Exit with code 5 if a row is worse than the baseline by more than this: slower:5% (of the metric), "
            "accuracy:-0.5 (percentage points) or bits_per_byte:+1% (of a text), all three significantly, or bytes:+1% "
            "(payload per step). May be repeated, or separated by commas.",
            metavar="GATE",
            rich_help_panel=GATES,
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            help="Exit with code 5 if a run's bytes, accuracy or bits per byte differ from those of the run in this "
            "file with the same name and seed.",
            metavar="FILE",
            rich_help_panel=GATES,
        ),
    ] = None,
) -> None:
    """Compare runs with a baseline, and print one row per configuration.

    A factor above 1x means that the row is better than the baseline. Brackets hold 95% confidence intervals over seeds.

    Faster or slower means a significant difference of more than 5%; with a single seed the verdict is always unclear.
    """
    if as_json and as_format not in (None, "json"):
        raise UsageError(f"--json and --format {as_format} contradict each other; give one of them")
    by_suffix = _SUFFIXES.get(out.suffix.lower() if out else "", "rich")
    chosen_format: Format = "json" if as_json else as_format or by_suffix
    # If the user writes `--fail-on A B`, Typer passes B as a path.
    further = [path for path in paths or [] if fail_on and gates.FORM.fullmatch(str(path))]
    limits = [gates.Gate.parse(text) for text in [*_parts(fail_on), *map(str, further)]]
    given = [path for path in paths or [] if path not in further]
    names = _parts(columns)
    extra = find_numbers([name for name in names if name != ALL])
    conditions = [condition for text in where or [] for condition in groups.parse_conditions(text)]
    rows, compared = read_and_compare(
        given or [RUNS_FOLDER],
        baseline=baseline,
        metric=metric,
        by=_parts(by),
        where=conditions,
        targets=_parts(target),
        sort=sort,
        rule=rule,
        keep_going=keep_going,
    )
    judged = gates.check(compared, limits)
    if reference is not None:
        sides = (rows, store.read([reference], warn=warn))
        held = gates.check_reference(*(groups.select(store.collect_runs(side), conditions) for side in sides))
        judged.crossed.extend(held.crossed)
        judged.unmeasured.extend(held.unmeasured)
    cautions = [] if allow_other_machine else list(verdict.cautions(compared))
    build = answer_table if chosen_format == "rich" and ALL not in names else comparison_table
    table = build(compared, extra=extra, cautions=cautions)
    _write(table, compared, [*verdict.caveats(compared), *judged.undecided], chosen_format, out)
    if judged.crossed:
        raise Regression("; ".join(judged.crossed))
    if judged.unmeasured:
        raise NothingToCompare("; ".join(judged.unmeasured))


def _parts(texts: Iterable[str] | None) -> list[str]:
    # An option may be repeated and may list several items, separated by commas.
    return [part.strip() for text in texts or [] for part in text.split(",")]


def _write(
    table: tables.Table, compared: comparison.Comparison, warnings: list[str], chosen: Format, out: Path | None
) -> None:
    # The warnings go to stderr; JSON and Markdown also contain them.
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
    sys.stdout.flush()  # so that the warnings on stderr come after the table
    for sentence in [*warnings, *([] if chosen != "csv" else table.cautions)]:
        warn(sentence)


def _text(table: tables.Table, compared: comparison.Comparison, warnings: list[str], chosen: Format) -> str:
    match chosen:
        case "csv":
            return tables.to_csv(table)
        case "json":
            return tables.to_json(table, **described(table, compared, warnings))
        case "markdown":
            return "\n".join([tables.to_markdown(table), *(f"- warning: {sentence}" for sentence in warnings), ""])
        case "latex":
            return tables.to_latex(table)
        case "rich":
            return tables.to_text(table)
