"""`bench decide`, which answers whether compression makes training finish sooner on a link, without losing accuracy."""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.cli.commands import ANSWER, Command
from bench.cli.console import LiveLine, print_json, stdout_console, warn
from bench.cli.options import AsJson, flag_values, takes
from bench.core.config.run import MAX_SEED, OUTPUT, RunConfig
from bench.core.errors import Interrupted, UsageError
from bench.core.units import parse_duration

METHODS = "What to compare"
RULE = "When it is decided"
OPEN = 4
EXAMPLES = """[bold]Examples[/bold]

  bench decide --method topk:ratio=0.01 --method powersgd --hosts 2 --bandwidth 50mbit --target-accuracy 0.95

  bench decide --method group_topk:ratio=0.01@ring --baseline none --hosts 4 --network 4g --target-accuracy 0.95

  bench decide results/runs/decide-0123456789 --bandwidth 10mbit

  bench decide methods.toml --hosts 2 --bandwidth 100mbit --target-accuracy 0.9

Each method is trained without the link, because the link changes no number of a training, only its time. The duration
of the steps is measured on the link, and both are put together. Seeds are added until every method is decided. At the
end, the baseline and the best method are trained once on the link, as a check.

Exit codes: 0 the time of every method is decided, 4 some are open."""


@takes(RunConfig)
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
            metavar="SPEC[@COLLECTIVE]",
            help="A method to compare with the baseline, such as topk:ratio=0.01@allgather; repeat it for several.",
            rich_help_panel=METHODS,
        ),
    ] = None,
    baseline: Annotated[
        str,
        typer.Option(metavar="SPEC[@COLLECTIVE]", help="What the methods are compared with.", rich_help_panel=METHODS),
    ] = "bf16",
    same: Annotated[
        float,
        typer.Option(
            min=1.0, max=2.0, help="Factors of time below this make no practical difference.", rich_help_panel=RULE
        ),
    ] = 1.03,
    alpha: Annotated[
        float,
        typer.Option(
            min=0.0001,
            max=0.5,
            help="Probability of a wrong verdict on time, all methods together; the same again on accuracy.",
            rich_help_panel=RULE,
        ),
    ] = 0.05,
    accuracy_margin: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=100.0,
            help="Loss of final accuracy that is accepted, in percentage points.",
            rich_help_panel=RULE,
        ),
    ] = 1.0,
    max_seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="Largest number of seeds.", rich_help_panel=RULE)
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
    # imported only here, because `bench --help` imports this module
    from bench.extensions.decide.decision import DecisionRule
    from bench.extensions.decide.output import print_answer, to_dict, write_files
    from bench.extensions.decide.search import Search
    from bench.extensions.decide.study import LINK_OPTIONS, Study, parse_method, read_methods
    from bench.launch.jobs.fork_server import TRAIN, ForkServer

    chosen = {
        name
        for name in context.params
        if (origin := context.get_parameter_source(name)) is not None and origin.name != "DEFAULT"
    }
    values = flag_values(options)
    given: dict[str, Any] = {name: values[name] for name in chosen & values.keys()}
    if "compressor" in given or "collective" in given:
        raise UsageError("bench decide takes methods; write --method COMPRESSOR@COLLECTIVE and --baseline instead")
    rule = {"alpha": alpha, "same": same, "accuracy_margin": accuracy_margin / 100.0}
    first_seed = given.pop("seed", None)
    is_known = source is not None and source.is_dir()
    if is_known:
        assert source is not None
        if chosen & {"method", "baseline"}:
            raise UsageError(f"{source} has its methods; leave out --method and --baseline, or the folder")
        study = Study.read(source)
        kept = set() if "cluster_file" in given else {"hosts", "ranks_per_host"}
        replaced = LINK_OPTIONS - kept if given.keys() & LINK_OPTIONS else ()
        study = dataclasses.replace(
            study,
            base={name: value for name, value in study.base.items() if name not in replaced} | given,
            rule=study.rule | {name: rule[name] for name in rule.keys() & chosen},
            first_seed=study.first_seed if first_seed is None else first_seed,
        )
    else:
        shared, methods = ({}, []) if source is None else read_methods(source)
        methods = [parse_method(text) for text in method or ()] + methods
        if not methods:
            raise UsageError("there is nothing to compare; give --method at least once, such as --method topk")
        study = Study(
            base={"eval_every": 0.25} | shared | given,
            methods=[parse_method(baseline), *methods],
            rule=rule,
            first_seed=options.seed if first_seed is None else first_seed,
        )
    study.check()
    folder = out or (source if is_known and source else Path("results/runs") / f"decide-{study.digest}")
    ends_at = time.monotonic() + parse_duration(budget)
    with ForkServer(TRAIN) as server, LiveLine("bench decide") as live:
        search = Search(
            study=study,
            methods=study.plan(server),
            rule=DecisionRule(**study.rule, num_candidates=len(study.methods) - 1),
            folder=folder,
            server=server,
            live=live,
            ends_at=ends_at,
            checks=not (is_known and given.keys() & LINK_OPTIONS),
        )
        try:
            answer = search.run(range(study.first_seed, min(study.first_seed + max_seeds, MAX_SEED + 1)))
        except Interrupted:
            raise Interrupted("stopped by the user; the same command continues") from None
    write_files(answer, folder)
    if as_json:
        print_json(to_dict(answer))
    else:
        print_answer(answer, stdout_console())
        print(f"The runs, step times and the decision are in {folder}", file=sys.stderr)
    for sentence in answer.warnings:
        warn(sentence)
    if any(each.verdict == "open" for each in answer.decisions):
        raise typer.Exit(OPEN)


COMMAND = Command(function=decide, epilog=EXAMPLES, panel=ANSWER)
