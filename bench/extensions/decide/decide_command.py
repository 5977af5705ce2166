"""`bench decide`, which answers whether compression makes training finish sooner on a link, without losing accuracy."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from bench.api.keywords import KEYWORDS
from bench.api.progress import warn
from bench.cli.commands import ANSWER, Command
from bench.cli.console import print_json, stdout_console
from bench.cli.options import AsJson, given_options, takes
from bench.core.config.run import OUTPUT, RunConfig
from bench.core.errors import UsageError
from bench.extensions.decide.api import ACCURACY_MARGIN, ALPHA, MAX_SEEDS, NOT_TAKEN, NOTHING_TO_COMPARE, SAME
from bench.extensions.decide.api import decide as ask

METHODS = "What to compare"
RULE = "When it is decided"
OPEN = 4
EXAMPLES = """[bold]Examples[/bold]

  bench decide --method topk:ratio=0.01 --method powersgd --hosts 2 --bandwidth 50mbit --target-accuracy 0.95

  bench decide --method group_topk:ratio=0.01 --baseline none --hosts 4 --network 4g --target-accuracy 0.95

  bench decide --method "local:steps=5 topk" --method "muon bf16" --hosts 2 --bandwidth 10mbit --target-accuracy 0.9

  bench decide results/runs/decide-0123456789 --bandwidth 10mbit

  bench decide --from-profile profile.json --method topk --method powersgd --hosts 2 --bandwidth 50mbit

  bench decide methods.toml --hosts 2 --bandwidth 100mbit --target-accuracy 0.9

Each method is trained without the link, because the link changes no number of a training, only its time. The duration
of the steps is measured on the link, and both are put together. Seeds are added until every method is decided. At the
end, the baseline and the best method are trained once on the link, as a check.

With --from-profile, the speed of the methods in your own script is predicted, and nothing is trained.

Exit codes: 0 the time of every method is decided, 4 some are open."""


@takes(RunConfig, hidden=NOT_TAKEN)
def decide(
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
    ] = "bf16",
    from_profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File from bench profile: predict the speed of each method in your own script; trains nothing, so "
            "accuracy stays open.",
            rich_help_panel=METHODS,
        ),
    ] = None,
    same: Annotated[
        float,
        typer.Option(
            min=SAME[0],
            max=SAME[1],
            help="Factors of time below this make no practical difference.",
            rich_help_panel=RULE,
        ),
    ] = 1.03,
    alpha: Annotated[
        float,
        typer.Option(
            min=ALPHA[0],
            max=ALPHA[1],
            help="Probability of a wrong verdict on time, all methods together; the same again on accuracy.",
            rich_help_panel=RULE,
        ),
    ] = 0.05,
    accuracy_margin: Annotated[
        float,
        typer.Option(
            min=ACCURACY_MARGIN[0],
            max=ACCURACY_MARGIN[1],
            help="Loss of final accuracy that is accepted, in percentage points; of a text, increase of bits per byte "
            "that is accepted, in per cent.",
            rich_help_panel=RULE,
        ),
    ] = 1.0,
    max_seeds: Annotated[
        int, typer.Option(min=MAX_SEEDS[0], max=MAX_SEEDS[1], help="Largest number of seeds.", rich_help_panel=RULE)
    ] = 20,
    budget: Annotated[
        str, typer.Option(metavar="DURATION", help="Time after which no seed is added: 10min.", rich_help_panel=RULE)
    ] = "10min",
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
    from bench.extensions.decide.output import print_answer  # takes long, and `bench --help` imports this module

    chosen = set(given_options(context))
    if from_profile is not None:
        if source is not None:
            raise UsageError(f"--from-profile takes its methods from --method; leave out {source}")
        if own := sorted(chosen & {"same", "alpha", "accuracy_margin", "max_seeds", "budget", "out"}):
            raise UsageError(f"--from-profile trains nothing; leave out --{own[0].replace('_', '-')}")
        if not method:
            raise UsageError(NOTHING_TO_COMPARE)
        from bench.extensions.decide.speed import print_speeds
        from bench.extensions.decide.study import parse_method

        values = options.flag_values()
        given = {name: values[name] for name in chosen & values.keys()}
        found = print_speeds(from_profile, given, list(map(parse_method, (baseline, *method))), as_json=as_json)
        raise typer.Exit(OPEN if any(each.verdict == "open" for each in found) else 0)
    answer = ask(
        method or (),
        source=source,
        baseline=baseline if "baseline" in chosen else None,
        same=same if "same" in chosen else None,
        alpha=alpha if "alpha" in chosen else None,
        accuracy_margin=accuracy_margin if "accuracy_margin" in chosen else None,
        max_seeds=max_seeds,
        budget=budget,
        out=out,
        **{keyword: getattr(options, name) for keyword, name in KEYWORDS.items() if name in chosen},
    )
    if as_json:
        print_json(answer.to_dict())
    else:
        print_answer(answer.result, stdout_console())
        print(f"The runs, step times and the decision are in {answer.folder}", file=sys.stderr)
    for sentence in answer.warnings:
        warn(sentence)
    if any(each.verdict == "open" for each in answer.result.decisions):
        raise typer.Exit(OPEN)


COMMAND = Command(function=decide, epilog=EXAMPLES, panel=ANSWER)
