"""`bench decide`, which answers whether compression makes training finish sooner on a link, without losing accuracy."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.api.keywords import keywords_of
from bench.api.progress import warn
from bench.cli.console import print_json, stdout_console, table_of
from bench.cli.options import AsJson, given_options, takes
from bench.core.config.run import OUTPUT, RunConfig
from bench.core.errors import UsageError
from bench.core.units import format_bytes, format_rate, format_seconds
from bench.deciding import speed
from bench.deciding.answer import Answer
from bench.deciding.api import BASELINE, NOT_TAKEN, NOTHING_TO_COMPARE
from bench.deciding.api import decide as ask
from bench.deciding.folder import REPORT
from bench.deciding.study import DecideConfig, parse_method
from bench.deciding.tables import decision_table
from bench.report.columns import NOTHING

METHODS = "What to compare"
OPEN = 4
EXAMPLES = """[bold]Examples[/bold]

  bench decide --method topk:ratio=0.01 --method powersgd --hosts 2 --bandwidth 50mbit --target-accuracy 0.95

  bench decide --method group_topk:ratio=0.01 --baseline none --hosts 4 --network 4g --target-accuracy 0.95

  bench decide --method "local:steps=5 topk" --method "muon bf16" --hosts 2 --bandwidth 10mbit --target-accuracy 0.9

  bench decide results/runs/decide-0123456789 --bandwidth 10mbit

  bench decide --from-profile profile.json --method topk --method powersgd --hosts 2 --bandwidth 50mbit

  bench decide methods.toml --hosts 2 --bandwidth 100mbit --target-accuracy 0.9

Each method is trained without the link, because the link changes only the time of a training, not its losses. The
duration of the steps is measured on the link. Both together give the time to the target. Seeds are added until every
method is decided. At the end, the baseline and the best method are trained once on the link, as a check.

With --from-profile, the speed of the methods in your own script is predicted, and nothing is trained.

Exit codes: 0 the time of every method is decided, 4 some methods are open."""


# The first sentence about a prediction.
_ACCURACY = (
    "Accuracy was not measured, because a profile holds times only; to measure it, train your script once with "
    '`attach(model, "{compressor}", "{collective}", optimizer=optimizer)` and once without, and compare'
)


@takes(DecideConfig, RunConfig, hidden=NOT_TAKEN)
def decide(
    rule: DecideConfig,
    options: RunConfig,
    context: typer.Context,
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE|FOLDER]",
            help="TOML file of methods, written like a sweep file; or the folder of an earlier decision, to decide for "
            "another link.",
            rich_help_panel=METHODS,
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD",
            help="What to compare with the baseline: a compressor, strategy or optimizer, or several with spaces, then "
            "perhaps @ and a collective: 'local:steps=30 topk@allgather'; repeat it for several methods.",
            rich_help_panel=METHODS,
        ),
    ] = None,
    baseline: Annotated[
        str,
        typer.Option(metavar="METHOD", help="What the methods are compared with.", rich_help_panel=METHODS),
    ] = BASELINE,
    from_profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File from bench profile: predict the speed of each method in your own script; trains nothing, so "
            "accuracy stays open.",
            rich_help_panel=METHODS,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the study; a study that was interrupted there continues.",
            show_default="results/runs/decide-<digest of the options>",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Decide whether compression makes training finish sooner on a link: add seeds until the answer is clear."""
    chosen = set(given_options(context))
    of_rule, of_runs = (
        {keyword: getattr(values, each.name) for keyword, each in keywords_of(kind).items() if each.name in chosen}
        for kind, values in ((DecideConfig, rule), (RunConfig, options))
    )
    if from_profile is not None:
        if source is not None:
            raise UsageError(f"--from-profile takes its methods from --method; leave out {source}")
        if own := sorted([*of_rule, *(["out"] if out else [])]):
            raise UsageError(f"--from-profile trains nothing; leave out --{own[0].replace('_', '-')}")
        if not method:
            raise UsageError(NOTHING_TO_COMPARE)
        given = {name: value for name, value in options.flag_values().items() if name in chosen}
        predicted = speed.read_profile(from_profile, given, list(map(parse_method, (baseline, *method))))
        verdicts = _print_speeds(predicted, as_json=as_json)
    else:
        asked = baseline if "baseline" in chosen else None
        answer = ask(method or (), source=source, baseline=asked, out=out, **of_rule, **of_runs)
        if as_json:
            print_json(answer.to_dict())
        else:
            _print_answer(answer)
            print(f"The report is {answer.folder / REPORT}; all measurements are beside it", file=sys.stderr)
        for sentence in answer.warnings:
            warn(sentence)
        verdicts = [each.verdict for each in answer.decisions]
    if "open" in verdicts:
        raise typer.Exit(OPEN)


def _print_answer(answer: Answer) -> None:
    table = decision_table(answer)
    name, *headings = (column.heading for column in table.columns)
    rows = [[cell.text for cell in row] for row in table.rows]
    print(*table.answer, sep="\n")
    stdout_console().print(table_of((name,), headings, rows))
    print(*table.notes, sep="\n")


def _print_speeds(predicted: speed.PredictedSteps, *, as_json: bool) -> list[str]:
    # Print the predicted step of each method, and return the verdicts on all but the baseline.
    baseline, *found = speed.speeds(predicted)
    best = max(found, key=lambda each: each.factor)
    accuracy = _ACCURACY.format(compressor=best.compressor, collective=best.collective)
    least_s = min(each.step_time_s for each in (baseline, *found))
    close = [each.compressor for each in (baseline, *found) if each.step_time_s < (1 + speed.ERROR) * least_s]
    notes = [
        *predicted.notes,
        f"Differences of less than {speed.ERROR:.0%} are open, because predictions may be wrong by that much"
        + (f"; so the fastest are not told apart: {', '.join(close)}" if len(close) > 1 else ""),
    ]
    if as_json:
        content: dict[str, Any] = {"accuracy": None, "step_as_it_is_s": predicted.as_it_is_s}
        content["methods"] = [dataclasses.asdict(each) for each in (baseline, *found)]
        print_json(content | {"notes": [accuracy, *notes]})
    else:
        rows = []
        for each in (baseline, *found):
            first_s, first_nbytes = each.first_epoch_step_time_s, each.first_epoch_payload_bytes_per_step
            first = f"{format_seconds(first_s)}, {format_bytes(first_nbytes)}" if first_s and first_nbytes else NOTHING
            rate, verdict = each.faster_up_to_bps, "baseline" if each is baseline else each.verdict
            is_beyond = rate is not None and rate >= speed.HIGHEST_BPS
            edge = NOTHING if rate is None else f"{'>' * is_beyond}{format_rate(min(rate, speed.HIGHEST_BPS))}"
            sent = format_bytes(each.payload_bytes_per_step)
            cells = [format_seconds(each.step_time_s), f"{each.factor:.2f}x", verdict, edge, sent]
            rows.append([each.compressor, each.collective, *cells, first])
        print(f"{accuracy}.")
        print(f"{predicted.title}: a step of {format_seconds(predicted.as_it_is_s)}")
        headings = ("step", f"vs {baseline.compressor}", "verdict", "faster up to", "sent", "first epoch")
        stdout_console().print(table_of(("method", "collective"), headings, rows))
        print(*notes, sep="\n")
    return [each.verdict for each in found]
